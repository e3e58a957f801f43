"""One pass over the model for all that a step computes: the tokens of all rows side by side, each at its position.

The model sees T tokens as a batch of T sequences of one token (T, 1), so its linear layers read their weights once
for prompts and decoding rows alike. Attention alone has to know which token belongs to whom; it is taken over by
the layers' caches (`mlxlm.route_attention`), behind which a `Layout` keeps keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt

from ...core.messages import PrefixStatistics, Sharing
from ..device.staging import Put, direct
from ..mlxlm import Selection
from .batch_buckets import decode_bucket, head_size


class RowSegment(msgspec.Struct, frozen=True):
    """What one row computes in a step: `tokens`, the first of them at position `start` of its sequence.

    Where `previous` is not negative, the last token is what the step before picks, at that place among its picks, and
    whatever stands for it here is not looked at. `wants` is for how many of the last tokens logits are wanted: none,
    one, or all; with `picks` the last one's pick the row's next token. A `filler` is of no row: nothing that is
    computed of it is looked at.
    """

    id: str
    tokens: Sequence[int]
    start: int
    wants: int = 0
    picks: bool = False
    previous: int = -1
    filler: bool = False

    @property
    def known(self) -> list[int]:
        """The tokens, which must all be known."""
        assert self.previous < 0, "a token that is not known yet"
        return list(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class PlacedSegment(msgspec.Struct, frozen=True):
    """A piece in a pass: its tokens are `first` to `first + count` of it, and stand at `start` in row `id`, or are a
    `filler`."""

    id: str
    first: int
    count: int
    start: int
    filler: bool = False

    @property
    def end(self) -> int:
        return self.start + self.count


class Layout(Protocol):
    """Where the keys and values of all rows are. Memory is given out in `blocks` blocks of `block` tokens (0 blocks:
    as many as it takes). Passes come `in_sizes` (`sizes`) where that is what suits the model."""

    block: int
    blocks: int
    lookahead: int
    in_sizes: bool
    sharing: Sharing

    def layers(self) -> list[Any]:
        """What the model is given as its caches."""
        ...

    def room(self) -> int:
        """Blocks that no row holds."""
        ...

    def reuse(self, row: str, salt: str, tokens: Sequence[int]) -> int:
        """How many of `tokens` are kept already; they are the row's from now on."""
        ...

    def admit(self, row: str, salt: str, tokens: Sequence[int] = ()) -> None:
        """A row that holds what `reuse` gave it, or nothing. `tokens` are what it computes; more may be added to them
        later."""
        ...

    def order(self, pieces: Sequence[RowSegment]) -> list[RowSegment]:
        """The order that suits attention best, with what fills a size."""
        ...

    def begin(self, placed: Sequence[PlacedSegment], positions: npt.NDArray[np.int32]) -> None:
        """The next pass computes this. Raises MemoryError where there is no block left."""
        ...

    def written(self) -> list[Any]:
        """What to evaluate so that the pass's keys and values are kept."""
        ...

    def settle(self, held: Mapping[str, int]) -> None:
        """So many of each row's tokens are all that it holds, computed and known: others may reuse them."""
        ...

    def release(self, row: str) -> None:
        """Forget a row."""
        ...

    def lose(self, row: str) -> None:
        """Nothing that the row holds can be trusted any more."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...

    def reset(self) -> int:
        """Forget everything that only waits to be reused; how many tokens that were."""
        ...

    def row_bytes(self) -> int:
        """Bytes that rows hold."""
        ...

    def statistics(self) -> PrefixStatistics:
        """What was reused, and is kept to be."""
        ...


class ForwardPass:
    """Runs pieces through `module`, whose caches are `layout`'s; `select` says what its head sees, and `put` makes
    arrays."""

    def __init__(self, module: Any, layout: Layout, select: Selection | None, put: Put = direct) -> None:
        self._module = module
        self._layout = layout
        self._select = select
        self._put = put
        self._layers = layout.layers()

    def run(self, pieces: Sequence[RowSegment], previous: Any | None) -> tuple[Any | None, list[RowSegment]]:
        """Logits (N, V), not evaluated, of all tokens that are wanted, and the pieces in the order they stand in; None
        where none are. `previous` are the picks of the step before, where a piece needs them, and maybe zeros."""
        pieces = self._layout.order(pieces)
        placed, first = [], 0
        for piece in pieces:
            count = len(piece.tokens)
            placed.append(PlacedSegment(piece.id, first, count, piece.start, piece.filler))
            first += count
        starts = np.array([piece.start for piece in pieces], np.int32)
        counts = np.array([place.count for place in placed], np.int32)
        self._layout.begin(placed, _spread(starts, counts))
        wants = np.array([piece.wants for piece in pieces], np.int32)
        rows = _spread(np.cumsum(counts, dtype=np.int32) - wants, wants)
        wanted = self._wanted([piece for piece in pieces if not piece.filler], rows, first)
        return self._logits(self._tokens(pieces, placed, first, previous), wanted, len(rows)), pieces

    def _logits(self, tokens: Any, wanted: Any | None, count: int) -> Any | None:
        """The first `count` logits of what is `wanted` of the tokens."""
        try:
            if self._select is not None:
                self._select.rows = wanted
            logits = self._module(tokens[:, None], cache=self._layers)
        finally:
            if self._select is not None:
                self._select.rows = None
        if not count:
            return None
        logits = logits[:, -1, :]
        if wanted is not None and self._select is None:
            logits = logits[wanted]
        return logits if logits.shape[0] == count else logits[:count]

    def _wanted(self, pieces: Sequence[RowSegment], rows: npt.NDArray[np.int32], count: int) -> Any | None:
        """Which of `count` tokens the head is to see, those at `rows` first; None where it is to see all. In sizes it
        sees more than is wanted, and all where rows decode alone."""
        if not self._layout.in_sizes:
            return self._put(rows)[0] if 0 < len(rows) < count else None
        if len(rows) == len(pieces) and decode_bucket(len(rows)) == count and rows[-1] == len(rows) - 1:
            return None
        single = sum(len(piece.tokens) == 1 for piece in pieces)
        size = head_size(single, len(pieces), len(rows))
        return self._put(np.pad(rows, (0, size - len(rows))))[0]

    def _tokens(
        self, pieces: Sequence[RowSegment], placed: Sequence[PlacedSegment], count: int, previous: Any | None
    ) -> Any:
        """The pass's tokens (T,) int32, on the device."""
        if previous is not None and count <= previous.shape[0]:
            own = pieces[:-1] if pieces[-1].filler else pieces
            single = sum(len(piece.tokens) for piece in own) == len(own)
            if single and [piece.previous for piece in own] == list(range(len(own))):
                return previous if count == previous.shape[0] else previous[:count]
        host = np.zeros(count, np.int32)
        source_of = np.full(count, -1, np.int32)
        for piece, place in zip(pieces, placed, strict=True):
            host[place.first : place.first + place.count] = piece.tokens
            if piece.previous >= 0:
                source_of[place.first + place.count - 1] = piece.previous
        if previous is None or (source_of < 0).all():
            return self._put(host)[0]
        known, source = self._put(host, source_of)
        return mx.where(source >= 0, previous[mx.maximum(source, 0)], known)


def _spread(starts: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """`counts[i]` numbers from `starts[i]` on, for each i, one behind the other."""
    if (counts == 1).all():
        return starts
    ends = np.cumsum(counts, dtype=np.int32)
    spread: npt.NDArray[np.int32] = np.arange(ends[-1], dtype=np.int32) + np.repeat(starts - (ends - counts), counts)
    return spread
