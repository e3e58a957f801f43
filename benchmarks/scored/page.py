"""The measured rows as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

TARGETS = {
    "R1": ("Clients that leave", "1,000 disconnects at random phases: no slot leaked, others untouched"),
    "R2": ("Overload", "10 times the load: 200 or 503 only, refusal p99 <= 50 ms, `Retry-After` true within 50 %"),
    "R3": (
        "Death and hang",
        "ready is 503 within 1 s (death) or 30 s (hang), serving again within 10 s and the load",
    ),
    "R4": ("Poison", "at least 80 requests over HTTP and gRPC: no death, no harm to others, a 4xx within 1 s"),
    "R5": ("Memory", "twice the rows that fit: preempted rows go on with the same tokens, nothing runs out"),
    "R6": ("Shutdown", "what runs comes to its end, what is new gets 503, exit code 0"),
    "R7": ("Event loop", "p99 <= 20 ms, also under hostile bodies"),
    "R8": ("Soak", "no drift of descriptors, threads and memory (2 %) over faults of all kinds"),
    "S1": ("Routes", "everything but `/health/live` wants the key"),
    "S2": ("Web pages", "with default options no page of another site gets anything"),
    "S3": ("Tenants", "nobody can tell from times what others sent: AUC <= 0.55"),
    "S4": ("Supply chain", "no pickles, no code of models, every package by hash, loaders fuzzed"),
}
HEAD = """# Reliability

Each target with what was measured, and the command that measures it again. Written by `benchmarks/reliability.py page`
from the results of the commands below; not edited by hand. What the server is protected against, and what it is not,
stands in [Security](security.md); how faults are handled in [Structure](structure.md) and
[Operations](operations.md).
"""


def written(results: Sequence[Mapping[str, Any]]) -> str:
    """The page of all `results`; the newest of a row and server counts."""
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for result in results:
        for row in result["rows"]:
            rows.setdefault(row["row"], {})[row["server"]] = {**row, "about": result["about"]}
    parts = [HEAD, *(section(name, rows[name]) for name in TARGETS if name in rows)]
    return "\n".join(parts)


def section(name: str, servers: Mapping[str, Mapping[str, Any]]) -> str:
    """One target: the figures of each server side by side."""
    title, target = TARGETS[name]
    table = {server: {figure["what"]: figure for figure in row["figures"]} for server, row in servers.items()}
    whats = dict.fromkeys(what for figures in table.values() for what in figures)
    lines = [f"## {name} {title}", "", f"{target[:1].upper()}{target[1:]}.", ""]
    lines += [cells(["", *table]), cells(["---"] * (len(table) + 1))]
    lines += [cells([what, *(shown(figures.get(what)) for figures in table.values())]) for what in whats]
    return "\n".join([*lines, "", *commands(servers.values()), ""])


def shown(figure: Mapping[str, Any] | None) -> str:
    """A figure's value, with a mark where it misses its target."""
    if figure is None:
        return "-"
    return f"**{figure['value']}** (missed)" if figure["met"] is False else str(figure["value"])


def commands(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """How it was measured: once each."""
    told = dict.fromkeys(
        f"`{row['about']['command']}` ({row['about']['date']}, {row['about']['commit']}, {row['about']['machine']})"
        for row in rows
    )
    return [f"Measured with {' and '.join(told)}."]


def cells(values: Sequence[str]) -> str:
    return "| " + " | ".join(value.replace("|", "\\|") for value in values) + " |"
