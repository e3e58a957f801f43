"""Outbox: the owner's output queue.

Putting never blocks. When the reader lags, step reports are merged: tokens accumulate in order, nothing is lost, and
the number of queued messages stays bounded. Too many block events give way to one that says so.
"""

from __future__ import annotations

import threading

import msgspec

from ..core.messages import BlockEvent, BlocksCleared, FromOwner, Output, StepReport

MERGE_AFTER = 32
MOST_EVENTS = 16_384
"""Block events that wait in one report. Those of more can be had again, from what is in the cache then."""


class Outbox:
    def __init__(self, merge_after: int = MERGE_AFTER) -> None:
        self._changed = threading.Condition()
        self._messages: list[FromOwner] = []
        self._merge_after = merge_after
        self._closed = False

    def put(self, message: FromOwner) -> None:
        """Add one message, on the owner's thread. Never blocks on the reader."""
        with self._changed:
            last = self._messages[-1] if len(self._messages) >= self._merge_after else None
            if isinstance(last, StepReport) and isinstance(message, StepReport):
                self._messages[-1] = merge(last, message)
            else:
                self._messages.append(message)
            self._changed.notify()

    def take(self) -> list[FromOwner]:
        """Take all messages, waiting for the first. [] only after `close`, when none is left."""
        with self._changed:
            while not self._messages and not self._closed:
                self._changed.wait()
            messages, self._messages = self._messages, []
            return messages

    def take_nowait(self) -> list[FromOwner]:
        """Take all messages without waiting; may return []."""
        with self._changed:
            messages, self._messages = self._messages, []
            return messages

    def close(self) -> None:
        """Close the outbox; nothing may be put afterwards."""
        with self._changed:
            self._closed = True
            self._changed.notify()


def merge(first: StepReport, second: StepReport) -> StepReport:
    """Merge two consecutive reports into one."""
    outputs: dict[str, Output] = {}
    for output in (*first.outputs, *second.outputs):
        earlier = outputs.get(output.id)
        outputs[output.id] = output if earlier is None else _merge_outputs(earlier, output)
    events = _bounded(first.events + second.events)
    return StepReport(step=second.step, outputs=tuple(outputs.values()), events=events, statistics=second.statistics)


def _bounded(events: tuple[BlockEvent, ...]) -> tuple[BlockEvent, ...]:
    if len(events) <= MOST_EVENTS:
        return events
    return tuple(BlocksCleared(salt, lost=True) for salt in dict.fromkeys(event.salt for event in events))


def _merge_outputs(a: Output, b: Output) -> Output:
    return msgspec.structs.replace(
        b,
        admitted=a.admitted or b.admitted,
        wait_s=a.wait_s or b.wait_s,
        tokens=a.tokens + b.tokens,
        drafted=a.drafted + b.drafted,
        accepted=a.accepted + b.accepted,
        waits_for=a.waits_for if b.waits_for is None else b.waits_for,
        logprobs=a.logprobs + b.logprobs,
        prompt_logprobs=a.prompt_logprobs + b.prompt_logprobs,
        prompt_tokens_done=a.prompt_tokens_done if b.prompt_tokens_done is None else b.prompt_tokens_done,
        cached_tokens=a.cached_tokens if b.cached_tokens is None else b.cached_tokens,
        scored_tokens=a.scored_tokens if b.scored_tokens is None else b.scored_tokens,
        kept_tokens=a.kept_tokens if b.kept_tokens is None else b.kept_tokens,
        finish=b.finish or a.finish,
    )
