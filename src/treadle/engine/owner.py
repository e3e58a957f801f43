"""The whole life of an owner on the calling thread: build, warm up, serve, unwind (A1, C1, C2).

The same function is the main of the child process and the target of the owner thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import msgspec

from ..core.messages import Capabilities, Failed, FromOwner, Loading, Ready
from ..core.plan_builder import Reuse, no_reuse
from ..core.scheduler import Scheduler, SchedulerLimits
from ..errors import TreadleError
from ..runner.base import Runner, RunnerBroken, RunnerFactory
from .loop import EngineLoop
from .mailbox import Mailbox
from .roster import Roster

log = logging.getLogger(__name__)


class OwnerLimits(msgspec.Struct, frozen=True):
    """What the owner's scheduler needs of the settings."""

    max_running: int
    prefill_tokens: int


Send = Callable[[FromOwner], None]


def run_owner(
    build: RunnerFactory,
    limits: OwnerLimits,
    mailbox: Mailbox,
    send: Send,
    clock: Callable[[], float] = time.monotonic,
    roster: Roster | None = None,
) -> bool:
    """Own a runner until Stop. True after a clean end; False when it could not start or broke (Failed was sent)."""
    started = clock()
    runner = build_runner(build, send)
    if runner is None:
        return False
    try:
        scheduler = scheduler_for(runner.capabilities(), limits, runner.reuse)
        loop = EngineLoop(runner, scheduler, mailbox, send, clock, roster)
        send(Ready(capabilities=runner.capabilities(), pid=os.getpid(), load_s=clock() - started))
        return serve(loop)
    finally:
        close(runner)


def serve(loop: EngineLoop) -> bool:
    """Run `loop` to its end. Whatever escapes a step is the end of this owner, and everyone is told."""
    try:
        loop.run()
    except Exception as error:
        log.exception("the engine can't go on")
        loop.die("the engine failed and is replaced", str(error))
        return False
    return True


def build_runner(build: RunnerFactory, send: Send) -> Runner | None:
    """A runner that is built and warmed up, or None after Failed was sent (C1)."""
    runner: Runner | None = None
    try:
        runner = build(lambda stage: send(Loading(stage=stage)))
        send(Loading(stage="warming up"))
        runner.warm_up()
        runner.capabilities()  # one that can't say what it can do is a failed start too
    except Exception as error:
        known = isinstance(error, TreadleError)
        log.log(logging.DEBUG if known else logging.ERROR, "the engine could not start", exc_info=True)
        if runner is not None:
            close(runner)
        send(Failed(code="start_failed", message=why(error)))
        return None
    return runner


def scheduler_for(can: Capabilities, limits: OwnerLimits, reuse: Reuse = no_reuse) -> Scheduler:
    """A scheduler whose running rows fit the runner's cache memory, and join with what `reuse` says of them."""
    return Scheduler(
        SchedulerLimits(
            max_running=limits.max_running,
            prefill_tokens=min(limits.prefill_tokens, can.prefill_tokens or limits.prefill_tokens),
            kv_tokens=kv_tokens(can, limits.max_running),
            prefill_quantum=can.prefill_quantum,
            chunk_sizes=can.chunk_sizes,
            kv_block=can.kv_block,
            kv_blocks=can.kv_blocks,
            prefix_cache=can.prefix_cache,
            sharing=can.sharing,
        ),
        reuse,
    )


def kv_tokens(can: Capabilities, max_running: int) -> int:
    """How many tokens `max_running` rows may hold together; 0 where the runner names no budget."""
    if can.kv_blocks:
        return can.kv_blocks * can.kv_block
    if not can.kv_budget_bytes or not can.kv_token_bytes:
        return 0
    return max(1, (can.kv_budget_bytes - max_running * can.kv_row_bytes) // can.kv_token_bytes)


def close(runner: Runner) -> None:
    """Close `runner`; a failure to do so is logged, as nothing more can be done about it."""
    try:
        runner.close()
    except Exception:
        log.exception("the runner did not close cleanly")


def why(error: Exception) -> str:
    """A failed start in one line."""
    if isinstance(error, TreadleError):
        return error.message
    if isinstance(error, RunnerBroken):
        return str(error)
    return f"{type(error).__name__}: {error}"
