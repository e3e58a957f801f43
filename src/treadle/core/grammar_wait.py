"""Sequences that wait for their grammars before they wait for a slot."""

from __future__ import annotations

from collections.abc import Iterator

from .grammar_state import GrammarLookup, GrammarState
from .messages import WaitReason
from .outputs import Outputs
from .queue import Queue
from .sequence import Sequence


class GrammarWait:
    """Entrance to `queue`: it holds sequences there until `lookup` says that their grammars are compiled."""

    def __init__(self, queue: Queue, lookup: GrammarLookup, outputs: Outputs) -> None:
        self._queue = queue
        self._enqueued = False  # since the last `ask`
        self._lookup = lookup
        self._outputs = outputs

    def enqueue(self, seq: Sequence) -> None:
        """Queue a sequence without a constraint; hold any other until the next `ask`."""
        if seq.request.constraint is None:
            self._queue.push(seq)
        else:
            self._queue.hold(seq)
            self._enqueued = True

    @property
    def unasked(self) -> bool:
        """Whether a sequence is held whose grammar was not asked for."""
        return self._enqueued and bool(self._queue.held)

    def ask(self) -> Iterator[tuple[Sequence, str]]:
        """Queue the held sequences whose grammars are compiled. Yield those whose grammars can't be, with messages."""
        self._enqueued = False
        for seq in list(self._queue.held):
            assert seq.request.constraint is not None
            status = self._lookup(seq.request.constraint)
            if status.state is GrammarState.PENDING:
                self._report(seq, WaitReason.GRAMMAR)
            elif status.state is GrammarState.READY:
                self._queue.push(seq)
                self._report(seq, WaitReason.SLOT)
            else:
                yield seq, status.message

    def _report(self, seq: Sequence, reason: WaitReason) -> None:
        if seq.waits_for is not reason:
            seq.waits_for = self._outputs.of(seq).waits_for = reason
