"""Times of a full server's steps, measured right after the warm-up, for the first `Retry-After`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...core.capabilities import Capabilities, StepCost
from ...core.plan import Admit, DecodeRow, StepPlan
from ..kv.backend import WarmPass
from ..kv.contiguous.buffer import STEP
from .draft_costs import TOKENS, measure_drafts
from .model import LoadedModel
from .synthetic_steps import Clock, Warmable, decoders, release, run_pass

_MOST_ROWS = 64
_STEPS = 3  # the first may compile
_CHUNKS = (64, 256, 1024)
_TELLING_S = 0.1  # a chunk that takes this long tells the cost of a token
_TIMES = 3  # the first may compile


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step in which all slots decode (0: not measured), and of `chunks` of prompts by themselves. `plain`
    and `verifying` are those of `SpeculationCapabilities`."""

    decode_step_s: float = 0.0
    chunks: tuple[StepCost, ...] = ()
    plain: tuple[StepCost, ...] = ()
    verifying: tuple[StepCost, ...] = ()

    @property
    def prompt_token_s(self) -> float:
        """Seconds of one more token of a prompt; 0 where not measured."""
        return self.chunks[-1].seconds / self.chunks[-1].tokens if self.chunks else 0.0


def measure(runner: Warmable, model: LoadedModel, clock: Clock = time.perf_counter) -> StepCosts:
    """Time decode steps of all slots (of 64, where there are more) and chunks of prompts, and steps of fewer slots with
    and without drafts where these can be verified. Leaves nothing behind (C2).

    A row that fails in a timed step, for lack of memory as a rule, leaves that cost at 0.
    """
    can = runner.capabilities()
    capacity = _Capacity(can, model)
    rows = min(model.max_running, _MOST_ROWS, capacity.rows)
    plain: tuple[StepCost, ...] = ()
    verifying: tuple[StepCost, ...] = ()
    if can.steps.speculation.drafters and model.context > TOKENS:
        most = min(rows, capacity.rows_of(TOKENS))
        plain, verifying = measure_drafts(runner, most, can.steps, clock)
    known = next((cost.seconds for cost in plain if cost.rows == rows), None)
    decode_step_s = _decode_step_s(runner, rows, clock) if known is None else known
    return StepCosts(decode_step_s, tuple(_chunks(runner, model, capacity, clock)), plain, verifying)


class _Capacity:
    """Capacity of the memory for keys and values: `rows` sequences of a few tokens, or one of `tokens` tokens."""

    def __init__(self, can: Capabilities, model: LoadedModel) -> None:
        budget, row_bytes, token_bytes = can.kv.budget_bytes, model.kv.row_bytes, model.kv.token_bytes
        self._block = can.kv.block if can.kv.blocks else STEP
        if can.kv.blocks:
            self.rows, self.tokens = can.kv.blocks, can.kv.blocks * can.kv.block
        elif budget and token_bytes:  # buffers grow by STEP tokens
            self.rows = budget // (row_bytes + STEP * token_bytes)
            self.tokens = (budget - row_bytes) // token_bytes - STEP
        else:
            self.rows, self.tokens = model.max_running, model.context

    def rows_of(self, tokens: int) -> int:
        """Sequences of `tokens` tokens."""
        return self.rows // -(-tokens // self._block)


def _decode_step_s(runner: Warmable, rows: int, clock: Clock) -> float:
    """Seconds of the last of a few steps in which `rows` rows decode."""
    requests = decoders(rows, _STEPS)
    admit = tuple(Admit(request=request) for request in requests)
    decode = tuple(DecodeRow(id=request.id, position=0) for request in requests)
    seconds = 0.0
    try:
        for position in range(1, _STEPS + 1):
            began = clock()
            result = runner.execute(StepPlan(step=0, admit=admit, decode=decode))
            seconds, admit = clock() - began, ()
            if result.failures:
                return 0.0
            decode = tuple(DecodeRow(id=row.id, position=position) for row in result.rows)
        return seconds
    finally:
        release(runner, requests)


def _chunks(runner: Warmable, model: LoadedModel, capacity: _Capacity, clock: Clock) -> Iterator[StepCost]:
    longest = min(model.prefill_tokens or _CHUNKS[-1], model.context - 1, capacity.tokens - 1)
    return timed_chunks(_CHUNKS, longest, lambda tokens: run_pass(runner, WarmPass(chunks=(tokens,)), clock))


def timed_chunks(sizes: Sequence[int], longest: int, run: Callable[[int], float]) -> Iterator[StepCost]:
    """Yield the costs of chunks of the ascending `sizes` up to `longest`, by the seconds for which they `run` (0: one
    failed). Longer chunks are timed until one takes long enough to tell: a short one costs what any step does. The
    shortest time of each counts: what a hiccup adds would be taken for what tokens cost."""
    for tokens in sizes:
        if tokens > longest:
            return
        if seconds := min(run(tokens) for _ in range(_TIMES)):
            yield StepCost(0, tokens, seconds)
        if seconds >= _TELLING_S:
            return
