"""Typer options of `treadle bench`, as annotated types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

TARGETS, LOAD, OUTPUT = "Targets", "Load", "Output"


def _option(*flags: str, help_: str, panel: str, kind: str | None = None) -> Any:
    return typer.Option(*flags, help=help_, rich_help_panel=panel, metavar=kind)


Workloads = Annotated[
    list[str],
    _option("--workload", "-w", help_="NAME, NAME:OPTION=VALUE,... or a trace.jsonl.", panel=LOAD, kind="NAME"),
]
Starts = Annotated[
    list[str] | None,
    _option("--start", help_="A server's command line, started and stopped here.", panel=TARGETS, kind="COMMAND"),
]
Urls = Annotated[list[str] | None, _option("--url", help_="A server that runs already.", panel=TARGETS, kind="URL")]
Names = Annotated[
    list[str] | None,
    _option("--name", help_="Its name in tables, in the targets' order: starts, then URLs.", panel=TARGETS),
]
Models = Annotated[
    list[str] | None,
    _option("--model", help_="Its model, in the same order; one for all. Default: the first listed.", panel=TARGETS),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", help="Key for all targets.", envvar="TREADLE_API_KEY", rich_help_panel=TARGETS),
]
StartTimeout = Annotated[
    float, _option("--start-timeout", help_="What a server may take to get ready.", panel=TARGETS, kind="SECONDS")
]
Rounds = Annotated[int, _option("--rounds", help_="Rounds of each workload, targets in turn.", panel=LOAD)]
Seed = Annotated[int, _option("--seed", help_="The same seed gives the same requests.", panel=LOAD)]
EndpointName = Annotated[str, _option("--endpoint", help_="chat or completions.", panel=LOAD, kind="NAME")]
Silence = Annotated[
    float, _option("--silence", help_="How long an answer may say nothing.", panel=LOAD, kind="SECONDS")
]
Goodput = Annotated[
    str,
    _option(
        "--goodput",
        help_="Limits of a good answer: seconds to its first token, and for each after it.",
        panel=LOAD,
        kind="TTFT,EACH",
    ),
]
MaxLag = Annotated[
    float,
    _option(
        "--max-lag", help_="How late the client may be (p99) before the run is given up.", panel=LOAD, kind="SECONDS"
    ),
]
Json = Annotated[Path | None, _option("--json", help_="Write the result here.", panel=OUTPUT, kind="FILE")]
Html = Annotated[Path | None, _option("--html", help_="Write a page with plots.", panel=OUTPUT, kind="FILE")]
