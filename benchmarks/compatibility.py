"""Write docs/compatibility.md from the result files of `python -m benchmarks.clients`.

    python benchmarks/compatibility.py

The files are docs/figures/compatibility/TARGET.json: Treadle's own, and one for each other server.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.clients.results import Kind, Results, Row  # noqa: E402

PAGE = ROOT / "docs" / "compatibility.md"
FOLDER = ROOT / "docs" / "figures" / "compatibility"
OURS = "treadle"
TITLES = {OURS: "Treadle", "mlx-lm": "mlx_lm.server", "vllm-mlx": "vllm-mlx", "vllm-mlx-batched": "vllm-mlx, batched"}
MOST_CHARACTERS = 160
RUN = "python -m benchmarks.clients"
GREEN, RED, NO_ROUTE = "🟩", "🟥", "⬜ no such route"

HEAD = """# Compatibility

Real clients, SDKs and conformance suites against the server, unmodified. `benchmarks/compatibility.py` writes this page
from the results of `python -m benchmarks.clients`; every table has the command that repeats it, and the head of
[benchmarks/clients](../benchmarks/clients/__main__.py) lists what to install. [Clients](clients.md) says how to
connect them.

"""
CLIENTS = f"""## Clients

Each client runs headless in a home and a project of its own, with the settings that
[`treadle connect`](clients.md#connect-a-client) writes. Its task is to edit a file, run a command, and report the
output. The model's turns are scripted and the rest of the server is the real one, so this shows the protocol and not
the ability of a model. Clients marked as requests are editors and web pages that do not run headless: their requests
are replayed. Crush and Goose are not here: their packages download a program from another site.

`{RUN} clients`

"""
SUITES = f"""## Conformance suites

llm-comply checks answers against the schema of each API, and schemathesis holds the server to its own OpenAPI document
with generated requests. All servers have the same tiny random model, whose answers may be empty: a failed test of
llm-comply is run once more. It reads text alone: Treadle's image tests run against a tiny random Qwen3-VL, and those of
the others can't pass.

`{RUN} suites`, for other servers with `--peer NAME`

"""
SDKS = f"""## SDKs and libraries

A chat case holds a conversation of three turns and sends back each received message whole. The other cases ask for
structured output or tool calls, and read them with the SDK's own helpers. All servers have the same tiny random model:
it calls a tool, and writes valid JSON, only where the server makes it.

`{RUN} sdks`, for other servers with `--peer NAME`

"""


def page(results: Sequence[Results]) -> str:
    """Return the page. The first results are Treadle's."""
    return "".join([HEAD, *_sources(results), CLIENTS, *_clients(results[0]), *_compared(results)])


def _sources(results: Sequence[Results]) -> Iterator[str]:
    yield "| server | version | measured | commit of this repository |\n|---|---|---|---|\n"
    for one in results:
        yield f"| {TITLES[one.target]} | {one.version} | {one.measured} | {one.commit} |\n"
    yield "\n"


def _clients(ours: Results) -> Iterator[str]:
    yield "| client | version | API | result | requests, or the reason |\n|---|---|---|---|---|\n"
    for row in _of(ours, "client"):
        result = f"{_cell(row.passed)} {row.case}"
        yield f"| {row.name} | {row.version} | {row.api} | {result} | {_text(row.detail)} |\n"
    yield from _missing(ours)


def _missing(ours: Results) -> Iterator[str]:
    if ours.missing:
        yield f"\nNot installed in this run: {', '.join(sorted(ours.missing))}.\n"
    yield "\n"


def _compared(results: Sequence[Results]) -> Iterator[str]:
    for head, kind in ((SUITES, "suite"), (SDKS, "sdk")):
        yield head
        yield from _totals(results, kind)  # type: ignore[arg-type]
        yield from _reasons(results, kind)  # type: ignore[arg-type]


def _totals(results: Sequence[Results], kind: Kind) -> Iterator[str]:
    yield _line(["suite" if kind == "suite" else "SDK", "version", "API", *(TITLES[one.target] for one in results)])
    yield _line(["---"] * (3 + len(results)))
    found = [_grouped(_of(one, kind)) for one in results]
    for group in dict.fromkeys(group for groups in found for group in groups):
        first = next(groups[group][0] for groups in found if group in groups)
        yield _line([first.name, first.version, first.api, *(_total(groups.get(group, [])) for groups in found)])
    yield "\n"


def _grouped(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.name, row.api), []).append(row)
    return groups


def _total(rows: Sequence[Row]) -> str:
    if not rows:
        return "not run"
    if _is_missing(rows):
        return NO_ROUTE
    passed = sum(row.passed for row in rows)
    detail = f": {rows[0].detail}" if len(rows) == 1 and rows[0].detail and rows[0].name == "schemathesis" else ""
    return f"{_cell(passed == len(rows))} {passed} of {len(rows)}{detail}"


def _is_missing(rows: Sequence[Row]) -> bool:
    """Whether the server does not have the routes of these cases: all but tests of optional routes ended with 404."""
    failed = [row for row in rows if not row.passed]
    return 2 * len(failed) > len(rows) and all("404" in row.detail or "Not Found" in row.detail for row in failed)


def _reasons(results: Sequence[Results], kind: Kind) -> Iterator[str]:
    """Write the failed cases of each server, with their reasons."""
    for one in results:
        groups = [rows for rows in _grouped(_of(one, kind)).values() if not _is_missing(rows)]
        reasons: dict[tuple[str, str], list[str]] = {}
        for row in (row for rows in groups for row in rows if not row.passed):
            reasons.setdefault((row.name, _text(row.detail) or "no reason given"), []).append(row.case)
        if not reasons:
            continue
        yield f"{TITLES[one.target]}, failed:\n\n"
        for (name, reason), cases in reasons.items():
            yield f"- {name}, {', '.join(cases)}: {reason}\n"
        yield "\n"


def _of(results: Results, kind: Kind) -> list[Row]:
    return [row for row in results.rows if row.kind == kind]


def _cell(passed: bool) -> str:
    return GREEN if passed else RED


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _text(detail: str) -> str:
    """Return a reason for a table's cell: no markup, no values that are other ones in every run."""
    plain = re.sub(r"\{.*\} is not valid", "the value is not valid", detail, flags=re.DOTALL)
    plain = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1", plain)
    plain = "".join(sign for sign in " ".join(plain.split()) if sign.isascii() and sign.isprintable())
    plain = plain if len(plain) <= MOST_CHARACTERS else f"{plain[:MOST_CHARACTERS].rsplit(' ', 1)[0]} ..."
    return plain.translate({ord(sign): f"\\{sign}" for sign in "|*_<>[]`"})


def found() -> list[Results]:
    """Return the result files, Treadle's first."""
    loaded = {path.stem: Results.load(path) for path in FOLDER.glob("*.json")}
    return [loaded[name] for name in TITLES if name in loaded]


def main() -> None:
    PAGE.write_text(page(found()), encoding="utf-8")


if __name__ == "__main__":
    main()
