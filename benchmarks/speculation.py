"""Tokens per second of speculative decoding beside plain decoding, by batch size and share of right drafts (P11).

    python benchmarks/speculation.py (MODEL | --family qwen3 --bits 16 [--config JSON]) [--rows 1 4 32]
        [--acceptance 0 0.3 0.6 0.9 1] [--lookup repeating random] [--tokens 256] [--rounds 3] [--json OUT]

The model of the folder MODEL, or one of `gpu/family_shapes.py` with random weights, runs in this process in the engine
loop of a server, with its scheduler and its guard. Prompts are random tokens. A drafter that knows the answers proposes
each of their tokens rightly with the given chance, and wrongly else; its outcomes are learned from verified drafts
alone. With `--lookup` drafts are looked up: in prompts that repeat a passage, or in random ones. Plain and speculative
rounds alternate; ratios are medians over rounds, and all tokens must be the same.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

PREFILL_TOKENS = 2048
PASSAGE = 24


@dataclass
class Bench:
    """A model in a runner, whose drafter is exchanged between runs."""

    model: Any
    options: argparse.Namespace
    blas: Any
    drafter: Any = None
    answers: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from tests.support.scripted_drafter import ScriptedDrafter

        from treadle.runner.device.blas_threads import ThreadGovernor
        from treadle.runner.model_runner import ModelRunner

        self.drafter = Exchangeable(ScriptedDrafter({}))
        govern = ThreadGovernor(self.blas.set_threads, self.blas.threads).before_step if self.blas.set_threads else None
        self.runner = ModelRunner(self.model, before_step=govern or (lambda: None), drafter=self.drafter)
        self.runner.warm_up()

    def prompts(self, rows: int, round_: int, repeating: bool) -> list[tuple[int, ...]]:
        """Random prompts; repeating ones say the same passage again and again."""
        dice = random.Random(f"{rows} {round_}")
        length, most = self.options.prompt, self.model.vocabulary
        if not repeating:
            return [tuple(dice.randrange(most) for _ in range(length)) for _ in range(rows)]
        passages = [[dice.randrange(most) for _ in range(PASSAGE)] for _ in range(rows)]
        return [tuple((passage * (length // PASSAGE + 1))[:length]) for passage in passages]

    def run(self, prompts: Sequence[tuple[int, ...]], speculate: bool) -> Run:
        """Decode all prompts at once. The time counts from the first step in which all of them decode."""
        import msgspec

        from treadle.core.messages import SpeculationCapabilities, StepReport, Submit
        from treadle.engine.loop import EngineLoop
        from treadle.engine.mailbox import Mailbox
        from treadle.engine.owner import OwnerLimits, scheduler_for

        self.runner.forget_prefixes()
        can = self.runner.capabilities()
        if not speculate:
            steps = msgspec.structs.replace(can.steps, speculation=SpeculationCapabilities())
            can = msgspec.structs.replace(can, steps=steps)
        limits = OwnerLimits(max_running=len(prompts), prefill_tokens=PREFILL_TOKENS)
        scheduler = scheduler_for(can, limits, self.runner.match_prefix, self.runner.grammar_state)
        reports: list[Any] = []
        loop = EngineLoop(self.runner, scheduler, Mailbox(), reports.append)
        found = Run([[] for _ in prompts])
        for i, prompt in enumerate(prompts):
            loop.mailbox.put(Submit(id=str(i), prompt=prompt, max_tokens=self.options.tokens, max_wait_s=1e9))
        began, counted = 0.0, 0
        while not all(len(row) == self.options.tokens for row in found.rows):
            loop.run_once()
            for output in [o for report in reports if isinstance(report, StepReport) for o in report.outputs]:
                if output.finish is not None and output.finish.reason != "length":
                    sys.exit(f"a sequence ended: {output.finish}")
                found.rows[int(output.id)] += output.tokens
                found.drafted += output.drafted
                found.accepted += output.accepted
            reports.clear()
            if not began and all(found.rows):
                began, counted = time.perf_counter(), sum(map(len, found.rows))
        found.seconds = time.perf_counter() - began
        found.tokens = sum(map(len, found.rows)) - counted
        while loop.has_work:
            loop.run_once()
        return found


@dataclass
class Run:
    """What a run gave: tokens by row, those that were timed, and draft tokens."""

    rows: list[list[int]]
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0


class Exchangeable:
    """Drafter that asks another one, which can be exchanged."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.name = inner.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def cell(bench: Bench, rows: int, kind: str) -> dict[str, Any]:
    """Measure one batch size with drafts of one kind: an acceptance, or "repeating" or "random" for look-ups."""
    from tests.support.scripted_drafter import ScriptedDrafter

    from treadle.runner.drafting.lookup import LookupDrafter

    lookup = kind in ("repeating", "random")
    rates: dict[bool, list[float]] = {False: [], True: []}
    drafted = accepted = 0
    differing = 0
    for round_ in range(bench.options.rounds):
        prompts = bench.prompts(rows, round_, kind == "repeating")
        plain = bench.run(prompts, speculate=False)
        if lookup:
            bench.drafter.inner = LookupDrafter(None)
        else:
            answers = {str(i): row for i, row in enumerate(plain.rows)}
            bench.drafter.inner = ScriptedDrafter(answers, float(kind), seed=round_)
        fast = bench.run(prompts, speculate=True)
        differing += sum(a != b for a, b in zip(plain.rows, fast.rows, strict=True))
        drafted, accepted = drafted + fast.drafted, accepted + fast.accepted
        for speculate, run in ((False, plain), (True, fast)):
            rates[speculate].append(run.tokens / run.seconds)
    ratios = [fast / plain for plain, fast in zip(rates[False], rates[True], strict=True)]
    return {
        "rows": rows,
        "drafts": kind,
        "plain": statistics.median(rates[False]),
        "speculative": statistics.median(rates[True]),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "drafted": drafted,
        "accepted": accepted,
        "differing": differing,
    }


def load_model(options: argparse.Namespace) -> Any:
    if options.family is None:
        from treadle.runner.loading.loader import load

        return load(Path(options.model), memory=options.memory, max_running=max(options.rows))
    from benchmarks.gpu.families_steps import load_made, make
    from benchmarks.gpu.family_shapes import config_of

    config = config_of(options.family, small=options.small)
    config |= options.config
    module, config = make(config, options.bits)
    return load_made(module, config, options.memory, max(options.rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model folder")
    parser.add_argument("--family", help="a shape of gpu/family_shapes.py, with random weights")
    parser.add_argument("--bits", default="16")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of fields that replace the shape's")
    parser.add_argument("--small", action="store_true", help="a small model of the shape, for a CPU")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 32])
    parser.add_argument("--acceptance", nargs="*", default=["0", "0.3", "0.6", "0.9", "1"])
    parser.add_argument("--lookup", nargs="*", choices=["repeating", "random"], default=[])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--memory", type=lambda text: int(float(text) * 2**30), default=4 * 2**30, help="GiB for caches"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (options.model is None) == (options.family is None):
        parser.error("name a model folder, or a shape with --family")
    from treadle.runner.device import blas
    from treadle.runner.device.require_mlx import require_mlx

    report = blas.prepare(None)
    require_mlx()
    bench = Bench(load_model(options), options, report)
    can = bench.runner.capabilities()
    print(f"{can.model}: {can.compute.summary()}; drafts of at most {can.steps.speculation.draft_tokens}")
    print("| rows | drafts | plain, tok/s | speculative | ratio | accepted of drafted | rows that differ |")
    print("|---|---|---|---|---|---|---|")
    cells = []
    for rows in options.rows:
        for kind in [*options.acceptance, *options.lookup]:
            one = cell(bench, rows, kind)
            cells.append(one)
            print(
                f"| {rows} | {kind} | {one['plain']:,.0f} | {one['speculative']:,.0f} |"
                f" {one['ratio']:.2f} ({one['least']:.2f}..{one['most']:.2f}) |"
                f" {one['accepted']:,} of {one['drafted']:,} | {one['differing']} |",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps(cells))
    bench.runner.close()


if __name__ == "__main__":
    main()
