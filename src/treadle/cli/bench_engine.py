"""`treadle bench engine`: Treadle's engine against mlx-lm's BatchGenerator, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import Settings
from .bench_errors import run_reporting_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..bench.engine_figures import EngineResult


def engine_command(
    model: Annotated[str, typer.Argument(help="A folder, a hub id or 'demo'.", metavar="[MODEL]")] = "demo",
    batch: Annotated[
        str, typer.Option("--batch", help="How many prompts at once, each size in turn.", metavar="N,N,...")
    ] = "1,8,32",
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens in each prompt.", metavar="TOKENS")] = 128,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens to generate from each.", metavar="TOKENS")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds of each size, both engines in turn.")] = 3,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same prompts.")] = 0,
    prefill_tokens: Annotated[
        int, typer.Option("--prefill-tokens", help="As of `serve`: prompt tokens a step at most.", metavar="TOKENS")
    ] = Settings.prefill_tokens,
    threads: Annotated[
        int | None, typer.Option("--threads", help="As of `serve`: BLAS threads at most. Default: measured.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the result here.", metavar="FILE")] = None,
) -> None:
    """Run Treadle's engine and mlx-lm's BatchGenerator in this process, on the same weights and prompts."""

    def measure_and_print() -> int:
        _show(_measure(model, batch, json, prompt, tokens, rounds, seed, prefill_tokens, threads))
        return 0

    raise typer.Exit(run_reporting_errors(measure_and_print))


def _measure(model: str, batch: str, json: Path | None, *options: Any) -> EngineResult:
    from ..bench.inprocess import EngineBench, measure
    from ..bench.store import check_writable, save
    from ..compose.checks import require_installed
    from ..config import Settings
    from ..models.resolve import resolve

    bench = EngineBench(sizes(batch), *options)
    if json is not None:
        check_writable(json)
    progress = _progress()
    require_installed(model)
    folder = resolve(Settings(model=model), progress)
    result = measure(folder.path, folder.name, bench, progress)
    if json is not None:
        save(result, json)
    return result


def sizes(given: str) -> tuple[int, ...]:
    """Parse the batch sizes in "1,8,32". Raises BenchError."""
    from ..bench.errors import BenchError

    try:
        return tuple(int(part) for part in given.split(",") if part.strip())
    except ValueError:
        raise BenchError(f"--batch {given}: give numbers with commas between, for example 1,8,32") from None


def _progress() -> Callable[[str], None]:
    """Return a printer of one line a stage on standard error: standard output holds the table alone."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    return lambda stage: console.print(stage, style="dim", markup=False)


def _show(result: EngineResult) -> None:
    from rich.console import Console

    from ..bench.engine_table import engine_table

    Console().print(engine_table(result))
