"""A long prompt beside decoding sequences (P3), for layers of a family: gaps, the rate that is kept, and each step.

    python benchmarks/gpu/beside.py --family qwen3_moe [--bits 4] [--layers 12] [--decoding 4] [--prompt 8192]
        [--tokens 600] [--rounds 2] [--small] [--json OUT]

A shape of `family_shapes.py` with random weights runs in this process in the engine loop of a server. The sequences
decode alone first; then a prompt joins them, and they decode alone again. Told are the gap between steps at p99 over
that of decoding alone (<= 2), and the rate that is kept while the prompt is computed (>= 70 %), and a table of the
steps by their prompt tokens, as `step_trace.py` has it, of the last round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.arguments import gib, prepare_device  # noqa: E402
from benchmarks.gpu.families_steps import load_made, make  # noqa: E402
from benchmarks.gpu.family_shapes import SHAPES, config_of  # noqa: E402
from benchmarks.step_trace import table  # noqa: E402
from benchmarks.traced_serve import Trace  # noqa: E402

WARM = 64  # tokens that each sequence gains before anything counts
ALONE = 200  # tokens before the prompt joins, and after it


class Engine:
    """A model in the engine loop of a server, in this process."""

    def __init__(self, model: Any, options: argparse.Namespace) -> None:
        from treadle.runner.model_runner import ModelRunner

        self.options = options
        self.model = model
        self.runner = ModelRunner(model)
        self.runner.warm_up()
        self.trace = Trace(self.runner, Path("/dev/null"), time.perf_counter)

    def round(self, number: int) -> dict[str, float]:
        """Let sequences decode, and a prompt join them. Return the gaps and rates of both times."""
        from treadle.core.messages import StepReport, Submit
        from treadle.engine.loop import EngineLoop
        from treadle.engine.mailbox import Mailbox
        from treadle.engine.owner import OwnerLimits, scheduler_for

        options, dice = self.options, random.Random(number)
        self.trace.steps.clear()
        limits = OwnerLimits(max_running=options.decoding + 1, prefill_tokens=self.model.prefill_tokens or 2048)
        scheduler = scheduler_for(
            self.runner.capabilities(), limits, self.runner.match_prefix, self.runner.grammar_state
        )
        reports: list[Any] = []
        loop = EngineLoop(self.runner, scheduler, Mailbox(), reports.append)

        def submit(name: str, length: int, tokens: int) -> None:
            prompt = tuple(dice.randrange(self.model.vocabulary) for _ in range(length))
            loop.mailbox.put(Submit(id=name, prompt=prompt, max_tokens=tokens, max_wait_s=1e9))

        for i in range(options.decoding):
            submit(f"decoder {i}", 64, WARM + ALONE + options.tokens)
        gained, first_at, joined_at, first_token_at = 0, [], 0.0, 0.0
        while loop.has_work or not joined_at:
            loop.run_once()
            now = time.perf_counter()
            for output in [o for report in reports if isinstance(report, StepReport) for o in report.outputs]:
                if output.finish is not None and output.finish.reason != "length":
                    sys.exit(f"a sequence ended: {output.finish}")
                if output.id == "decoder 0" and output.tokens:
                    gained += len(output.tokens)
                    first_at.append(now)
                elif output.id == "prompt" and output.tokens:
                    first_token_at = now
            reports.clear()
            if not joined_at and gained >= WARM + ALONE:
                joined_at = now
                submit("prompt", options.prompt, 1)
        return _figures(first_at, joined_at, first_token_at)


def _figures(times: Sequence[float], joined: float, first_token: float) -> dict[str, float]:
    after = [at for at in times if at > first_token]
    alone = _gaps([at for at in times[WARM:] if at <= joined]) + _gaps(after[:ALONE])
    beside = _gaps([at for at in times if joined <= at <= first_token])
    return {
        "alone_ms": statistics.median(alone) * 1e3,
        "gap p99 / alone p99": _p99(beside) / _p99(alone),
        "rate kept": statistics.fmean(alone) / statistics.fmean(beside),
        "TTFT s": first_token - joined,
    }


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def _p99(gaps: Sequence[float]) -> float:
    return sorted(gaps)[min(len(gaps) - 1, int(0.99 * len(gaps)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", required=True, choices=SHAPES)
    parser.add_argument("--bits", default="16")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--decoding", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=600, help="of each decoding sequence, from when the prompt joins")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory", type=gib, default=gib("4"), help="GiB for caches")
    parser.add_argument("--small", action="store_true", help="a small model of the shape, for a CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from treadle.runner.device import blas
    from treadle.runner.device.require_mlx import require_mlx

    blas.prepare(None)
    require_mlx()
    config = config_of(options.family, small=options.small)
    if options.layers:
        config["num_hidden_layers"] = options.layers
    prepare_device()
    module, made = make(config, options.bits)
    engine = Engine(load_made(module, made, options.memory, options.decoding + 1), options)
    rounds = [engine.round(number) for number in range(options.rounds)]
    for one in rounds:
        print("  ".join(f"{name} {value:.3f}" for name, value in one.items()), flush=True)
    print("\n".join(table(engine.trace.steps)))
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds, "steps": engine.trace.steps}))


if __name__ == "__main__":
    main()
