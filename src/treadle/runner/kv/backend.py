"""What the text runner stands on: rows with caches, and a pass over the model for some of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...core.messages import PrefixStatistics, Sharing
from ..forward.ragged import ForwardPass, Layout, RowSegment


@dataclass
class Computed:
    """What a pass gives, not evaluated: `logits` (N, V), of which row `id` has `places[id]` as (first, count), and
    `arrays` to evaluate with whatever is made of them. `refused` rows can't go on, and why; they were not computed.
    `prefill_s` are seconds spent on prompts alone, where they had a pass of their own."""

    logits: Any | None = None
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    arrays: list[Any] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    prefill_s: float | None = None


class KvRows(Protocol):
    """Rows and their caches. `block`, `blocks`, `lookahead`, `sharing`, `room`, `reuse` are what the runner's are."""

    @property
    def block(self) -> int: ...

    @property
    def blocks(self) -> int: ...

    @property
    def lookahead(self) -> int: ...

    @property
    def sharing(self) -> Sharing: ...

    def room(self) -> int: ...

    def reuse(self, row: str, salt: str, tokens: Sequence[int]) -> int: ...

    def admit(self, row: str, salt: str, tokens: Sequence[int] = ()) -> None:
        """A row that holds what `reuse` gave it, or nothing. `tokens` are what it is known to compute, and the one
        behind that; more may be added to them later."""
        ...

    def mark(self, row: str, ends: Sequence[int]) -> None:
        """Others wait until the row has computed as many tokens as one of `ends` says, to go on from there."""
        ...

    def compute(self, pieces: Sequence[RowSegment], previous: Any | None) -> Computed:
        """A pass for `pieces`, one a row; `previous` (int32) are what the step before picked, and maybe zeros."""
        ...

    def settle(self, held: Mapping[str, int]) -> None:
        """So many of each row's tokens are all that its cache holds, computed and known."""
        ...

    def release(self, row: str) -> None:
        """Forget a row. An unknown one is harmless."""
        ...

    def lose(self, rows: Sequence[str]) -> None:
        """A pass for `rows` failed: what their caches hold can't be trusted."""
        ...

    def reset(self) -> int:
        """Forget what is kept of rows that have gone; how many tokens that were."""
        ...

    def row_bytes(self) -> int:
        """Bytes that rows hold."""
        ...

    def statistics(self) -> PrefixStatistics: ...

    def close(self) -> None:
        """Free everything."""
        ...


class FlatRows:
    """Rows of a model that keeps keys and values only, in a layout of this server's own, all in one pass."""

    def __init__(self, layout: Layout, flat: ForwardPass) -> None:
        self._layout = layout
        self._flat = flat
        self._rows: set[str] = set()

    @property
    def block(self) -> int:
        return self._layout.block

    @property
    def blocks(self) -> int:
        return self._layout.blocks

    @property
    def lookahead(self) -> int:
        return self._layout.lookahead

    @property
    def sharing(self) -> Sharing:
        return self._layout.sharing

    def room(self) -> int:
        return self._layout.room()

    def reuse(self, row: str, salt: str, tokens: Sequence[int]) -> int:
        self._rows.add(row)
        return self._layout.reuse(row, salt, tokens)

    def admit(self, row: str, salt: str, tokens: Sequence[int] = ()) -> None:
        self._rows.add(row)
        self._layout.admit(row, salt, tokens)

    def mark(self, row: str, ends: Sequence[int]) -> None:
        """What is settled can be reused wherever prompts part."""

    def compute(self, pieces: Sequence[RowSegment], previous: Any | None) -> Computed:
        done, rows = Computed(), self._rows
        some = [piece for piece in pieces if piece.id in rows]
        if len(some) < len(pieces):
            why = "the runner holds no cache for this request"
            done.refused = {piece.id: why for piece in pieces if piece.id not in rows}
        if not some:
            return done
        done.logits, ordered = self._flat.run(some, previous)
        first = 0
        for piece in ordered:
            if piece.wants:
                done.places[piece.id] = (first, piece.wants)
                first += piece.wants
        done.arrays = self._layout.written()
        return done

    def settle(self, held: Mapping[str, int]) -> None:
        self._layout.settle(held)

    def release(self, row: str) -> None:
        if row in self._rows:
            self._rows.remove(row)
            self._layout.release(row)

    def lose(self, rows: Sequence[str]) -> None:
        for row in rows:
            if row in self._rows:
                self._rows.remove(row)
                self._layout.lose(row)

    def reset(self) -> int:
        return self._layout.reset()

    def row_bytes(self) -> int:
        return self._layout.row_bytes()

    def statistics(self) -> PrefixStatistics:
        return self._layout.statistics()

    def close(self) -> None:
        self._rows.clear()
        self._layout.close()
