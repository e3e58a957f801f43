"""Two drafters for one row: one that costs nothing, and one that computes passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from ...core.plan import DraftTrial
from ...core.statistics import DrafterStatistics
from .drafter import DraftedRow, Drafter, NewStates, state_reader

_WEIGHT = 1 / 8
"""Weight of an outcome in a rate."""


class _Source(IntEnum):
    FREE = 0
    COSTLY = 1


@dataclass(slots=True, eq=False)
class _Record:
    """Shares of accepted tokens of each source for one row, and the proposal that a step verifies: its source, its
    place among the row's tokens, and its tokens. At first the costly one counts as better: trials of the other are
    free."""

    rates: list[float]
    source: _Source = _Source.FREE
    start: int = 0
    tokens: Sequence[int] = ()

    def add(self, source: _Source, accepted: int, wrong: bool) -> None:
        """Add an outcome: so many tokens were right, and maybe the next one was `wrong`."""
        if accepted or wrong:
            rate = accepted / (accepted + wrong)
            self.rates[source] += _WEIGHT * (rate - self.rates[source])

    def resolve(self, row: DraftedRow) -> None:
        """Add the outcome of the proposal that a step has verified."""
        gained = row.tokens[self.start : self.start + len(self.tokens)]
        if not self.tokens or not gained:
            return
        pairs = zip(self.tokens, gained, strict=False)
        accepted = next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(gained))
        self.add(self.source, accepted, accepted < len(gained))
        self.tokens = ()


class Either:
    """Drafts of `free`, whose proposals cost nothing, or of `costly`: where both have some for a row, those of the one
    that was right more often there. Only trials of the one that would be asked are returned."""

    def __init__(self, free: Drafter, costly: Drafter) -> None:
        self.names = (*free.names, *costly.names)
        self._readers = [reader for one in (free, costly) if (reader := state_reader(one)) is not None]
        self.reads_states = bool(self._readers)
        self._free = free
        self._costly = costly
        self._records: dict[str, _Record] = {}

    def observe(self, found: Sequence[NewStates]) -> None:
        for reader in self._readers:
            reader.observe(found)

    def propose(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> list[Sequence[int]]:
        drafts: list[Sequence[int]] = [() for _ in rows]
        for row in rows:
            self._record(row.id).resolve(row)
        wanted = [i for i, count in enumerate(most) if count > 0]
        first = [i for i in wanted if self._is_free(rows[i])]
        self._ask(_Source.FREE, rows, most, first, drafts)
        self._ask(_Source.COSTLY, rows, most, [i for i in wanted if not drafts[i]], drafts)
        self._ask(_Source.FREE, rows, most, [i for i in wanted if not drafts[i] and i not in first], drafts)
        return drafts

    def follow(self, rows: Sequence[DraftedRow], seconds: float) -> list[DraftTrial]:
        for row in rows:
            self._record(row.id).resolve(row)
        trials = self._free.follow(rows, seconds)
        for trial in trials:
            if (record := self._records.get(trial.id)) is not None:  # else it has left
                record.add(_Source.FREE, trial.accepted, trial.accepted < trial.drafted)
        others = self._costly.follow(rows, seconds)
        costly = {row.id for row in rows if self._costly.ready(row) and not self._prefers_free(row)}
        return [*(trial for trial in trials if trial.id not in costly), *others]

    def ready(self, row: DraftedRow) -> int:
        return (self._free if self._is_free(row) else self._costly).ready(row)

    def match(self, row: DraftedRow) -> int:
        return (self._free if self._is_free(row) else self._costly).match(row)

    def release(self, row_id: str) -> None:
        self._records.pop(row_id, None)
        self._free.release(row_id)
        self._costly.release(row_id)

    def warm_up(self) -> None:
        self._free.warm_up()
        self._costly.warm_up()

    def reset(self) -> None:
        self._free.reset()
        self._costly.reset()

    def statistics(self) -> DrafterStatistics:
        """Return those of the costly one: the free one computes nothing."""
        return self._costly.statistics()

    def close(self) -> None:
        self._free.close()
        self._costly.close()

    def _record(self, row_id: str) -> _Record:
        return self._records.setdefault(row_id, _Record([0.5, 0.6]))

    def _is_free(self, row: DraftedRow) -> bool:
        """Whether the free source is to be asked for a row's drafts."""
        return self._free.ready(row) > 0 and (self._prefers_free(row) or not self._costly.ready(row))

    def _prefers_free(self, row: DraftedRow) -> bool:
        rates = self._record(row.id).rates
        return rates[_Source.FREE] >= rates[_Source.COSTLY]

    def _ask(
        self,
        source: _Source,
        rows: Sequence[DraftedRow],
        most: Sequence[int],
        places: Sequence[int],
        drafts: list[Sequence[int]],
    ) -> None:
        """Ask a source for drafts of the rows at `places`, and put them there."""
        if places:
            drafter = self._costly if source is _Source.COSTLY else self._free
            found = drafter.propose([rows[i] for i in places], [most[i] for i in places])
            for i, tokens in zip(places, found, strict=True):
                if tokens:
                    drafts[i], record = tokens, self._record(rows[i].id)
                    record.source, record.start, record.tokens = source, len(rows[i].tokens), tokens
