"""Replay of sequences after an engine's death: they are held back, and sent to the next engine once it is ready.

A sequence that ran continues from its generated tokens with the same random numbers; its client sees a pause. One that
waited continues to wait for the rest of its time, which includes the outage. While suspects are tried (`suspects`), all
other sequences are held back, including new ones.

An outage ends with the next engine's Ready or with `on_lost`: the time of each start (`Timeouts.load_timeout_s`) and
the number of failed starts are limited.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from .deaths import Death
from .generation import Generation
from .suspects import Suspects, Verdict

Send = Callable[[Generation], None]


class Replay:
    """Dispatcher of the client's sequences to the current owner, by `send`. `withdraw` cancels a suspect after its
    trial if its client has left."""

    def __init__(self, send: Send, withdraw: Send) -> None:
        self.replayed = 0
        self._send = send
        self._withdraw = withdraw
        self._held: dict[str, Generation] = {}
        self._suspects = Suspects()
        self._trying: Generation | None = None
        self._trial_target = 0

    @property
    def trying(self) -> bool:
        """Whether a suspect's trial is running."""
        return self._trying is not None

    @property
    def held(self) -> int:
        """Number of sequences that are held back."""
        return len(self._held)

    def is_held(self, generation: Generation) -> bool:
        """Whether the sequence is held back, so that no owner has it."""
        return generation.id in self._held

    def is_suspect(self, generation: Generation) -> bool:
        """Whether its trial is running or due, after a death that was not caused from outside."""
        return self._suspects.is_suspect(generation.id)

    def submit(self, generation: Generation) -> None:
        """Send a new sequence, or hold it back while a trial is running."""
        if self.trying:
            self._held[generation.id] = generation
        else:
            self._send(generation)

    def died(self, death: Death, live: Sequence[Generation], now: float) -> Verdict | None:
        """Hold back all `live` sequences, in order of arrival, after the engine's death. Returns the verdict once a
        culprit is found."""
        suspects = in_flight(live, death.in_steps)
        for generation in suspects:
            generation.may_have_run = True
        self._trying = None
        self._held = {generation.id: generation for generation in live}
        return self._suspects.died(death.cause, [generation.id for generation in suspects], now)

    def on_ready(self) -> None:
        """Send all held sequences to the new engine, or start the trial."""
        if self._suspects.on_trial:
            cleared = () if self._suspects.is_solo else self._suspects.cleared
            for generation in [g for g in self._held.values() if g.id in cleared]:
                self._release(generation)
        self._try_next()

    def progress(self, in_flight: int) -> None:
        """Check after a step, with `in_flight` sequences sent, whether the suspect has passed its trial."""
        trying = self._trying
        if trying is not None and trying.completion_tokens >= self._trial_target:
            self._suspects.passed(beside=in_flight > 1)
            if trying.cancelled is not None:
                self._withdraw(trying)
            self._try_next()

    def ended(self, generation: Generation) -> None:
        """Forget a sequence that has ended."""
        self._held.pop(generation.id, None)
        self._suspects.ended(generation.id)
        if generation is self._trying:
            self._try_next()

    def clear(self) -> None:
        """Forget all sequences: there will be no other engine."""
        self._held.clear()
        self._trying = None
        self._suspects = Suspects()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _try_next(self) -> None:
        """Send the next suspect; after the last one, send all held sequences."""
        self._trying = None
        while (id_ := self._suspects.next_suspect()) is not None:
            generation = self._held[id_]
            self._trial_target = generation.completion_tokens + self._suspects.margin
            self._trying = generation
            self._release(generation)
            return
        for generation in list(self._held.values()):
            self._release(generation)

    def _release(self, generation: Generation) -> None:
        del self._held[generation.id]
        if generation.times_sent:
            self.replayed += 1
        self._send(generation)


def in_flight(live: Sequence[Generation], in_steps: Collection[int]) -> list[Generation]:
    """Return the sequences of `live` (in order of arrival) that may have been in the last steps, likeliest culprit
    first: those not yet reported as admitted, then those in prefill, then decoding ones; each newest first."""
    present = [generation for generation in reversed(live) if generation.request.arrival in in_steps]
    return sorted(present, key=_blame_order)


def _blame_order(generation: Generation) -> int:
    if not generation.runs:
        return 0
    return 1 if generation.completion_tokens == generation.resumed_at else 2
