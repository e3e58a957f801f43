"""The path that serves every architecture: rows keep mlx-lm's own caches, merged into one batch while they decode.

The rows' caches can hold anything (recurrent state, rotating windows, lists of caches). Prompts are read row by row, or
several short ones in a padded pass; rows decode in one padded batch, or one by one where their caches can't be merged.
Rows that join or leave cost the others a copy: where a model's caches are plain keys and values, `flat` is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..core.messages import PrefixStatistics
from . import mlxlm
from .batch import DecodeBatch, own_bytes
from .body import Computed
from .flat import Piece
from .guard import mlx_runtime
from .mlxlm import Caches
from .prefill import passes, together

if TYPE_CHECKING:
    from .model import LoadedModel


class MergedRows:
    """Rows of `model` in mlx-lm's caches. Nothing is kept of rows that have gone."""

    lookahead = 0

    def __init__(self, model: LoadedModel, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._clock = clock
        self._cached: dict[str, int] = {}
        self._own: dict[str, Caches] = {}  # caches of rows that are not in the batch
        self._batch = DecodeBatch()

    @property
    def block(self) -> int:
        return 1

    @property
    def blocks(self) -> int:
        return 0

    def room(self) -> int:
        return 0

    def reuse(self, row: str, salt: str, tokens: Sequence[int]) -> int:
        return 0

    def admit(self, row: str, salt: str) -> None:
        self._cached[row] = 0
        self._own[row] = self._model.new_caches()

    def release(self, row: str) -> None:
        """Forget a row. Its memory is free at once, or at the next decode step if others share its batch."""
        self._cached.pop(row, None)
        self._own.pop(row, None)
        self._batch.forget(row)

    def lose(self, rows: Sequence[str]) -> None:
        """The caches of these rows may have advanced in some layers only. Where a pass over the batch failed, these are
        all that are in it."""
        for row in rows:
            self.release(row)

    def settle(self, row: str, tokens: Sequence[int]) -> None:
        """Nothing is kept."""

    def reset(self) -> int:
        return 0

    def row_bytes(self) -> int:
        return self._batch.kv_bytes + own_bytes(self._own)

    def statistics(self) -> PrefixStatistics:
        return PrefixStatistics()

    def close(self) -> None:
        self._cached.clear()
        self._own.clear()
        self._batch.drop()

    def compute(self, pieces: Sequence[Piece], previous: Any | None) -> Computed:
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
        return done

    def _join(self, pieces: Sequence[Piece], scores: dict[str, Any], picked: dict[str, Any], done: Computed) -> None:
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

    def _read_all(self, heads: Sequence[Piece], done: Computed) -> dict[str, Any]:
        """Several short chunks in one pass where the model can, the others one by one; logits of those to be scored."""
        scores: dict[str, Any] = {}
        shared = [piece for piece in heads if not piece.wants] if self._model.shares_prefill else []
        for group in passes(shared):
            if len(group) == 1 or not self._read_together(group):
                for piece in group:
                    self._read(piece, scores, done)
        for piece in heads:
            if piece not in shared:
                self._read(piece, scores, done)
        return scores

    def _read_together(self, pieces: Sequence[Piece]) -> bool:
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
            self._cached[piece.id] = piece.end
        return True

    def _read(self, piece: Piece, scores: dict[str, Any], done: Computed) -> None:
        caches = self._own.get(piece.id)
        if caches is None:
            done.refused[piece.id] = "the runner holds no cache to prefill for this request"
            return
        assert piece.start == self._cached[piece.id], f"chunk at {piece.start}, cached {self._cached[piece.id]}"
        try:
            with mlx_runtime("reading a prompt"):
                if piece.wants:
                    scores[piece.id] = self._model.score(piece.known, caches)
                else:
                    self._model.prefill(piece.known, caches)
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            done.refused[piece.id] = f"the prompt can't be read: {error}"
            return
        self._cached[piece.id] = piece.end

    # Decoding ----------------------------------------------------------------------------------------------------

    def _decode(self, pieces: Sequence[Piece], done: Computed) -> tuple[list[str], Any | None]:
        """Logits (B, V) of rows' last tokens, not evaluated, and whose they are."""
        wanted = {}
        for piece in pieces:
            if piece.id in self._own or (piece.id in self._cached and piece.id in self._batch.ids):
                wanted[piece.id] = piece
            else:
                done.refused[piece.id] = "the runner holds no cache to decode this request from"
        if not wanted:
            return [], None
        for id_, piece in wanted.items():
            assert piece.end == self._cached[id_] + 1, "the prompt must be in the cache"
            self._cached[id_] = piece.end
        with mlx_runtime("decoding"):
            if not self._model.batched:
                return self._one_by_one(wanted, done)
            self._batch.arrange(list(wanted), self._own)
            ids = [id_ for id_ in self._batch.ids if id_ is not None]
            logits = self._model.decode([wanted[id_].known[-1] for id_ in ids], self._batch.caches)
        done.arrays.extend(mlxlm.states(self._batch.caches))
        return ids, logits

    def _one_by_one(self, wanted: dict[str, Piece], done: Computed) -> tuple[list[str], Any]:
        logits = [self._model.decode([piece.known[-1]], self._own[id_]) for id_, piece in wanted.items()]
        for id_ in wanted:
            done.arrays.extend(mlxlm.states(self._own[id_]))
        return list(wanted), mx.concatenate(logits)


def _head(piece: Piece) -> Piece | None:
    """The part of a piece that comes before the token whose logits pick the next one."""
    if not piece.picks:
        return piece
    count = len(piece.tokens) - 1
    if not count:
        return None
    return Piece(piece.id, piece.tokens[:count], piece.start, wants=max(0, piece.wants - 1), picks=False)
