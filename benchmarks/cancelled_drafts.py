"""Cancels of requests that are drafted for: what is held afterwards (F3).

    python benchmarks/cancelled_drafts.py [--cancels 500] [--kinds eagle3 ...]

With a draft model, an EAGLE-3 head, and MTP heads of a model with attention and of one with recurrent layers, requests
are sent to a server's loop until so many are cancelled, from another thread, a fifth of them in each phase: while they
wait, while their prompt is scored (SpecPrefill) or prefilled, and while their tokens are decoded or their drafts are
made and verified. That is the phase of the last step before the cancel is applied. Then as many rows leave while a step
that computes their prompt or verifies their drafts is in flight. Models are tiny, and drafts are verified whatever they
cost.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.identity import OPTIONS, Changed, batch, held  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from tests.runner.drafting.eagles import make_target, with_eagle  # noqa: E402
from tests.runner.scoring.prompts import TOKENS  # noqa: E402
from tests.runner.speculated import Speculated  # noqa: E402
from tests.runner.speculation_requests import made, mixed  # noqa: E402
from tests.support.eagle_models import make_eagle  # noqa: E402
from tests.support.mtp_models import make_headed  # noqa: E402
from tests.support.tiny import make_tiny  # noqa: E402

from treadle.core.capabilities import StepCost  # noqa: E402
from treadle.core.draft_budget import DraftBudget  # noqa: E402
from treadle.core.messages import Cancel, FinishReason, StepReport, Submit  # noqa: E402
from treadle.core.plan import StepPlan  # noqa: E402
from treadle.core.verify_costs import VerifyCosts  # noqa: E402
from treadle.engine.loop import EngineLoop  # noqa: E402
from treadle.engine.mailbox import Mailbox  # noqa: E402
from treadle.engine.owner import OwnerLimits, scheduler_of  # noqa: E402
from treadle.runner.drafting.head import HeadDrafter  # noqa: E402
from treadle.runner.drafting.model import ModelDrafter  # noqa: E402
from treadle.runner.loading.loader import load  # noqa: E402
from treadle.runner.loading.model import LoadedModel  # noqa: E402
from treadle.runner.loading.mtp import load_head  # noqa: E402
from treadle.runner.model_runner import ModelRunner  # noqa: E402
from treadle.runner.scoring.scorer import Scorer  # noqa: E402


class Eager(DraftBudget):
    """A budget by which drafts cost nothing and are always verified: tiny models gain nothing by them."""

    def __init__(self, most: int) -> None:
        free = [StepCost(1, 1 + drafts, 1.0) for drafts in (0, 7)]
        super().__init__(VerifyCosts(free[:1], free), most)

    def _refused(self, rows: int, gain: float, offers: Any, reason: str = "") -> Any:
        return {seq: len(chances) for seq, chances in offers.items()}

    def observe_plain(self, rows: int, seconds: float) -> None:
        pass

    def observe_verifying(self, rows: int, drafts: int, seconds: float) -> None:
        pass


CHUNK = 32
SCORED = 160
"""Tokens of a prompt that is scored."""


class Phase(StrEnum):
    """What the last step computed of a sequence."""

    WAITING = "waiting"
    SCORING = "scoring"
    PREFILL = "prefill"
    DECODING = "decoding"
    VERIFYING = "drafting and verification"


KINDS = ("draft", "eagle3", "mtp", "mtp, recurrent")


def made_with(kind: str, folder: Path) -> tuple[ModelRunner, Any, LoadedModel]:
    """A runner with a scorer and a draft model or a head, its drafter and its model."""
    target, drafter = drafted(kind, folder)
    scorer = Scorer(load(make_tiny(folder / "scorer", layers=1), **OPTIONS), TOKENS, keep=0.5, min_tokens=SCORED)
    return made(target, drafter, scorer), drafter, target


def drafted(kind: str, folder: Path) -> tuple[LoadedModel, Any]:
    if kind == "draft":
        model = load(make_tiny(folder / "model"), **OPTIONS)
        return model, Changed(ModelDrafter(model, model.vocabulary), 0)
    if kind == "eagle3":
        plain = load(make_target(folder / "model", "qwen3"), **OPTIONS)
        headed = with_eagle(plain, make_eagle(folder / "head"))
    else:
        path = make_headed(folder / "model", "qwen3_5" if "recurrent" in kind else "glm4_moe")
        headed = load_head(load(path, **OPTIONS), path, OPTIONS)
    return headed.target, Changed(HeadDrafter(headed), 0)


def held_of(runner: ModelRunner, drafter: Any) -> str:
    """What rows that have gone still hold, also of the scorer; empty if nothing."""
    scorer = runner.statistics().scorer
    of_scorer = f"{scorer.kv_bytes} bytes and {scorer.prompts} prompts of the scorer are held"
    return held(runner, drafter) or (of_scorer if scorer.kv_bytes or scorer.prompts else "")


class Storm:
    """A server's loop over `runner`, and a thread that cancels its requests until `count` are cancelled: as many in
    each phase."""

    def __init__(self, runner: ModelRunner, count: int) -> None:
        self.scheduler = scheduler_of(runner, OwnerLimits(max_running=8, prefill_tokens=CHUNK))
        self.scheduler._speculation._budget = Eager(8)
        self._plan, self.scheduler.plan = self.scheduler.plan, self._watched  # type: ignore[method-assign, assignment]
        self._reports: list[Any] = []
        self._loop = EngineLoop(runner, self.scheduler, Mailbox(), self._reports.append)
        self._dice = random.Random(0)
        self._wanted: dict[str, Phase | None] = {}  # live requests, with the phase in which each is cancelled
        self._phases: dict[str, Phase] = {}
        self._most = -(-count // len(Phase))
        self.cancelled: Counter[Phase] = Counter()
        self.ended = self.verified = 0

    def run(self) -> None:
        thread = threading.Thread(target=self._cancel, daemon=True)
        thread.start()
        some = self._requests()
        while self._missing or self._loop.has_work:
            while self._missing and len(self._wanted) < 10:
                self._send(next(some))
            self._loop.run_once()
            self._read()
        thread.join()
        self.scheduler.check_integrity()

    @property
    def _missing(self) -> set[Phase]:
        """The phases in which more requests are to be cancelled."""
        return {phase for phase in Phase if self.cancelled[phase] < self._most}

    def _requests(self) -> Iterator[Submit]:
        """Requests of all kinds of sampling without constraints, with prompts that are scored as long as these count,
        and with short ones in the end, beside which drafts are verified. Longer ones are new, as cached ones leave
        nothing to prefill."""
        for i, one in enumerate(itertools.cycle(mixed(0))):
            prompt, missing = one.prompt, self._missing
            if Phase.SCORING in missing and i % 2:
                prompt = self._new_prompt(SCORED)
            elif Phase.PREFILL not in missing:
                prompt = prompt[:CHUNK]
            elif len(prompt) > CHUNK:
                prompt = self._new_prompt(len(prompt))
            free = {"constraint": None, "thinking": None, "stop_token_ids": (), "prompt_logprobs": None}
            yield replace(one, id=f"{i}", prompt=prompt, max_tokens=60, max_wait_s=1e9, **free)

    def _new_prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self._dice.choices(range(256), k=length))

    def _send(self, request: Submit) -> None:
        if len(request.prompt) == SCORED:
            phases = [Phase.SCORING]
        elif len(request.prompt) > CHUNK:
            phases = [Phase.PREFILL]
        else:
            phases = [Phase.VERIFYING if request.speculate else Phase.DECODING, Phase.WAITING]
        phases = [phase for phase in phases if phase in self._missing]
        self._wanted[request.id] = self._dice.choice(phases) if phases else None
        self._loop.mailbox.put(request)

    def _cancel(self) -> None:
        dice = random.Random(1)
        while self._missing:
            time.sleep(dice.random() * 0.004)
            for id_, phase in list(self._wanted.items()):
                if phase is self._phases.get(id_, Phase.WAITING) and dice.random() < 0.3:
                    self._loop.mailbox.put(Cancel(id=id_))

    def _watched(self, *args: Any) -> StepPlan:
        plan = self._plan(*args)
        self._phases |= {chunk.id: Phase.SCORING for chunk in plan.score}
        self._phases |= {chunk.id: Phase.PREFILL for chunk in plan.prefill}
        self._phases |= {row.id: Phase.VERIFYING if row.drafts else Phase.DECODING for row in plan.decode}
        return plan

    def _read(self) -> None:
        for output in [o for report in self._reports if isinstance(report, StepReport) for o in report.outputs]:
            self.verified += output.drafted > 0
            if output.finish is not None:
                phase = self._phases.pop(output.id, Phase.WAITING)
                self.cancelled[phase] += output.finish.reason == FinishReason.CANCELLED
                self.ended += 1
                del self._wanted[output.id]
        self._reports.clear()


def storm(count: int, kind: str, folder: Path) -> str:
    """Cancel requests in each phase. Return what is held then."""
    runner, drafter, _ = made_with(kind, folder)
    runner.warm_up()
    one = Storm(runner, count)
    one.run()
    phases = ", ".join(f"{one.cancelled[phase]} {phase}" for phase in Phase)
    print(
        f"{kind}: {one.ended} ended, {one.cancelled.total()} cancelled ({phases}), {one.verified} verified rows",
        flush=True,
    )
    return held_of(runner, drafter) or ("" if not one.scheduler.live else "a request has no end")


def storm_in_flight(count: int, kind: str, folder: Path) -> str:
    """Let rows leave between the start and the end of steps that prefill their prompts or verify their drafts. Return
    what is held then."""
    runner, drafter, model = made_with(kind, folder)
    gone: Counter[Phase] = Counter()
    for seed in itertools.count():
        some = [replace(one, max_tokens=60, stop_token_ids=()) for one in batch(model, seed) if one.constraint is None]
        run = Speculated(runner, some, drafts=4, chunk=30)
        dice = random.Random(seed)
        while run.live:
            run.steps += 1
            plan = run.plan(run.live, run.drafts)
            runner.start(plan)
            leaving = leavers(plan, dice)
            for id_ in leaving:
                runner.release(id_)
            run.apply(plan, runner.finish())
            for id_ in leaving:
                run.release(run.rows[id_], over=True)
            gone.update(leaving.values())
        if gone.total() >= count:
            phases = ", ".join(f"{number} in {phase}" for phase, number in gone.items())
            print(f"{kind}: {gone.total()} left while a step computed them ({phases})", flush=True)
            return held_of(runner, drafter)
    raise AssertionError


def leavers(plan: StepPlan, dice: random.Random) -> dict[str, Phase]:
    found = {chunk.id: Phase.PREFILL for chunk in plan.prefill if dice.random() < 0.05}
    return found | {row.id: Phase.VERIFYING for row in plan.decode if row.drafts and dice.random() < 0.2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cancels", type=int, default=500)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        found = {
            f"{kind}, {run.__name__}": run(options.cancels, kind, Path(folder) / f"{kind}-{run.__name__}")
            for kind, run in itertools.product(options.kinds, (storm, storm_in_flight))
        }
    for name, left in found.items():
        print(f"{name}: {left or 'nothing is held'}")
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
