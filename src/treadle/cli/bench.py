"""Commands of `treadle bench`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import bench_options as options
from .bench_engine import engine_command
from .bench_errors import run_reporting_errors

if TYPE_CHECKING:
    from ..bench.plan import Workload
    from ..bench.samples import Result

app = typer.Typer(
    name="bench",
    help="Measure servers: any OpenAI-compatible one, several side by side.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("run")
def run_command(
    workload: options.Workloads,
    start: options.Starts = None,
    url: options.Urls = None,
    name: options.Names = None,
    model: options.Models = None,
    api_key: options.ApiKey = None,
    start_timeout: options.StartTimeout = 600.0,
    rounds: options.Rounds = 3,
    seed: options.Seed = 0,
    endpoint: options.EndpointName = "chat",
    silence: options.Silence = 120.0,
    goodput: options.Goodput = "2,0.2",
    max_lag: options.MaxLag = 0.05,
    json: options.Json = None,
    html: options.Html = None,
) -> None:
    """Run WORKLOADs against every target, interleaved round by round, and compare all with the first."""
    from ..bench.run import Plan, run

    def plan() -> Plan:
        return Plan(
            rounds=_rounds(workload, rounds, seed, _goodput(goodput)),
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

    raise typer.Exit(_run(lambda watcher, keep: run(plan(), watcher, keep), json, html))


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
    """Say whether B is worse than A. Exit code 1 where a figure is over its limit, 2 where they can't be compared."""
    from ..bench.compare import compare
    from ..bench.store import load
    from ..bench.tables import comparison_table

    def judge() -> int:
        comparison = compare(load(before), load(after), _limits(limit or []))
        _console().print(comparison_table(comparison))
        return 0 if comparison.passed else 1

    raise typer.Exit(run_reporting_errors(judge, error_code=2))


@app.command("report")
def report_command(
    result: Annotated[Path, typer.Argument(help="What `run --json` wrote.", metavar="RESULT.json")],
    html: options.Html = None,
) -> None:
    """Show a result again, or write its page."""
    from ..bench.store import load

    raise typer.Exit(run_reporting_errors(lambda: _show(load(result), html)))


@app.command("workloads")
def workloads_command() -> None:
    """List the workloads, what each is for, and its options with their defaults."""
    from ..bench.workloads import KINDS, SWEEP_ABOUT, SWEEP_DEFAULTS

    entries = {name: (kind.about, kind.defaults) for name, kind in KINDS.items()}
    for name, (about, defaults) in (entries | {"sweep": (SWEEP_ABOUT, SWEEP_DEFAULTS)}).items():
        print(f"{name}: {about}")
        print("    " + " ".join(f"{key}={value:g}" for key, value in defaults.items()))


def workloads_of(text: str, seed: int, round_: int) -> list[Workload]:
    """Build the workloads that `NAME`, `NAME:OPTION=VALUE,...` or a trace's path stands for. A trace is the same in
    every round. Raises BenchError."""
    from ..bench.trace import read_trace
    from ..bench.workloads import build

    name, _, numbers = text.partition(":")
    if name.endswith(".jsonl"):
        return [read_trace(Path(text))]
    return build(name, seed, _numbers(numbers), round_=round_)


def _rounds(names: list[str], count: int, seed: int, goodput: tuple[float, float]) -> list[list[Workload]]:
    """Build the workloads of `count` rounds, each with these limits of a good answer. Raises BenchError."""
    import msgspec

    return [
        [msgspec.structs.replace(made, goodput=goodput) for name in names for made in workloads_of(name, seed, number)]
        for number in range(1, _at_least_one(count) + 1)
    ]


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


def _limits(text: list[str]) -> dict[str, float]:
    limits: dict[str, float] = {}
    for entry in text:
        limits |= _numbers(entry.replace(",", ""))
    return limits


def _for_each(models: list[str], targets: int) -> list[str]:
    return models * targets if len(models) == 1 else models


def _at_least_one(rounds: int) -> int:
    from ..bench.errors import BenchError

    if rounds < 1:
        raise BenchError(f"--rounds {rounds}: give at least 1")
    return rounds


def _endpoint(text: str) -> Any:
    from ..bench.errors import BenchError
    from ..bench.wire import PATHS

    if text not in PATHS:
        raise BenchError(f"--endpoint {text}: use {' or '.join(PATHS)}")
    return text


def _run(work: Callable[[Any, Any], Coroutine[Any, Any, Result]], json: Path | None, html: Path | None) -> int:
    from ..bench.store import check_writable, save
    from ..bench.tables import LiveTable

    measured: Result | None = None

    def keep(result: Result) -> None:
        nonlocal measured
        measured = result
        if json is not None:
            save(result, json)

    def measure_and_show() -> int:
        for path in filter(None, (json, html)):
            check_writable(path)
        try:
            with LiveTable(_console()) as live:
                asyncio.run(_until_signal(work(live, keep)))
        finally:  # an error or an interrupt takes none of the rounds that are over
            if measured is not None:
                _show(measured, html)
        return 0

    return run_reporting_errors(measure_and_show)


async def _until_signal(work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`; SIGTERM cancels it as Ctrl-C does, which stops the servers that it started."""
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
