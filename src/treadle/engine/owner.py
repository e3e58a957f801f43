"""Owner's life on the calling thread: build the runner, warm up, serve, close (A1, C1, C2).

`run_owner` is the main function of the engine process and the target of the owner thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import msgspec

from ..core.capabilities import Capabilities, SpeculationCapabilities
from ..core.draft_budget import DraftBudget
from ..core.encodings import HasFeatures, no_features
from ..core.grammar_state import GrammarLookup, no_grammars
from ..core.messages import Failed, FromOwner, Loading, Ready
from ..core.plan_builder import MatchPrefix, no_prefix
from ..core.scheduler import Scheduler, SchedulerLimits
from ..core.spec_prefill import MatchScored, not_scored
from ..core.verify_costs import VerifyCosts
from ..errors import TreadleError
from ..runner.base import Runner, RunnerBroken, RunnerFactory
from .in_flight_table import InFlightTable
from .loop import EngineLoop
from .mailbox import Mailbox

log = logging.getLogger(__name__)


class OwnerLimits(msgspec.Struct, frozen=True):
    """Settings for the owner's scheduler."""

    max_running: int
    prefill_tokens: int


Send = Callable[[FromOwner], None]


def run_owner(
    build: RunnerFactory,
    limits: OwnerLimits,
    mailbox: Mailbox,
    send: Send,
    clock: Callable[[], float] = time.monotonic,
    table: InFlightTable | None = None,
) -> bool:
    """Build and run a runner until Stop. True after a clean end; False after Failed was sent."""
    started = clock()
    runner = build_runner(build, send)
    if runner is None:
        return False
    try:
        scheduler = scheduler_of(runner, limits)
        loop = EngineLoop(runner, scheduler, mailbox, send, clock, table)
        send(Ready(capabilities=runner.capabilities(), pid=os.getpid(), load_s=clock() - started))
        return serve(loop)
    finally:
        close_runner(runner)


def serve(loop: EngineLoop) -> bool:
    """Run `loop` to its end. An exception that escapes it ends this owner with Failed; returns False then."""
    try:
        loop.run()
    except Exception as error:
        log.exception("the engine failed and is replaced")
        loop.die("the engine failed and is replaced", str(error))
        return False
    return True


def build_runner(build: RunnerFactory, send: Send) -> Runner | None:
    """Build and warm up a runner; None after Failed was sent (C1)."""
    runner: Runner | None = None
    try:
        runner = build(lambda stage: send(Loading(stage=stage)))
        send(Loading(stage="warming up"))
        runner.warm_up()
        runner.capabilities()  # an error here is a failed start as well
    except Exception as error:
        known = isinstance(error, TreadleError)
        log.log(logging.DEBUG if known else logging.ERROR, "the engine could not start", exc_info=True)
        if runner is not None:
            close_runner(runner)
        send(Failed(code="start_failed", message=describe_start_failure(error)))
        return None
    return runner


def scheduler_for(
    can: Capabilities,
    limits: OwnerLimits,
    match: MatchPrefix = no_prefix,
    grammar: GrammarLookup = no_grammars,
    features: HasFeatures = no_features,
    scored: MatchScored = not_scored,
) -> Scheduler:
    """Create a scheduler for the runner's capabilities; `match` looks up cached prefixes of joining sequences,
    `grammar` the states of their grammars, `features` whether those of an image are kept, and `scored` what the scorer
    has cached."""
    speculation = can.steps.speculation
    budget = draft_budget(speculation)
    return Scheduler(
        SchedulerLimits(
            max_running=limits.max_running,
            prefill_tokens=min(limits.prefill_tokens, can.steps.prefill_tokens or limits.prefill_tokens),
            kv_tokens=kv_tokens(can, limits.max_running),
            prefill_quantum=can.steps.prefill_quantum,
            chunk_sizes=can.steps.chunk_sizes,
            chunks=can.steps.chunks,
            kv_block=can.kv.block,
            kv_blocks=can.kv.blocks,
            lookahead=can.steps.lookahead,
            draft_tokens=speculation.draft_tokens if budget or not speculation.drafters else 0,
            drafts_resolved=speculation.lookahead,
            spec_prefill=can.steps.spec_prefill,
            prefix_cache=can.steps.prefix_cache,
            sharing=can.steps.sharing,
            vision=can.vision,
        ),
        match,
        grammar,
        budget,
        features=features,
        match_scored=scored,
    )


def scheduler_of(runner: Runner, limits: OwnerLimits) -> Scheduler:
    """Create a scheduler that asks `runner`."""
    return scheduler_for(
        runner.capabilities(),
        limits,
        runner.match_prefix,
        runner.grammar_state,
        runner.has_features,
        runner.match_scored,
    )


def draft_budget(can: SpeculationCapabilities) -> DraftBudget | None:
    """Return the budget of draft tokens by the measured costs; None where nothing drafts tokens, or nothing was
    measured."""
    if not (can.drafters and can.plain and can.verifying):
        return None
    return DraftBudget(VerifyCosts(can.plain, can.verifying), can.draft_tokens)


def kv_tokens(can: Capabilities, max_running: int) -> int:
    """Return the cache's total capacity in tokens for `max_running` sequences; 0 if the runner has no budget."""
    if can.kv.blocks:
        return can.kv.blocks * can.kv.block
    if not can.kv.budget_bytes or not can.kv.token_bytes:
        return 0
    return max(1, (can.kv.budget_bytes - max_running * can.kv.row_bytes) // can.kv.token_bytes)


def close_runner(runner: Runner) -> None:
    """Close `runner`. An error is only logged."""
    try:
        runner.close()
    except Exception:
        log.exception("the runner did not close cleanly")


def describe_start_failure(error: Exception) -> str:
    """Describe a failed start in one line."""
    if isinstance(error, TreadleError):
        return error.message
    if isinstance(error, RunnerBroken):
        return str(error)
    return f"{type(error).__name__}: {error}"
