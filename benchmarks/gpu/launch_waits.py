"""Where the host waits when it starts a step behind one with a prompt's chunk, on a GPU.

    python benchmarks/gpu/launch_waits.py [--family gpt_oss] [--bits mxfp4] [--whole] [--rows 4] [--chunk 32 128 512]
        [--turns 12] [--environment MLX_MAX_OPS_PER_BUFFER=300 ...] [--graphs] [--small]

A model of `family_shapes`, with few layers or `--whole`, has random weights and runs in this process, as in a server's
engine: each step is started before the last one is finished. In turns one step has a chunk of a long prompt beside the
rows that decode, and three have none. For the step with the chunk, the next one and the one behind it, medians: the
time from the end of the step before to its own, and how long starting it took the host, of that the parts: building
the segments (build), columns and page tables (begin), the graph of the pass (graph), and handing all of it to the
device (launch). Of a step that only decodes these are the same wherever it stands, unless something waits. The process
is started once without and once for each of the environment's variables. With `--graphs` steps with chunks use CUDA
graphs, too, which in a server they don't.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

PLAIN = 3
PARTS = ("build", "begin", "graph", "launch")
Times = dict[str, float]


class Watch:
    """Seconds in the parts of starting a step; of parts in others, those of the inner one are not the outer one's."""

    def __init__(self) -> None:
        self.seconds: Times = defaultdict(float)
        self._inner = [0.0]

    @classmethod
    def of(cls, runner: Any) -> Watch:
        """The PARTS of starting steps of a `runner` with a paged backend."""
        import mlx.core as mx

        backend, watch = runner._backend, cls()
        places = (runner._builder, "build"), (backend, "begin"), (backend._forward, "run"), (mx, "async_eval")
        for (owner, name), part in zip(places, PARTS, strict=True):
            watch.wrap(owner, name, part)
        return watch

    def wrap(self, owner: Any, name: str, part: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            self._inner.append(0.0)
            try:
                return call(*arguments, **named)
            finally:
                took = time.perf_counter() - began
                self.seconds[part] += took - self._inner.pop()
                self._inner[-1] += took

        setattr(owner, name, timed)

    def take(self) -> Times:
        taken, self.seconds = self.seconds, defaultdict(float)
        return taken


class Steps:
    """Rows of `runner` that decode, and a long prompt of which some steps compute a chunk."""

    def __init__(self, runner: Any, rows: int, prompt: int, vocabulary: int) -> None:
        from benchmarks.gpu.steps import Rows

        self.runner = runner
        self.watch = Watch.of(runner)
        self._ids = [str(row) for row in range(rows)]
        decoding = Rows(runner, [128] * rows, 4096, vocabulary=vocabulary)
        decoding.run(1)
        self._positions = list(decoding.position)
        self._prompt = tuple(5 + i % (vocabulary - 5) for i in range(prompt))
        self._cached = 0
        self._admitted = False
        self._flying = 0
        self._ended = time.perf_counter()
        self._started: list[Times] = []
        self.finished: list[Times] = []

    def run(self, chunk: int) -> None:
        """One step with a chunk of so many tokens, or none, beside the rows; the step before it is finished."""
        from treadle.core.messages import Submit
        from treadle.core.plan import Admit, DecodeRow, PrefillChunk, StepPlan

        admit: tuple[Admit, ...] = ()
        if chunk and not self._admitted:
            admit = (Admit(request=Submit(id="long", prompt=self._prompt, max_tokens=1)),)
            self._admitted = True
        prefill = (PrefillChunk("long", self._cached, chunk),) if chunk else ()
        self._cached += chunk
        decode = tuple(DecodeRow(id_, place) for id_, place in zip(self._ids, self._positions, strict=True))
        self._positions = [place + 1 for place in self._positions]
        began = time.perf_counter()
        self.runner.start(StepPlan(step=1, admit=admit, prefill=prefill, decode=decode))
        self._started.append({**self.watch.take(), "start": time.perf_counter() - began})
        self._flying += 1
        while self._flying > self.runner.capabilities().steps.lookahead:
            self.finish()

    def finish(self) -> None:
        result = self.runner.finish()
        assert not result.failures, result.failures
        now = time.perf_counter()
        self.finished.append({**self._started[len(self.finished)], "step": now - self._ended})
        self._ended = now
        self._flying -= 1
        self.watch.take()


def measure(steps: Steps, chunk: int, turns: int) -> list[Times]:
    """Medians of a step with a chunk and of those behind it, over the turns but the first two."""
    places: list[list[Times]] = [[] for _ in range(1 + PLAIN)]
    for turn in range(turns):
        first = len(steps.finished)
        for count in (chunk, *[0] * PLAIN):
            steps.run(count)
        steps.run(0)  # so that the last one is finished
        if turn > 1:
            for place, one in zip(places, steps.finished[first + 1 :], strict=False):
                place.append(one)
    names = ("step", "start", *PARTS)
    return [{name: statistics.median(one.get(name, 0.0) for one in some) for name in names} for some in places]


def child(options: argparse.Namespace) -> None:
    from benchmarks.arguments import prepare_device

    prepare_device()
    from benchmarks.gpu.families_steps import load_made, make
    from benchmarks.gpu.family_shapes import config_of

    from treadle.runner.model_runner import ModelRunner

    how = {"small": True} if options.small else {"whole": True} if options.whole else {}
    module, config = make(config_of(options.family, **how), options.bits)
    model = load_made(module, config, 8 << 30, options.rows + 1)
    runner = ModelRunner(model)
    if runner._backend.name != "paged" and not options.small:
        sys.exit(f"the model is not paged: {model.compute.summary()}")
    if options.graphs:
        runner._graphs = lambda alike: nullcontext()  # type: ignore[method-assign]
    length = min(model.context, 2 + sum(options.chunk) * options.turns)
    steps = Steps(runner, options.rows, length, model.vocabulary)
    for chunk in options.chunk:
        found = measure(steps, chunk, options.turns)
        labels = (f"chunk of {chunk}", *(f"{i} behind it" for i in range(1, PLAIN + 1)))
        for label, one in zip(labels, found, strict=True):
            parts = ", ".join(f"{name} {one[name] * 1e3:.2f}" for name in PARTS)
            print(
                f"  {label:14} step {one['step'] * 1e3:6.2f} ms, start {one['start'] * 1e3:6.2f}: {parts}", flush=True
            )
    runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="gpt_oss")
    parser.add_argument("--bits", default="mxfp4")
    parser.add_argument("--whole", action="store_true", help="all layers, of families that have a whole shape")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--chunk", type=int, nargs="*", default=[32, 128, 512])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--environment", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--graphs", action="store_true", help="of CUDA in all steps")
    parser.add_argument("--small", action="store_true", help="see that it works, on a CPU")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    failed = 0
    for setting in ("", *options.environment):
        name, _, value = setting.partition("=")
        print(f"{options.family}, {options.bits}, {setting or 'as it is'}", flush=True)
        environment = os.environ | ({name: value} if name else {})
        failed += subprocess.run([sys.executable, *sys.argv, "--child"], env=environment, check=False).returncode != 0
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
