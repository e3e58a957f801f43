"""Cancels of requests that are drafted for: what is held afterwards (F3).

    python benchmarks/cancelled_drafts.py [--cancels 500]

With a draft model, and with an MTP head, so many of twice as many requests are cancelled at random times, from another
thread, while a server's loop drafts, verifies and computes prompts. Then as many rows leave while the step that
verifies their drafts is in flight. Models are tiny, and drafts are verified whatever they cost.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.identity import OPTIONS, Changed, batch, held  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from tests.runner.speculated import Speculated  # noqa: E402
from tests.runner.speculation_requests import made, mixed  # noqa: E402
from tests.support.mtp_models import make_headed  # noqa: E402
from tests.support.tiny import make_tiny  # noqa: E402

from treadle.core.capabilities import StepCost  # noqa: E402
from treadle.core.draft_budget import DraftBudget  # noqa: E402
from treadle.core.messages import Cancel, StepReport  # noqa: E402
from treadle.core.plan import DecodeRow, StepPlan  # noqa: E402
from treadle.core.verify_costs import VerifyCosts  # noqa: E402
from treadle.engine.loop import EngineLoop  # noqa: E402
from treadle.engine.mailbox import Mailbox  # noqa: E402
from treadle.engine.owner import OwnerLimits, scheduler_for  # noqa: E402
from treadle.runner.drafting.head import HeadDrafter  # noqa: E402
from treadle.runner.drafting.model import ModelDrafter  # noqa: E402
from treadle.runner.loading.loader import load  # noqa: E402
from treadle.runner.loading.model import LoadedModel  # noqa: E402
from treadle.runner.loading.mtp import load_head  # noqa: E402
from treadle.runner.model_runner import ModelRunner  # noqa: E402


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


def drafted(kind: str, folder: Path) -> tuple[ModelRunner, Any, LoadedModel]:
    """A runner with a draft model or with an MTP head, its drafter and its model."""
    path = make_headed(folder, "qwen3_5") if kind == "mtp" else make_tiny(folder)
    model = load(path, **OPTIONS)
    if kind == "mtp":
        headed = load_head(model, path, OPTIONS)
        drafter: Any = Changed(HeadDrafter(headed), 0)
        return made(headed.target, drafter), drafter, headed.target
    drafter = Changed(ModelDrafter(model, model.vocabulary), 0)
    return made(model, drafter), drafter, model


def storm(count: int, kind: str, folder: Path) -> str:
    """Cancel `count` of twice as many requests at random times, also while steps run. Return what is held then."""
    runner, drafter, _ = drafted(kind, folder)
    reports, dice = list[Any](), random.Random(0)
    runner.warm_up()
    scheduler = scheduler_for(runner.capabilities(), OwnerLimits(max_running=8, prefill_tokens=64), runner.match_prefix)
    scheduler._speculation._budget = Eager(8)
    mailbox = Mailbox()
    loop = EngineLoop(runner, scheduler, mailbox, reports.append)
    some = [
        replace(one, id=f"{i}", max_tokens=60, constraint=None, thinking=None, stop_token_ids=(), max_wait_s=1e9)
        for i, one in enumerate(itertools.islice(itertools.cycle(mixed(0)), 2 * count))
    ]
    live: list[str] = []

    def cancels() -> None:
        left = {one.id for one in dice.sample(some, count)}
        while left:
            time.sleep(dice.random() * 0.004)
            ready = [id_ for id_ in live if id_ in left]
            if ready:
                left.discard(id_ := dice.choice(ready))
                mailbox.put(Cancel(id=id_))

    thread = threading.Thread(target=cancels)
    thread.start()
    waiting, ends, verifying = list(some), dict[str, str](), 0
    while waiting or loop.has_work or thread.is_alive():
        while waiting and len(live) < 12:
            live.append(waiting[0].id)
            mailbox.put(waiting.pop(0))
        loop.run_once()
        for output in [o for report in reports if isinstance(report, StepReport) for o in report.outputs]:
            verifying += output.drafted > 0
            if output.finish is not None:
                ends[output.id] = str(output.finish.reason)
                live.remove(output.id)
        reports.clear()
    thread.join()
    scheduler.check_integrity()
    cancelled = sum(reason == "cancelled" for reason in ends.values())
    print(f"{kind}: {len(ends)} ended, {cancelled} cancelled, {verifying} verified rows", flush=True)
    return held(runner, drafter) or ("" if len(ends) == len(some) and not scheduler.live else "a request has no end")


def storm_in_flight(count: int, kind: str, folder: Path) -> str:
    """Let rows leave between the start and the end of steps that verify their drafts. Return what is held then."""
    runner, drafter, model = drafted(kind, folder)
    gone = 0
    for seed in itertools.count():
        some = [replace(one, max_tokens=60, stop_token_ids=()) for one in batch(model, seed) if one.constraint is None]
        run = Speculated(runner, some, drafts=4, chunk=30)
        dice = random.Random(seed)
        while run.live:
            run.steps += 1
            plan = run.plan(run.live, run.drafts)
            runner.start(plan)
            leaving = [row.id for row in leavers(plan, dice)]
            for id_ in leaving:
                runner.release(id_)
            run.apply(plan, runner.finish())
            for id_ in leaving:
                run.release(run.rows[id_], over=True)
            gone += len(leaving)
        if gone >= count:
            print(f"{kind}: {gone} left while their drafts were verified", flush=True)
            return held(runner, drafter)
    raise AssertionError


def leavers(plan: StepPlan, dice: random.Random) -> list[DecodeRow]:
    return [row for row in plan.decode if row.drafts and dice.random() < 0.2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cancels", type=int, default=500)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        for kind, run in itertools.product(("draft", "mtp"), (storm, storm_in_flight)):
            left = run(options.cancels, kind, Path(folder) / f"{kind}-{run.__name__}")
            print(f"{kind}, {run.__name__}: {left or 'nothing is held'}", flush=True)


if __name__ == "__main__":
    main()
