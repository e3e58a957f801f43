"""What a step that verifies drafts waits for, on a GPU, and what would make it shorter.

    python benchmarks/gpu/verifying.py [--family qwen3] [--bits 16] [--layers 36] [--rows 1 2 4] [--drafts 1 3 7 8]
        [--length 640] [--steps 24] [--early 1 4 12] [--few-rows 8 16] [--small]

A model of `family_shapes` with random weights runs in this process. Nothing is prepared while a step verifies, so it
takes its launches and the device's time one behind the other, as far as these don't overlap. Verifying steps are timed
in turns of a few steps, as

- `single`: each operation is launched by itself. The device begins at once.
- `graphs`: in CUDA graphs, which take the host less. MLX hands over the first one when it is full.
- `early`: in graphs, where the residual stream behind the `--early` layers is evaluated first, so that the first graphs
  are short. A server takes this way or `single`, as its warm-up finds.

Columns: medians of a step from its start to its result, and of how long starting it took the host, in ms; of plain
steps that are prepared ahead, for comparison. A second table splits the steps of `single`: starting them into building
the segments (build), columns and page tables (begin), the pass's graph (graph) and handing it to the device (launch);
then waiting for the tokens (wait) and the rest of finishing them (settle). The device's own time (device) is that of a
step behind other work, which hides all launches. `--few-rows` are numbers of rows up to which products of heavy layers
are our own ones (`fused/merged_linear`), each in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.gpu.launch_waits import PARTS, Watch  # noqa: E402

TURN = 6
"""Steps of one way before the next one has its turn; the first is not counted."""
COVER_SIZE, COVER = 8192, 12
"""Products of so large square matrices that hide a step's launches: some 20 ms."""


class Ways:
    """Sets how a `runner` launches steps that verify."""

    names = (
        "single",
        "single, early",
        "single, ahead",
        "single, early, ahead",
        "graphs, early",
        "graphs, early, ahead",
    )

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._prepare = runner._backend.prepare
        selection = runner._backend._forward._selection
        self._take = selection.take_early
        selection.take_early = self._taken
        self._early = True

    def use(self, name: str) -> None:
        self._runner.verifies_in_graphs, self._early = "graphs" in name, "early" in name
        self._runner._backend.prepare = self._prepare if "ahead" in name else lambda: None

    def _taken(self) -> Sequence[Any]:
        early: Sequence[Any] = self._take()
        return early if self._early else ()


class Verifying:
    """Rows of `runner` that decode and verify drafts, all of which are as good as random."""

    def __init__(self, runner: Any, rows: int, length: int, vocabulary: int) -> None:
        from benchmarks.gpu.steps import Rows

        self._runner = runner
        self._batch = Rows(runner, [length] * rows, 4096, vocabulary=vocabulary)
        self._batch.run(1)
        self._places = list(self._batch.position)

    def plain_ms(self, steps: int) -> tuple[float, float]:
        """Milliseconds of a plain step, and of starting it."""
        self._batch.run(max(self._batch.position) + steps)
        self._places = list(self._batch.position)
        return self._batch.decode_ms(), self._batch.host_ms()

    def step(self, drafts: int, cover: Callable[[], object] = lambda: None) -> tuple[float, float]:
        """Seconds of a step with so many drafts a row, and of starting it; both from before `cover`, which may give the
        device other work first."""
        from treadle.core.plan import DecodeRow, StepPlan

        decode = tuple(DecodeRow(str(i), place, drafts) for i, place in enumerate(self._places))
        with self._runner.filled_drafts():
            began = time.perf_counter()
            cover()
            self._runner.start(StepPlan(step=0, decode=decode))
            started = time.perf_counter()
            result = self._runner.finish()
            ended = time.perf_counter()
        assert not result.failures, result.failures
        for row in result.rows:
            self._places[int(row.id)] += len(row.tokens)
        return ended - began, started - began


class Parts:
    """Splits verifying steps into parts, in ms, and finds the device's own time."""

    names = (*PARTS, "wait", "settle", "device")

    def __init__(self, runner: Any) -> None:
        import mlx.core as mx

        from treadle.runner.verification import Verified

        self._watch = Watch.of(runner)
        self._watch.wrap(Verified, "__init__", "wait")
        self._square = mx.ones((COVER_SIZE, COVER_SIZE), mx.bfloat16)
        mx.eval(self._square)

    def _cover(self) -> Any:
        import mlx.core as mx

        found = self._square
        for _ in range(COVER):
            found = found @ self._square
        mx.async_eval(found)
        return found

    def _cover_s(self) -> float:
        import mlx.core as mx

        began = time.perf_counter()
        mx.eval(self._cover())
        return time.perf_counter() - began

    def take(self, verifying: Verifying, drafts: int, steps: int) -> dict[str, float]:
        """Medians of steps with so many drafts a row."""
        found: dict[str, list[float]] = {name: [] for name in self.names}
        for _ in range(steps):
            self._watch.take()
            whole, start = verifying.step(drafts)
            parts = self._watch.take()
            for name in (*PARTS, "wait"):
                found[name].append(parts[name])
            found["settle"].append(whole - start - parts["wait"])
        alone = statistics.median(self._cover_s() for _ in range(steps))
        found["device"] = [verifying.step(drafts, self._cover)[0] - alone for _ in range(steps)]
        return {name: 1e3 * statistics.median(some) for name, some in found.items()}


def measure_ways(options: argparse.Namespace, runner: Any, vocabulary: int) -> None:
    ways = Ways(runner)
    print("| rows | drafts | plain (host) | " + " | ".join(f"{way} (host)" for way in ways.names) + " |")
    print("|---|---|---|" + "---|" * len(ways.names))
    for rows in options.rows:
        verifying = Verifying(runner, rows, options.length, vocabulary)
        plain, host = verifying.plain_ms(options.steps)
        for drafts in options.drafts:
            found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways.names}
            while len(found["single"]) < options.steps:
                for way in ways.names:
                    ways.use(way)
                    found[way] += [verifying.step(drafts) for _ in range(TURN)][1:]
            cells = [[1e3 * statistics.median(part) for part in zip(*some, strict=True)] for some in found.values()]
            told = " | ".join(f"{step:.2f} ({start:.2f})" for step, start in cells)
            print(f"| {rows} | {drafts} | {plain:.2f} ({host:.2f}) | {told} |", flush=True)
        verifying._batch.release()
    ways.use("single")


def measure_parts(options: argparse.Namespace, runner: Any, vocabulary: int) -> None:
    """Print the parts of steps whose operations are launched one by one."""
    parts = Parts(runner)
    print("\n| rows | drafts | " + " | ".join(Parts.names) + " |\n|---|---|" + "---|" * len(Parts.names))
    for rows in options.rows:
        verifying = Verifying(runner, rows, options.length, vocabulary)
        for drafts in options.drafts:
            took = parts.take(verifying, drafts, options.steps)
            print(f"| {rows} | {drafts} | " + " | ".join(f"{ms:.2f}" for ms in took.values()) + " |", flush=True)
        verifying._batch.release()


def child(options: argparse.Namespace) -> None:
    from benchmarks.arguments import prepare_device

    prepare_device()
    from benchmarks.gpu.families_steps import load_made, make
    from benchmarks.gpu.family_shapes import config_of

    from treadle.runner.drafting.lookup import LookupDrafter
    from treadle.runner.fused import decoder, merged_linear
    from treadle.runner.model_runner import ModelRunner

    (merged_linear.FEW_ROWS,), decoder.EARLY = options.few_rows, tuple(options.early)
    config = config_of(options.family, small=options.small)
    module, config = make(config | ({"num_hidden_layers": options.layers} if options.layers else {}), options.bits)
    model = load_made(module, config, 8 << 30, max(options.rows))
    runner = ModelRunner(model, drafter=LookupDrafter())
    if runner._backend.name != "paged":
        sys.exit(f"the model is not paged: {model.compute.summary()}")
    if model.graphs is None and not options.small:
        sys.exit("MLX has no switch for CUDA graphs here: all steps are launched in the same way")
    print(f"{model.compute.summary()}; our products up to {merged_linear.FEW_ROWS} rows", flush=True)
    measure_ways(options, runner, model.vocabulary)
    measure_parts(options, runner, model.vocabulary)
    runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="qwen3")
    parser.add_argument("--bits", default="16")
    parser.add_argument("--layers", type=int, default=36, help="of the model (0: as few as the shape has)")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--drafts", type=int, nargs="*", default=[1, 3, 7, 8])
    parser.add_argument("--length", type=int, default=640, help="tokens of a row's prompt")
    parser.add_argument("--steps", type=int, default=24, help="verifying steps of each way")
    parser.add_argument("--early", type=int, nargs="*", default=[1, 4, 12], help="layers, ascending")
    parser.add_argument("--few-rows", type=int, nargs="*", default=[8])
    parser.add_argument("--small", action="store_true", help="small sizes")
    options = parser.parse_args()
    if len(options.few_rows) == 1:
        child(options)
        return
    failed = 0
    for few in options.few_rows:
        command = [sys.executable, *sys.argv, "--few-rows", str(few)]
        failed += subprocess.run(command, check=False).returncode != 0
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
