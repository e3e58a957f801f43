"""Page of the measured rows in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

OWN = "treadle"
TARGETS = {
    "R1": ("Clients that leave", "1,000 disconnects at random moments: no slot leaked, nobody else touched"),
    "R2": ("Overload", "ten times the clients that fit: 200 or 503 only, refusal p99 <= 50 ms, `Retry-After` true"),
    "R3": ("Death and hang", "ready is 503 within 1 s (death) or 30 s (hang), and 200 within 10 s and the load"),
    "R4": ("Poison", "at least 80 requests over HTTP and gRPC: no death, no harm to others, a 4xx within 1 s"),
    "R5": ("Memory", "twice the tokens that fit: rows give way and go on with the same tokens, nothing runs out"),
    "R6": ("Shutdown", "what runs comes to its end, what is new gets 503, exit code 0; a second signal ends it now"),
    "R7": ("Event loop", "`/health/live` within 20 ms (p99), also under hostile bodies"),
    "R8": ("Chaos", "faults of all kinds: every request ends once, no wrong token, no drift of more than 2 %"),
    "S1": ("Routes", "everything but `/health/live` wants a key, and what is an admin's wants an admin's"),
    "S2": ("Web pages", "with default options no page of another site gets anything"),
    "S3": ("Tenants", "no key's holder can tell from times what another's sent: AUC <= 0.55"),
    "S4": ("Supply chain", "no pickles and no code of models; hostile folders end in one line; packages by hash"),
}
PROGRAM = "python benchmarks/reliability.py run MODEL"
PROGRAMS = {
    "R4": "python benchmarks/poison.py MODEL --out FILE.json",
    "R8": "python benchmarks/chaos.py --requests 100000 --out FOLDER",
}
HEAD = """# Reliability

Each target with its figures and the command that measures them again. `benchmarks/reliability.py page` writes this page
from the commands' results; it is not edited by hand. A figure that misses its target is **bold**, in Treadle's column
alone: the other servers, in the versions that `benchmarks/peers.py` installs, promise none of this, and their columns
say what they did with the same model and their default options ("-": it needs what only Treadle has or tells). Times
hold for the load average that stands with each command, most of it the measurement's own on a quiet machine. What the
server is protected from, and what it is not, stands in [Security](security.md); how faults are handled in
[Operations](operations.md).

```
python benchmarks/tiny_model.py tiny
python benchmarks/peers.py install mlx-lm vllm-mlx
python benchmarks/reliability.py run tiny --server treadle --server mlx-lm --server vllm-mlx --out rows.json
python benchmarks/poison.py tiny --server treadle --server mlx-lm --server vllm-mlx --out poison.json
python benchmarks/chaos.py --requests 100000 --out chaos
python benchmarks/reliability.py page rows.json poison.json chaos/reliability.json > docs/reliability.md
```
"""


def written(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of all `results`. Of a row and server that one program has measured several times, the last
    counts; figures of different programs stand together."""
    parts: dict[tuple[str, str], dict[str, Row]] = {}
    for result in results:
        source = result["about"]
        for row in result["rows"]:
            programs = parts.setdefault((row["row"], row["server"]), {})
            programs[program(source["command"])] = {"figures": row["figures"], "abouts": [source]}
    rows: dict[str, dict[str, Row]] = {name: {} for name in TARGETS}
    for (name, server), programs in parts.items():
        rows[name][server] = joined(list(programs.values()))
    shown = {name: ordered(servers) for name, servers in rows.items()}
    return "\n".join([HEAD, summary(shown), *(section(name, servers) for name, servers in shown.items())])


def program(command: str) -> str:
    """Return the script in a command such as `python benchmarks/chaos.py --seed 1`."""
    return next((word for word in command.split() if word.endswith(".py")), command)


def joined(rows: Sequence[Row]) -> Row:
    return {key: [entry for row in rows for entry in row[key]] for key in ("figures", "abouts")}


def ordered(servers: Mapping[str, Row]) -> dict[str, Row]:
    """Return the servers, Treadle first."""
    return {server: servers[server] for server in sorted(servers, key=lambda name: (name != OWN, name))}


def summary(rows: Mapping[str, Mapping[str, Row]]) -> str:
    """List every target with the number of Treadle's figures that meet it."""
    lines = [cells(["", "target", "figures that meet it"]), cells(["---"] * 3)]
    for name, (title, target) in TARGETS.items():
        link = f"[{name} {title}](#{anchor(f'{name} {title}')})"
        lines.append(cells([link, target, verdict(rows[name].get(OWN))]))
    return "\n".join([*lines, ""])


def verdict(row: Row | None) -> str:
    if row is None:
        return "not measured"
    judged = [figure["met"] for figure in row["figures"] if figure["met"] is not None]
    return f"{sum(judged)} of {len(judged)}" if all(judged) else f"**{sum(judged)} of {len(judged)}**"


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def section(name: str, servers: Mapping[str, Row]) -> str:
    """Format one target: the figures of each server side by side."""
    title, target = TARGETS[name]
    head = [f"## {name} {title}", "", f"{target[:1].upper()}{target[1:]}.", ""]
    if not servers:
        return "\n".join([*head, f"Not measured yet: `{PROGRAMS.get(name, PROGRAM)}`.", ""])
    table = {server: {figure["what"]: figure for figure in row["figures"]} for server, row in servers.items()}
    labels = dict.fromkeys(label for figures in table.values() for label in figures)
    lines = [*head, cells(["", *table]), cells(["---"] * (len(table) + 1))]
    for label in labels:
        values = [shown(figures.get(label), judged=server == OWN) for server, figures in table.items()]
        lines.append(cells([label, *values]))
    return "\n".join([*lines, "", "  \n".join(commands(servers)), ""])


def shown(figure: Mapping[str, Any] | None, *, judged: bool) -> str:
    if figure is None:
        return "-"
    value = str(figure["value"])
    return f"**{value}**" if judged and figure["met"] is False else value


def commands(servers: Mapping[str, Row]) -> Iterable[str]:
    """Return the commands of the measurements, once each."""
    return dict.fromkeys(measured(source) for row in servers.values() for source in row["abouts"])


def measured(source: Mapping[str, str]) -> str:
    return f"`{source['command']}`, {source['date']}, commit {source['commit']}, {source['machine']}."


def cells(values: Sequence[str]) -> str:
    return "| " + " | ".join(value.replace("|", "\\|").replace("\n", " ") for value in values) + " |"
