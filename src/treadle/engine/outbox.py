"""What the owner has said and the other side has not taken yet.

The owner never waits here. When the reader lags, step reports merge into one: a stream's tokens pile up in it in
order and nothing is lost, while the number of messages stays bounded.
"""

from __future__ import annotations

import threading

import msgspec

from ..core.messages import FromOwner, Output, StepReport

MERGE_AFTER = 32


class Outbox:
    def __init__(self, merge_after: int = MERGE_AFTER) -> None:
        self._changed = threading.Condition()
        self._messages: list[FromOwner] = []
        self._merge_after = merge_after
        self._closed = False

    def put(self, message: FromOwner) -> None:
        """Add one message. The owner's thread; never blocks on the reader."""
        with self._changed:
            last = self._messages[-1] if len(self._messages) >= self._merge_after else None
            if isinstance(last, StepReport) and isinstance(message, StepReport):
                self._messages[-1] = merge(last, message)
            else:
                self._messages.append(message)
            self._changed.notify()

    def take(self) -> list[FromOwner]:
        """Everything there is, waiting for the first. Empty only once it is closed and drained."""
        with self._changed:
            while not self._messages and not self._closed:
                self._changed.wait()
            messages, self._messages = self._messages, []
            return messages

    def take_nowait(self) -> list[FromOwner]:
        """Everything there is, perhaps nothing."""
        with self._changed:
            messages, self._messages = self._messages, []
            return messages

    def close(self) -> None:
        """Nothing more will be put."""
        with self._changed:
            self._closed = True
            self._changed.notify()


def merge(first: StepReport, second: StepReport) -> StepReport:
    """One report that says what two in a row said."""
    outputs: dict[str, Output] = {}
    for output in (*first.outputs, *second.outputs):
        earlier = outputs.get(output.id)
        outputs[output.id] = output if earlier is None else _join(earlier, output)
    return StepReport(step=second.step, outputs=tuple(outputs.values()), statistics=second.statistics)


def _join(a: Output, b: Output) -> Output:
    return msgspec.structs.replace(
        b,
        admitted=a.admitted or b.admitted,
        wait_s=a.wait_s or b.wait_s,
        tokens=a.tokens + b.tokens,
        logprobs=a.logprobs + b.logprobs,
        prompt_logprobs=a.prompt_logprobs + b.prompt_logprobs,
        prompt_tokens_done=a.prompt_tokens_done if b.prompt_tokens_done is None else b.prompt_tokens_done,
        cached_tokens=a.cached_tokens if b.cached_tokens is None else b.cached_tokens,
        finish=b.finish or a.finish,
    )
