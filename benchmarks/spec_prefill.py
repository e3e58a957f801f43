"""Time to first token of long prompts, prefilled whole and in part (SpecPrefill), alone and beside decoders.

    python benchmarks/spec_prefill.py (MODEL SCORER | --family qwen3 --bits 16 [--config JSON] [--scorer-config JSON])
        [--tokens 16384 65536 131072] [--keep 0.2] [--beside 0 4] [--rounds 2] [--scored-tokens 2048]
        [--limit SECONDS] [--json OUT]

The models of two folders, or two of one shape of `gpu/family_shapes.py` with random weights, run in this process in the
engine loop of a server. Prompts are random tokens, so that no prefix cache helps; what is kept of them is as good as
random, and what they cost is not. For each length a prompt that is prefilled whole and one in part, in turn. Decoders
run before, and the rate that they keep until the first token is compared with theirs in the second before; the longest
gap is that of one decoder. A cell that would begin after `--limit` seconds is left out, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.arguments import add_long_prompts, add_model, gib, prepare_device, shape_config  # noqa: E402

ALONE_S = 1.0
DECODER_PROMPT = 128
LEAST = 512


@dataclass
class Cell:
    """Figures of one length and number of decoders: medians of the rounds."""

    tokens: int
    beside: int
    whole_s: float
    part_s: float
    kept_tokens: int
    scoring_s: float
    whole_rate_kept: float
    part_rate_kept: float
    whole_gap_ms: float
    part_gap_ms: float
    idle_gap_ms: float

    @property
    def gain(self) -> float:
        return self.whole_s / self.part_s


@dataclass
class Prompt:
    """What one long prompt came to."""

    ttft_s: float
    rate_kept: float
    gap_s: float
    idle_gap_s: float
    kept: int
    scoring_s: float


@dataclass
class Bench:
    """The engine loop over `runner`, with one scheduler for all prompts, as in a server."""

    runner: Any
    rows: int
    prefill_tokens: int
    seed: int
    times: dict[str, list[float]] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    scoring_s: float = 0.0
    _sent: int = 0

    def __post_init__(self) -> None:
        from treadle.engine.loop import EngineLoop
        from treadle.engine.mailbox import Mailbox
        from treadle.engine.owner import OwnerLimits, scheduler_of

        scheduler = scheduler_of(self.runner, OwnerLimits(self.rows, self.prefill_tokens))
        self.loop = EngineLoop(self.runner, scheduler, Mailbox(), self._hear)
        self._dice = random.Random(self.seed)

    def _hear(self, report: Any) -> None:
        now = time.perf_counter()
        self.scoring_s = report.statistics.spec_prefill.scoring_s
        for output in report.outputs:
            if output.finish is not None and output.finish.reason == "error":
                sys.exit(f"a sequence failed: {output.finish.message}")
            self.times.setdefault(output.id, []).extend([now] * len(output.tokens))
            if output.kept_tokens:
                self.kept[output.id] = output.kept_tokens

    def send(self, length: int, answer: int, **fields: Any) -> str:
        from treadle.core.messages import Submit

        self._sent += 1
        id_, most = str(self._sent), self.runner.capabilities().vocabulary
        prompt = tuple(self._dice.choices(range(most), k=length))
        self.loop.mailbox.put(Submit(id=id_, prompt=prompt, max_tokens=answer, max_wait_s=1e9, **fields))
        return id_

    def _most_tokens(self) -> int:
        """Tokens of a decoder that will not end by itself."""
        can = self.runner.capabilities()
        capacity = can.kv.blocks * can.kv.block or can.context
        return int(min(can.context, capacity) - DECODER_PROMPT) // 2

    def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.loop.run_once()

    def prompt(self, length: int, beside: int, whole: bool) -> Prompt:
        """Run a long prompt beside decoders, all of which end with it."""
        from treadle.core.messages import Cancel

        decoders = [self.send(DECODER_PROMPT, self._most_tokens()) for _ in range(beside)]
        self.until(lambda: all(len(self.times.get(id_, ())) > 8 for id_ in decoders))
        began = time.perf_counter()
        if beside:
            self.until(lambda: time.perf_counter() - began > ALONE_S)
        sent, scored = time.perf_counter(), self.scoring_s
        id_ = self.send(length, 1, sparse_prefill=not whole)
        self.until(lambda: bool(self.times.get(id_)))
        first = self.times[id_][0]
        for one in decoders:
            self.loop.mailbox.put(Cancel(id=one))
        self.until(lambda: not self.loop.has_work)
        idle = [_between(self.times[one], began, sent) for one in decoders]
        busy = [_between(self.times[one], sent, first) for one in decoders]
        rates = [sum(map(len, idle)) / (sent - began), sum(map(len, busy)) / (first - sent)]
        gaps = [_longest([self.times[one] for one in decoders], *span) for span in ((began, sent), (sent, first))]
        kept = self.kept.get(id_, length)
        rate_kept = rates[1] / rates[0] if beside else 1.0
        return Prompt(first - sent, rate_kept, gaps[1], gaps[0], kept, self.scoring_s - scored)

    def cell(self, length: int, beside: int, rounds: int) -> Cell:
        found: dict[bool, list[Prompt]] = {True: [], False: []}
        for _ in range(rounds):
            for whole in (True, False):
                found[whole].append(self.prompt(length, beside, whole))

        def median(whole: bool, name: str) -> float:
            return statistics.median(getattr(one, name) for one in found[whole])

        return Cell(
            length,
            beside,
            whole_s=median(True, "ttft_s"),
            part_s=median(False, "ttft_s"),
            kept_tokens=int(median(False, "kept")),
            scoring_s=median(False, "scoring_s"),
            whole_rate_kept=median(True, "rate_kept"),
            part_rate_kept=median(False, "rate_kept"),
            whole_gap_ms=1e3 * median(True, "gap_s"),
            part_gap_ms=1e3 * median(False, "gap_s"),
            idle_gap_ms=1e3 * median(False, "idle_gap_s"),
        )


def _between(times: list[float], low: float, high: float) -> list[float]:
    return [one for one in times if low <= one < high]


def _longest(all_times: list[list[float]], low: float, high: float) -> float:
    """The longest time between two tokens of one decoder."""
    gaps = [b - a for times in all_times for a, b in pairwise(times) if low <= b <= high]
    return max(gaps, default=0.0)


def made(options: argparse.Namespace, changed: dict[str, Any], memory: int, rows: int) -> Any:
    """A model of the shape with random weights, whose context holds the longest prompt."""
    from benchmarks.gpu.families_steps import load_made, make

    config = {**shape_config(options, max_position_embeddings=max(options.tokens) + 4096), **changed}
    prepare_device()
    module, config = make(config, options.bits)
    return load_made(module, config, memory, rows)


def models(options: argparse.Namespace, rows: int) -> tuple[Any, Any]:
    """The model and its scorer, whose steps are as long as in a server, and longer than the model's up to
    `--scored-tokens` tokens."""
    from treadle.runner.loading import scorer
    from treadle.runner.loading.loader import load

    scorer.LONGEST_STEP = options.scored_tokens
    if options.family:
        target = made(options, {}, options.memory, rows)
        small = made(options, options.scorer_config, options.scorer_memory, 4)
    else:
        target = load(Path(options.model), memory=options.memory, max_running=rows)
        small = load(Path(options.scorer), memory=options.scorer_memory, max_running=4)
    return target, scorer.with_longer_steps(target, small, options.prefill_tokens)


def table(bench: Bench, options: argparse.Namespace, began: float) -> None:
    print("| tokens | decoders | whole TTFT s | in part s (scoring) | gain | kept | rate kept whole, in part |", end="")
    print(" longest gap ms: idle, whole, in part |\n|---|---|---|---|---|---|---|---|")
    cells: list[Cell] = []
    for length in options.tokens:
        for beside in options.beside:
            if options.limit and time.perf_counter() - began > options.limit:
                print(f"| {length:,} | {beside} | left out: {options.limit} s are over |", flush=True)
                continue
            one = bench.cell(length, beside, options.rounds)
            cells.append(one)
            print(
                f"| {length:,} | {beside} | {one.whole_s:.3f} | {one.part_s:.3f} ({one.scoring_s:.3f}) |"
                f" {one.gain:.2f} |"
                f" {one.kept_tokens:,} | {one.whole_rate_kept:.2f}, {one.part_rate_kept:.2f} |"
                f" {one.idle_gap_ms:.1f}, {one.whole_gap_ms:.1f}, {one.part_gap_ms:.1f} |",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps([{**asdict(cell), "gain": cell.gain} for cell in cells]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser, memory="32")
    parser.add_argument("scorer", nargs="?", metavar="SCORER", help="the folder of a smaller one with the same tokens")
    parser.add_argument("--scorer-config", type=json.loads, default={}, help="JSON of the scorer's, beside --config")
    add_long_prompts(parser, rounds=2)
    parser.add_argument("--keep", type=float, default=0.2)
    parser.add_argument("--beside", type=int, nargs="*", default=[0, 4], help="decoders")
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    parser.add_argument("--scored-tokens", type=int, default=8192, help="up to which its steps may be longer")
    parser.add_argument("--scorer-memory", type=gib, default=gib("20"), help="GiB for the scorer's cache")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds after which no cell begins (0: none)")
    options = parser.parse_args()
    if (options.scorer is None) == (options.family is None):
        parser.error("name two model folders, or a shape with --family")
    from treadle.runner.device import blas
    from treadle.runner.device.blas_threads import ThreadGovernor
    from treadle.runner.device.require_mlx import require_mlx

    began = time.perf_counter()
    report = blas.prepare(None)
    require_mlx()
    from treadle.runner.model_runner import ModelRunner
    from treadle.runner.scoring.scorer import Scorer

    rows = max(options.beside) + 1
    target, small = models(options, rows)
    scorer = Scorer(small, target.vocabulary, keep=options.keep, min_tokens=LEAST)
    govern = ThreadGovernor(report.set_threads, report.threads).before_step if report.set_threads else (lambda: None)
    runner = ModelRunner(target, before_step=govern, scorer=scorer)
    runner.warm_up()
    can = runner.capabilities()
    sizes = f"{can.parameters / 1e9:.2f} B parameters, scorer {small.parameters / 1e9:.2f} B"
    scored = can.steps.spec_prefill.prefill_tokens or options.prefill_tokens
    print(f"{can.device}: {can.compute.summary()}; {sizes}, in steps of {scored} tokens")
    bench = Bench(runner, rows, options.prefill_tokens, options.seed)
    for whole in (True, False):  # costs are learned
        bench.prompt(min(options.tokens), 0, whole)
    table(bench, options, began)
    runner.close()


if __name__ == "__main__":
    main()
