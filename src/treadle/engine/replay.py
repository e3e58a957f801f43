"""Sequences that outlive their engine: held back while it is away, sent again once another one is ready.

A sequence that ran goes on from the tokens it has, with the same draws; its client sees a pause. One that waited waits
on for what is left of its time, of which an outage takes its part. While suspects are tried (`suspects`) everything
else is held back, also what comes meanwhile.

An outage ends with the next engine's Ready, or with the supervisor's word that there will be none: each start is
bounded (`Timeouts.load_s`), and so is how many may fail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from .deaths import Death
from .generation import Generation
from .suspects import Suspects, Verdict

Send = Callable[[Generation], None]


class Replay:
    """Decides when each of the client's sequences is sent. `send` hands one to the owner that lives now; `withdraw`
    takes back one that nobody wants any more, after its trial."""

    def __init__(self, send: Send, withdraw: Send) -> None:
        self.replayed = 0
        self._send = send
        self._withdraw = withdraw
        self._held: dict[str, Generation] = {}
        self._suspects = Suspects()
        self._trying: Generation | None = None
        self._goal = 0

    @property
    def trying(self) -> bool:
        """Whether a suspect runs its trial."""
        return self._trying is not None

    @property
    def held(self) -> int:
        """Sequences that the owner does not have."""
        return len(self._held)

    def holds(self, generation: Generation) -> bool:
        """Whether the owner does not have it."""
        return generation.id in self._held

    def accuses(self, generation: Generation) -> bool:
        """Whether its trial is on or due, after a death that was not from outside."""
        return self._suspects.accuses(generation.id)

    def submit(self, generation: Generation) -> None:
        """A new sequence: sent at once, or after the trial."""
        if self.trying:
            self._held[generation.id] = generation
        else:
            self._send(generation)

    def died(self, death: Death, live: Sequence[Generation], now: float) -> Verdict | None:
        """The engine is gone: hold everything back that is `live`, in the order of arrival. Who is at fault, once that
        is clear."""
        suspects = in_flight(live, death.in_steps)
        for generation in suspects:
            generation.begun = True
        self._trying = None
        self._held = {generation.id: generation for generation in live}
        return self._suspects.died(death.cause, [generation.id for generation in suspects], now)

    def back(self) -> None:
        """Another engine is ready: send everything, or begin the trial."""
        if self._suspects.on_trial:
            cleared = () if self._suspects.alone else self._suspects.cleared
            for generation in [g for g in self._held.values() if g.id in cleared]:
                self._release(generation)
        self._go_on()

    def progress(self, in_flight: int) -> None:
        """The engine has told of a step, with so many sequences in flight: has the suspect passed?"""
        trying = self._trying
        if trying is not None and trying.completion_tokens >= self._goal:
            self._suspects.passed(beside=in_flight > 1)
            if trying.cancelled is not None:
                self._withdraw(trying)
            self._go_on()

    def ended(self, generation: Generation) -> None:
        """A sequence has ended, wherever it was."""
        self._held.pop(generation.id, None)
        self._suspects.ended(generation.id)
        if generation is self._trying:
            self._go_on()

    def drop_all(self) -> None:
        """There will be no other engine."""
        self._held.clear()
        self._trying = None
        self._suspects = Suspects()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Try the next suspect; after the last one send everything."""
        self._trying = None
        while (id_ := self._suspects.next()) is not None:
            generation = self._held[id_]
            self._goal = generation.completion_tokens + self._suspects.margin
            self._trying = generation
            self._release(generation)
            return
        for generation in list(self._held.values()):
            self._release(generation)

    def _release(self, generation: Generation) -> None:
        del self._held[generation.id]
        if generation.sent:
            self.replayed += 1
        self._send(generation)


def in_flight(live: Sequence[Generation], in_steps: Collection[int]) -> list[Generation]:
    """Those of `live`, in the order of arrival, that may have been in the last steps, the likeliest culprit first: ones
    whose admission is not told yet, then prompts, then what decoded, each the newest first."""
    there = [generation for generation in reversed(live) if generation.request.arrival in in_steps]
    return sorted(there, key=_progress)


def _progress(generation: Generation) -> int:
    if not generation.runs:
        return 0
    return 1 if generation.completion_tokens == generation.resumed_at else 2
