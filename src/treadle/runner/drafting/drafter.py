"""The protocol of drafters.

A drafter proposes tokens and is never asked whether they are right: a step verifies them, and the scheduler decides
from measured costs and learned acceptance how many it verifies. Proposals that no step verifies are compared with the
tokens that plain steps sample, so that acceptance is known before anything is spent on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ...core.messages import Submit
from ...core.plan import DraftTrial
from ...core.statistics import DrafterStatistics


class DraftedRow(Protocol):
    """A sequence as drafters see it. `tokens` are its prompt and the tokens that it gained; they only grow. `skipped`
    tokens of the prompt are not in its cache, whose tokens have `positions` (`SequencePositions`); None: their
    indices."""

    @property
    def id(self) -> str: ...

    @property
    def salt(self) -> str: ...

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def request(self) -> Submit: ...

    @property
    def skipped(self) -> int: ...

    @property
    def positions(self) -> Any: ...


class Offer(NamedTuple):
    """Draft tokens that are ready for a row, and their `Drafter.match`."""

    tokens: int = 0
    match: int = 0


class NewStates(NamedTuple):
    """Hidden states (n, W) of a row's cached tokens from the index `start` on, on the device: those behind the model's
    last norm, or those in front of some layers, side by side. Each is followed by another token."""

    row: DraftedRow
    start: int
    states: Any


class Drafter(Protocol):
    """A source of draft tokens, on the owner's thread."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its name for status, such as "lookup", "draft", "mtp" or "eagle3"; those of several that draft together."""
        ...

    def propose(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> list[Sequence[int]]:
        """Return the draft tokens behind the last token of each row, at most `most` of them. The step that is about to
        start verifies them."""
        ...

    def follow(self, rows: Sequence[DraftedRow], seconds: float) -> list[DraftTrial]:
        """Compare proposals with what `rows` gained in a step of `seconds` that is finished, make new ones within an
        allowance of these seconds, and return the trials that are over."""
        ...

    def ready(self, row: DraftedRow) -> int:
        """Return how many draft tokens are ready behind the tokens of a row. Cheap: asked for each row in each step."""
        ...

    def match(self, row: DraftedRow) -> int:
        """Return the number of a row's last tokens that match those before the place where its ready drafts were found;
        0 where they were not looked up."""
        ...

    def release(self, row_id: str) -> None:
        """Forget a row, known or not."""
        ...

    def warm_up(self) -> None:
        """Run every kind of pass once, without rows. Leaves nothing behind."""
        ...

    def reset(self) -> None:
        """Clear what is cached for rows to come."""
        ...

    def statistics(self) -> DrafterStatistics:
        """Return what its cache holds now."""
        ...

    def close(self) -> None:
        """Free everything. Nothing is called after it."""
        ...


@runtime_checkable
class StateReader(Protocol):
    """A drafter that observes hidden states of what is computed for rows, if it `reads_states`."""

    reads_states: bool

    def observe(self, found: Sequence[NewStates]) -> None:
        """Take over the hidden states that a finished step gave; some may be known, and some before may be missing."""
        ...


def state_reader(drafter: Drafter) -> StateReader | None:
    """Return `drafter`, if it reads hidden states."""
    return drafter if isinstance(drafter, StateReader) and drafter.reads_states else None
