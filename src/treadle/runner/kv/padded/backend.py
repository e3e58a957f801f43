"""The path that serves every architecture: rows keep mlx-lm's own caches, merged into one batch while they decode.

The rows' caches can hold anything (recurrent state, rotating windows, lists of caches). Prompts are read row by row, or
several short ones in a padded pass; rows decode in one padded batch, or one by one where their caches can't be merged.
Rows that join or leave cost the others a copy: where a model's caches are plain keys and values, `flat` is used.

Prompts are kept as snapshots (`snapshots`) of rows on their way, and of what rows leave that have not failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from msgspec.structs import replace

from ....core.messages import PrefixStatistics, Sharing
from ... import mlxlm
from ...device.guard import mlx_runtime
from ...forward.ragged import RowSegment
from ...mlxlm import Caches
from ..backend import Computed
from .batch import DecodeBatch, own_bytes
from .prefill import passes, together
from .snapshots import BLOCK, LEAST, Snapshots

if TYPE_CHECKING:
    from ...loading.model import LoadedModel


UNKNOWN_BUDGET = 2 << 30
"""Bytes for caches, where nothing says how much memory there is: half of it at most is for snapshots."""


@dataclass(slots=True, eq=False)
class _Row:
    """A row whose caches hold `cached` tokens, the first of `tokens`. It is kept after as many as `marks` says, and
    when it leaves, after as many as are `settled`; one that failed has none. `kept` tokens are kept already."""

    salt: str
    tokens: Sequence[int] = ()
    cached: int = 0
    kept: int = 0
    settled: int | None = None
    marks: list[int] = field(default_factory=list)
    shares: bool = True


class PaddedBackend:
    """Rows of `model` in mlx-lm's caches."""

    lookahead = 0
    sharing = Sharing.MARKED

    def __init__(self, model: LoadedModel, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._clock = clock
        self._rows: dict[str, _Row] = {}
        self._own: dict[str, Caches] = {}  # caches of rows that are not in the batch
        self._batch = DecodeBatch()
        self._snapshots = _snapshots(model) if model.keeps_prefixes else None

    @property
    def block(self) -> int:
        return 1

    @property
    def blocks(self) -> int:
        return 0

    def room(self) -> int:
        return 0

    def reuse(self, row: str, salt: str, tokens: Sequence[int]) -> int:
        self.release(row)
        found = None if self._snapshots is None else self._snapshots.find(salt, tokens, row)
        if found is None:
            return 0
        self._rows[row] = _Row(salt, cached=found.tokens, kept=found.tokens)
        self._own[row] = found.caches
        return found.tokens

    def admit(self, row: str, salt: str, tokens: Sequence[int] = ()) -> None:
        if row not in self._rows:
            self._rows[row] = _Row(salt)
            self._own[row] = self._model.new_caches()
        mine = self._rows[row]
        mine.tokens = tokens
        if self._snapshots is not None:
            mine.marks = self._snapshots.marks(salt, tokens[:-1], mine.cached, row)
            self._snapshots.shrink(self._snapshot_room())

    def mark(self, row: str, ends: Sequence[int]) -> None:
        """Kept after whole blocks, if it is not too late: then one copy does for all who part a few tokens later."""
        mine = self._rows.get(row)
        if mine is None:
            return
        marks = set(mine.marks)
        for end in ends:
            blocks = end // BLOCK * BLOCK
            if blocks > mine.kept:
                marks.add(blocks if blocks > mine.cached and blocks >= mine.kept + LEAST else end)
        mine.marks = sorted(marks)

    def release(self, row: str) -> None:
        """Forget a row. Its memory is free at once, or at the next decode step if others share its batch."""
        mine = self._rows.get(row)
        leaves = None if mine is None else self._left_by(row, mine)
        self._forget(row)
        if mine is not None and mine.settled is not None and leaves is not None:
            self._keep(row, mine, mine.tokens[: mine.settled], leaves)

    def _left_by(self, row: str, mine: _Row) -> Caches | None:
        """What a row leaves that can be trusted."""
        if self._snapshots is None or mine.settled != mine.cached:
            return None
        if row in self._own:
            return self._own[row]
        return self._batch.of(row) if row in self._batch.ids else None

    def lose(self, rows: Sequence[str]) -> None:
        """The caches of these rows may have advanced in some layers only. Where a pass over the batch failed, these are
        all that are in it."""
        for row in rows:
            self._forget(row)

    def _forget(self, row: str) -> None:
        self._rows.pop(row, None)
        self._own.pop(row, None)
        self._batch.forget(row)

    def settle(self, held: Mapping[str, int]) -> None:
        for row, count in held.items():
            if row in self._rows:
                self._rows[row].settled = count

    def reset(self) -> int:
        for row in self._rows.values():
            row.shares = False
        return 0 if self._snapshots is None else self._snapshots.clear()

    def row_bytes(self) -> int:
        return self._batch.kv_bytes + own_bytes(self._own)

    def statistics(self) -> PrefixStatistics:
        return PrefixStatistics() if self._snapshots is None else self._snapshots.statistics()

    def close(self) -> None:
        self._rows.clear()
        self._own.clear()
        self._batch.drop()
        self.reset()

    # Prefixes ----------------------------------------------------------------------------------------------------

    def _snapshot_room(self) -> int:
        """Bytes for snapshots: what the rows leave, and half at most."""
        budget = self._model.kv_budget_bytes or UNKNOWN_BUDGET
        return min(budget // 2, budget - self.row_bytes())

    def _keep(self, row: str, mine: _Row, tokens: Sequence[int], caches: Caches) -> None:
        """Keep `caches`, which are nobody's, after `tokens`, if that spares others enough."""
        if self._snapshots is None or not mine.shares or len(tokens) < max(BLOCK, mine.kept + LEAST):
            return
        self._snapshots.keep(mine.salt, tokens, caches, self._snapshot_room(), row)
        mine.kept = len(tokens)

    def _keep_marked(self, piece: RowSegment) -> None:
        """Keep a row that has come to one of its marks."""
        mine = self._rows.get(piece.id)
        if mine is not None and mine.cached == piece.end and piece.end in mine.marks:
            self._keep(piece.id, mine, mine.tokens[: piece.end], mlxlm.twins(self._own[piece.id]))

    def _parts(self, piece: RowSegment) -> list[RowSegment]:
        """The piece, parted where the row is to be kept."""
        mine = self._rows.get(piece.id)
        marks = [] if mine is None or piece.wants else [mark for mark in mine.marks if piece.start < mark < piece.end]
        borders = [piece.start, *marks, piece.end]
        return (
            [
                replace(piece, tokens=piece.tokens[start - piece.start : end - piece.start], start=start)
                for start, end in pairwise(borders)
            ]
            if marks
            else [piece]
        )

    def compute(self, pieces: Sequence[RowSegment], previous: Any | None) -> Computed:
        """Prompts are computed at once, all but the tokens whose logits are wanted for a pick; those share a pass."""
        began = self._clock()
        done = Computed()
        heads = [head for piece in pieces if (head := _head(piece)) is not None]
        scores = self._read_all(heads, done)
        if heads:
            done.prefill_s = self._clock() - began
        last = [piece for piece in pieces if piece.picks and piece.id not in done.refused]
        ids, logits = self._decode(last, done)
        if scores:
            picked = {} if logits is None else {id_: logits[i : i + 1] for i, id_ in enumerate(ids)}
            self._join(pieces, scores, picked, done)
        else:
            done.logits, done.places = logits, {id_: (i, 1) for i, id_ in enumerate(ids)}
        if self._snapshots is not None:
            self._snapshots.shrink(self._snapshot_room())
        return done

    def _join(
        self, pieces: Sequence[RowSegment], scores: dict[str, Any], picked: dict[str, Any], done: Computed
    ) -> None:
        """Put a row's logits for its prompt's scores and those for its pick side by side."""
        parts: list[Any] = []
        first = 0
        for piece in pieces:
            own = [logits[piece.id] for logits in (scores, picked) if piece.id in logits]
            if own and piece.id not in done.refused:
                count = sum(part.shape[0] for part in own)
                done.places[piece.id] = (first, count)
                first += count
                parts.extend(own)
        done.logits = mx.concatenate(parts) if parts else None

    # Prompts -----------------------------------------------------------------------------------------------------

    def _read_all(self, heads: Sequence[RowSegment], done: Computed) -> dict[str, Any]:
        """Chunks, up to where their rows are to be kept and on from there; logits of those to be scored."""
        scores: dict[str, Any] = {}
        for parts in zip_longest(*(self._parts(piece) for piece in heads)):
            some = [part for part in parts if part is not None and part.id not in done.refused]
            self._read_some(some, scores, done)
            for part in some:
                self._keep_marked(part)
        return scores

    def _read_some(self, heads: Sequence[RowSegment], scores: dict[str, Any], done: Computed) -> None:
        """Several short chunks in one pass where the model can, the others one by one."""
        shared = [piece for piece in heads if not piece.wants] if self._model.shares_prefill else []
        for group in passes(shared):
            if len(group) == 1 or not self._read_together(group):
                for piece in group:
                    self._read(piece, scores, done)
        for piece in heads:
            if piece not in shared:
                self._read(piece, scores, done)

    def _read_together(self, pieces: Sequence[RowSegment]) -> bool:
        """Compute `pieces` in one pass. False, with nothing changed, where one of them has to be looked at alone."""
        if any(piece.id not in self._own for piece in pieces):
            return False
        try:
            with mlx_runtime("reading prompts"):
                caches = together(
                    self._model.module,
                    [piece.known for piece in pieces],
                    [self._own[piece.id] for piece in pieces],
                    pad_to=self._model.pad_to,
                )
        except (ValueError, TypeError, IndexError, OverflowError):
            return False
        for piece, own in zip(pieces, caches, strict=True):
            self._own[piece.id] = own
            self._rows[piece.id].cached = piece.end
        return True

    def _read(self, piece: RowSegment, scores: dict[str, Any], done: Computed) -> None:
        caches = self._own.get(piece.id)
        if caches is None:
            done.refused[piece.id] = "the runner holds no cache to prefill for this request"
            return
        mine = self._rows[piece.id]
        assert piece.start == mine.cached, f"chunk at {piece.start}, cached {mine.cached}"
        try:
            with mlx_runtime("reading a prompt"):
                if piece.wants:
                    scores[piece.id] = self._model.score(piece.known, caches)
                else:
                    self._model.prefill(piece.known, caches)
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            done.refused[piece.id] = f"the prompt can't be read: {error}"
            mine.settled = None  # some layers may have gone on
            return
        mine.cached = piece.end

    # Decoding ----------------------------------------------------------------------------------------------------

    def _decode(self, pieces: Sequence[RowSegment], done: Computed) -> tuple[list[str], Any | None]:
        """Logits (B, V) of rows' last tokens, not evaluated, and whose they are."""
        wanted = {}
        for piece in pieces:
            if piece.id in self._own or (piece.id in self._rows and piece.id in self._batch.ids):
                wanted[piece.id] = piece
            else:
                done.refused[piece.id] = "the runner holds no cache to decode this request from"
        if not wanted:
            return [], None
        for id_, piece in wanted.items():
            mine = self._rows[id_]
            assert piece.end == mine.cached + 1, "the prompt must be in the cache"
            mine.cached = piece.end
        with mlx_runtime("decoding"):
            if not self._model.batched:
                return self._one_by_one(wanted, done)
            self._batch.arrange(list(wanted), self._own)
            ids = [id_ for id_ in self._batch.ids if id_ is not None]
            logits = self._model.decode([wanted[id_].known[-1] for id_ in ids], self._batch.caches)
        done.arrays.extend(mlxlm.states(self._batch.caches))
        return ids, logits

    def _one_by_one(self, wanted: dict[str, RowSegment], done: Computed) -> tuple[list[str], Any]:
        logits = [self._model.decode([piece.known[-1]], self._own[id_]) for id_, piece in wanted.items()]
        for id_ in wanted:
            done.arrays.extend(mlxlm.states(self._own[id_]))
        return list(wanted), mx.concatenate(logits)


def _snapshots(model: LoadedModel) -> Snapshots:
    """Snapshots of the model's rows, which can be cut where all tokens are there, one by one."""
    windows = model.library.windows(model.module)
    return Snapshots(model.library, cuts=windows is not None and not any(windows))


def _head(piece: RowSegment) -> RowSegment | None:
    """The part of a piece that comes before the token whose logits pick the next one."""
    if not piece.picks:
        return piece
    count = len(piece.tokens) - 1
    if not count:
        return None
    return RowSegment(piece.id, piece.tokens[:count], piece.start, wants=max(0, piece.wants - 1), picks=False)
