"""`treadle bench`: its commands and their options."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .bench_engine import engine_command
from .bench_errors import run_cli

if TYPE_CHECKING:
    from ..bench.plan import Workload
    from ..bench.samples import Result

app = typer.Typer(
    name="bench",
    help="Measure servers: any OpenAI-compatible one, several side by side.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TARGETS, LOAD, OUTPUT = "Targets", "Load", "Output"


def _option(*flags: str, help_: str, panel: str, kind: str | None = None) -> Any:
    return typer.Option(*flags, help=help_, rich_help_panel=panel, metavar=kind)


@app.command("run")
def run_command(
    workload: Annotated[
        list[str],
        _option("--workload", "-w", help_="NAME, NAME:OPTION=VALUE,... or a trace.jsonl.", panel=LOAD, kind="NAME"),
    ],
    start: Annotated[
        list[str] | None,
        _option("--start", help_="A server's command line, started and stopped here.", panel=TARGETS, kind="COMMAND"),
    ] = None,
    url: Annotated[
        list[str] | None, _option("--url", help_="A server that runs already.", panel=TARGETS, kind="URL")
    ] = None,
    name: Annotated[
        list[str] | None,
        _option("--name", help_="Its name in tables, in the targets' order: starts, then URLs.", panel=TARGETS),
    ] = None,
    model: Annotated[
        list[str] | None,
        _option(
            "--model", help_="Its model, in the same order; one for all. Default: the first listed.", panel=TARGETS
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help="Key for all targets.", envvar="TREADLE_API_KEY", rich_help_panel=TARGETS),
    ] = None,
    start_timeout: Annotated[
        float, _option("--start-timeout", help_="What a server may take to get ready.", panel=TARGETS, kind="SECONDS")
    ] = 600.0,
    rounds: Annotated[int, _option("--rounds", help_="Rounds of each workload, targets in turn.", panel=LOAD)] = 3,
    seed: Annotated[int, _option("--seed", help_="The same seed gives the same requests.", panel=LOAD)] = 0,
    endpoint: Annotated[str, _option("--endpoint", help_="chat or completions.", panel=LOAD, kind="NAME")] = "chat",
    silence: Annotated[
        float, _option("--silence", help_="How long an answer may say nothing.", panel=LOAD, kind="SECONDS")
    ] = 120.0,
    goodput: Annotated[
        str,
        _option(
            "--goodput",
            help_="Limits of a good answer: seconds to its first token, and for each after it.",
            panel=LOAD,
            kind="TTFT,EACH",
        ),
    ] = "2,0.2",
    max_lag: Annotated[
        float,
        _option(
            "--max-lag",
            help_="How late the client may be (p99) before the run is given up.",
            panel=LOAD,
            kind="SECONDS",
        ),
    ] = 0.05,
    json: Annotated[Path | None, _option("--json", help_="Write the result here.", panel=OUTPUT, kind="FILE")] = None,
    html: Annotated[Path | None, _option("--html", help_="Write a page with plots.", panel=OUTPUT, kind="FILE")] = None,
) -> None:
    """Run WORKLOADs against every target, interleaved round by round, and compare all with the first."""
    from ..bench.run import Plan, run

    def work(watcher: Any, keep: Any) -> Coroutine[Any, Any, Result]:
        limits = _goodput(goodput)
        plan = Plan(
            rounds=[
                [within(limits, made) for given in workload for made in workloads_of(given, seed, number)]
                for number in range(1, _at_least_one(rounds) + 1)
            ],
            starts=start or (),
            urls=url or (),
            names=name or (),
            models=_for_each(model or [], len(start or ()) + len(url or ())),
            endpoint=_endpoint(endpoint),
            api_key=api_key,
            silence_s=silence,
            start_timeout_s=start_timeout,
            max_lag_s=max_lag,
        )
        return run(plan, watcher, keep)

    raise typer.Exit(_run(work, json, html))


app.command("engine")(engine_command)


@app.command("compare")
def compare_command(
    before: Annotated[Path, typer.Argument(help="The result to compare with.", metavar="A.json")],
    after: Annotated[Path, typer.Argument(help="The result to judge.", metavar="B.json")],
    limit: Annotated[
        list[str] | None,
        typer.Option("--limit", help="FIGURE=RATIO: how much worse it may be.", metavar="FIGURE=RATIO"),
    ] = None,
) -> None:
    """Say whether B is worse than A. Exit code 1 where a figure is over its limit."""
    from ..bench.compare import compare
    from ..bench.store import load
    from ..bench.tables import comparison_table

    def judge() -> int:
        comparison = compare(load(before), load(after), _limits(limit or []))
        _console().print(comparison_table(comparison))
        return 0 if comparison.passed else 1

    raise typer.Exit(run_cli(judge))


@app.command("report")
def report_command(
    result: Annotated[Path, typer.Argument(help="What `run --json` wrote.", metavar="RESULT.json")],
    html: Annotated[Path | None, _option("--html", help_="Write a page with plots.", panel=OUTPUT, kind="FILE")] = None,
) -> None:
    """Show a result again, or write its page."""
    from ..bench.store import load

    raise typer.Exit(run_cli(lambda: _show(load(result), html)))


@app.command("workloads")
def workloads_command() -> None:
    """List the workloads, what each is for, and its options with their defaults."""
    from ..bench.workloads import KINDS, SWEEP_ABOUT, SWEEP_DEFAULTS

    entries = {name: (kind.about, kind.defaults) for name, kind in KINDS.items()}
    for name, (about, defaults) in (entries | {"sweep": (SWEEP_ABOUT, SWEEP_DEFAULTS)}).items():
        print(f"{name}: {about}")
        print("    " + " ".join(f"{key}={value:g}" for key, value in defaults.items()))


def workloads_of(given: str, seed: int, round_: int) -> list[Workload]:
    """The workloads that `NAME`, `NAME:OPTION=VALUE,...` or a trace's path stands for. A trace is the same in every
    round. Raises BenchError."""
    from ..bench.trace import read_trace
    from ..bench.workloads import build

    name, _, options = given.partition(":")
    if name.endswith(".jsonl"):
        return [read_trace(Path(given))]
    return build(name, seed, _numbers(options), round_=round_)


def within(limits: tuple[float, float], workload: Workload) -> Workload:
    """The workload with these limits of a good answer."""
    import msgspec

    return msgspec.structs.replace(workload, goodput=limits)


def _goodput(text: str) -> tuple[float, float]:
    from ..bench.errors import BenchError

    try:
        first, each = (float(part) for part in text.split(","))
    except ValueError:
        first = each = 0.0
    if not (0 < first < float("inf") and 0 < each < float("inf")):
        raise BenchError(f"--goodput {text}: give two times in seconds above 0, for example 2,0.2")
    return first, each


def _numbers(text: str) -> dict[str, float]:
    from ..bench.errors import BenchError

    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        try:
            found[key.strip()] = float(value)
        except ValueError:
            raise BenchError(f"'{part}' is not OPTION=NUMBER: write for example burst:c=16,tokens=32") from None
    return found


def _limits(given: list[str]) -> dict[str, float]:
    limits: dict[str, float] = {}
    for entry in given:
        limits |= _numbers(entry.replace(",", ""))
    return limits


def _for_each(models: list[str], targets: int) -> list[str]:
    return models * targets if len(models) == 1 else models


def _at_least_one(rounds: int) -> int:
    from ..bench.errors import BenchError

    if rounds < 1:
        raise BenchError(f"--rounds {rounds}: give at least 1")
    return rounds


def _endpoint(given: str) -> Any:
    from ..bench.errors import BenchError
    from ..bench.wire import PATHS

    if given not in PATHS:
        raise BenchError(f"--endpoint {given}: use {' or '.join(PATHS)}")
    return given


def _run(work: Callable[[Any, Any], Coroutine[Any, Any, Result]], json: Path | None, html: Path | None) -> int:
    from ..bench.store import check_writable, save
    from ..bench.tables import LiveTable

    def keep(result: Result) -> None:
        if json is not None:
            save(result, json)

    def go() -> int:
        for path in filter(None, (json, html)):
            check_writable(path)
        with LiveTable(_console()) as live:
            result = asyncio.run(_until_signal(work(live, keep)))
        return _show(result, html)

    return run_cli(go)


async def _until_signal(work: Coroutine[Any, Any, Result]) -> Result:
    """SIGTERM ends a run as Ctrl-C does: servers that it started are stopped."""
    task = asyncio.ensure_future(work)
    with contextlib.suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _show(result: Result, html: Path | None) -> int:
    from ..bench.html import page
    from ..bench.store import write_text
    from ..bench.tables import result_table

    _console().print(result_table(result))
    if html is not None:
        write_text(html, page(result))
    return 0


def _console() -> Any:
    from rich.console import Console

    return Console()
