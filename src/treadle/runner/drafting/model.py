"""The drafter with a model: a smaller one with the same vocabulary, whose greedy tokens are the drafts.

It runs on the owner's thread, on the same device, over a KV backend of its own. Of each row that holds the first of
`row.tokens`, `known` of them, and behind those what the draft fed to itself when it last proposed. What of that has
become tokens of the row is kept, the rest is retracted.

A row is caught up when all but a few of its tokens are computed; those few are part of the first pass of a proposal. A
new prompt, and tokens that plain steps gain, are computed between steps, in chunks that take a small share of the time
of steps, the smaller the fewer of them ask for proposals; until then the row has no drafts. Rows with the fewest tokens
to compute go first, so that a long prompt keeps no other row waiting.

A failure of the draft costs a row its drafts, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.plan import DraftTrial
from ...core.statistics import DrafterStatistics
from ...errors import ModelError
from ..device.owner_thread import OutOfMemory, mlx_runtime
from ..forward.positions import SequencePositions
from ..forward.segments import KvSequence, RowSegment
from ..kv.backend import Clock, KvBackend, WarmLimits, WarmPass
from ..loading.draft import CHUNK
from ..loading.model import LoadedModel, build_backend
from ..step import check_tokens
from .draft_passes import DraftPasses
from .drafter import DraftedRow
from .failed_rows import FailedRows
from .row_text import RowText, text_of

READY_BACKLOG, MOST_READY_BACKLOG = 32, 256
"""Most tokens of a row that the first pass of a proposal computes: so many, or as many as take a quarter of a step."""
SHARE = 1 / 16
"""Share of the time of steps for tokens that are computed between them, where each step asks for proposals."""
IDLE_SHARE, MOST_IDLE_SHARE = 0.005, 1 / 64
"""The same where none does, as nothing is gained then; up to the larger one where one row, whose drafts tell whether
there is something to gain, would fall behind."""
_WEIGHT = 1 / 64
"""Weight of a step in the share of those that ask for proposals. One in which no row is caught up has none: nobody can
ask for any, and without its share of the time a long prompt would keep it so."""
_TIMED_CHUNKS = 2
"""Chunks of the warm-up, the quickest of which tells a token's time: a busy machine may hold up the others."""
LEAST_CHUNK = 32
USUAL = 2
"""Tokens that a row feeds first after a proposal, at most."""
_SALT = "warm-up"


@dataclass(slots=True, eq=False)
class _Row:
    """A row of `tokens` in the draft's cache: `known` of those that the draft computes, and behind them those in `fed`,
    which may become its tokens. The first `checked` of them have embeddings. Their positions are `ahead` of their
    indices, behind a prompt of which it computes a part."""

    sequence: KvSequence
    tokens: Sequence[int]
    known: int = 0
    fed: list[int] = field(default_factory=list)
    checked: int = 0
    ahead: int = 0

    @property
    def backlog(self) -> int:
        """Tokens to compute before a proposal, which feeds the last one."""
        return len(self.sequence.tokens) - 1 - self.known

    @property
    def length(self) -> int:
        """The position of the next token."""
        return len(self.sequence.tokens) + self.ahead

    @classmethod
    def of(cls, row: DraftedRow) -> _Row:
        """Return the place of a row, of whose prompt the draft computes what the served model has of its text."""
        text = text_of(row)
        sequence = KvSequence(row.id, row.salt, row.tokens if text is None else text)
        if text is None:
            return cls(sequence, row.tokens)
        sequence.positions, sequence.private = SequencePositions(text.positions), True
        return cls(sequence, row.tokens, ahead=text.ahead)


class _Proposal(NamedTuple):
    """`most` drafts for the row at `place`."""

    place: int
    row: _Row
    most: int


class ModelDrafter:
    """Drafts of `model` for rows of a model that shares its first `vocabulary` tokens. The thread that builds it owns
    it. `token_s` are seconds of a token in a chunk of a prompt, as the warm-up measured them (0: not measured). Raises
    ModelError where the model's KV backend can't take drafts back."""

    names = ("draft",)

    def __init__(self, model: LoadedModel, vocabulary: int, clock: Clock = time.monotonic) -> None:
        self._model = model
        self._narrow = model.vocabulary < vocabulary
        self._most_chunk = min(CHUNK, model.prefill_tokens or CHUNK)
        self._clock = clock
        self._live: dict[str, KvSequence] = {}  # the registry of the backend's sequences
        self._backend = build_backend(model, self._live, clock)
        _check(model, self._backend)
        self._passes = DraftPasses(self._backend, min(vocabulary, model.vocabulary))
        self._rows: dict[str, _Row] = {}
        self._failed = FailedRows(self._passes, self._backend, self._forget, "the draft model")
        self._free = self._backend.free_blocks()
        self.token_s = 0.0
        self._ready_backlog = min(READY_BACKLOG, self._most_chunk - 1)
        self._debt_s = 0.0
        self._asked = True
        self._asking = 1.0  # the share of steps that ask for proposals: until it is known they may

    # The protocol of drafters --------------------------------------------------------------------------------------

    def propose(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> list[Sequence[int]]:
        self._asked = True
        drafts: list[Sequence[int]] = [() for _ in rows]
        known = [self._row(row) if count > 0 else None for row, count in zip(rows, most, strict=True)]
        self._settle([row for row in known if row is not None])
        proposals = self._fitting(
            _Proposal(i, row, count)
            for i, row in enumerate(known)
            if row is not None and (count := min(most[i], self._drafts_of(row))) > 0
        )
        if not proposals:
            return drafts
        with self._failed.on_failure([one.row.sequence for one in proposals]):
            found = self._passes.chain([_rest(one.row) for one in proposals], [one.most for one in proposals])
            for one, tokens in zip(proposals, found, strict=True):
                self._note(one.row, tokens)
                drafts[one.place] = tokens
        return drafts

    def follow(self, rows: Sequence[DraftedRow], seconds: float) -> list[DraftTrial]:
        """Plain steps prove nothing about proposals, as those cost passes: no trial is returned. Computes tokens that
        rows have and the draft has not, for a share of `seconds`."""
        for row in rows:
            self._row(row)
        self._settle(list(self._rows.values()))
        if self._asked or not self._nobody_ready():
            self._asking += _WEIGHT * (self._asked - self._asking)
        self._asked = False
        self._debt_s = max(0.0, self._debt_s - self._allowance_s(seconds))
        if self.token_s:
            most = min(MOST_READY_BACKLOG, self._most_chunk - 1)  # more would never fit into a proposal's first pass
            self._ready_backlog = min(most, max(READY_BACKLOG, int(seconds / 4 / self.token_s)))
        if not self._debt_s:
            self._catch_up(seconds)
        self._free = self._backend.free_blocks()
        return []

    def ready(self, row: DraftedRow) -> int:
        known = self._rows.get(row.id)
        if known is None or known.tokens is not row.tokens:
            return 0
        count = self._drafts_of(known)
        return count if self._growth(known, count) <= self._free or not self._backend.blocks else 0

    def match(self, row: DraftedRow) -> int:
        return 0

    def release(self, row_id: str) -> None:
        self._failed.release(row_id)
        row = self._rows.pop(row_id, None)
        self._live.pop(row_id, None)
        if row is not None:
            with suppress(OutOfMemory), mlx_runtime("keeping what a draft's row leaves"):
                self._backend.release(row.sequence)

    # The owner's ---------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Run the backend's usual passes, those that decode also with two tokens a row, as after drafts that were all
        accepted, and measure a token's time in a chunk. Leaves nothing behind."""
        model = self._model
        for one in self._backend.warm_passes(WarmLimits(model.max_running, model.context, self._most_chunk)):
            self._warm(one)
            if not one.chunks:
                self._warm(one, each=2)
        chunk = WarmPass(chunks=(min(self._most_chunk, model.context - 1, self._most_tokens),))
        self._warm(chunk)  # the first one compiles
        self.token_s = min(self._warm(chunk) for _ in range(_TIMED_CHUNKS)) / chunk.chunks[0]
        self.reset()

    def reset(self) -> None:
        """Clear the draft's prefix cache."""
        self._backend.reset()

    def statistics(self) -> DrafterStatistics:
        """Return what the draft's cache holds, and the tokens that it has yet to compute of rows without drafts."""
        backlog = sum(row.backlog for row in self._rows.values() if row.backlog > self._ready_backlog)
        return DrafterStatistics(self._backend.kv_bytes(), backlog, self._backend.statistics())

    def close(self) -> None:
        """Free everything."""
        for row_id in list(self._rows):
            self.release(row_id)
        self._backend.close()
        del self._passes, self._backend, self._model

    # Rows ----------------------------------------------------------------------------------------------------------

    def _row(self, row: DraftedRow) -> _Row | None:
        """Return a row's place in the cache, which it gets when it is first seen; None where its drafts are off."""
        known = self._rows.get(row.id)
        if known is not None and known.tokens is row.tokens:
            return known
        if row.id in self._failed or not row.request.speculate or len(row.tokens) > self._model.context:
            return None
        self.release(row.id)
        new = self._rows[row.id] = _Row.of(row)
        sequence = self._live[row.id] = new.sequence
        with self._failed.on_failure([sequence]):
            found = self._backend.match(row.salt, _reusable(sequence.tokens))
            (new.known,) = self._backend.reuse([(sequence, found)])
            self._backend.admit(sequence)
        return self._rows.get(row.id)

    def _settle(self, rows: Iterable[_Row]) -> None:
        """Keep what rows fed as far as it has become their tokens, and retract the rest."""
        for row in rows:
            if not (row.fed or self._narrow):
                continue
            with self._failed.on_failure([row.sequence]):
                if self._narrow:
                    check_tokens(row.sequence.tokens[row.checked :] or (0,), self._model.vocabulary)
                    row.checked = len(row.sequence.tokens)
                if row.fed:
                    self._keep_fed(row)

    def _keep_fed(self, row: _Row) -> None:
        tokens, fed, right = row.sequence.tokens, row.fed, 0
        most = min(len(fed), row.backlog)
        while right < most and fed[right] == tokens[row.known + right]:
            right += 1
        row.fed = []
        if right < len(fed):
            self._backend.retract(row.sequence, row.known + right)
        self._commit(row, right)

    def _commit(self, row: _Row, count: int) -> None:
        """Add `count` computed tokens to those that are known."""
        if count:
            tokens = row.sequence.tokens[row.known : row.known + count]
            self._backend.commit([RowSegment(row.sequence, tokens, row.known)])
            row.known += count

    def _note(self, row: _Row, drafts: Sequence[int]) -> None:
        """Note what the passes of a proposal have fed behind the row's known tokens."""
        self._commit(row, row.backlog)
        row.fed = [row.sequence.tokens[-1], *drafts[:-1]]

    def _drafts_of(self, row: _Row) -> int:
        """Return the most drafts of a row; 0 until it is caught up, and where the draft's context ends."""
        if row.sequence.id not in self._rows or row.backlog > self._ready_backlog:
            return 0
        return max(0, min(self._backend.draft_tokens, self._model.context - row.length + 1))

    # Memory --------------------------------------------------------------------------------------------------------

    def _growth(self, row: _Row, count: int) -> int:
        """Return the blocks that a row needs for `count` drafts, the last of which is not computed."""
        return self._blocks(len(row.sequence.tokens) + count - 1) - self._blocks(row.known + len(row.fed))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._backend.block)

    def _fitting(self, wanted: Iterable[_Proposal]) -> list[_Proposal]:
        """Return the proposals for which there are blocks, and whose first tokens are no more than a chunk in all,
        those with the most drafts first. Rows that are left out catch up behind others."""
        free, left, found = self._backend.free_blocks(), self._most_chunk, []
        for one in wanted:
            growth, tokens = self._growth(one.row, one.most), one.row.backlog + 1
            if (growth <= free or not self._backend.blocks) and (tokens <= max(left, USUAL)):
                free, left = free - growth, left - tokens
                found.append(one)
        return sorted(found, key=lambda one: -one.most)

    @property
    def _most_tokens(self) -> int:
        return self._backend.blocks * self._backend.block or self._model.context

    # Catching up ---------------------------------------------------------------------------------------------------

    def _allowance_s(self, seconds: float) -> float:
        """Return the part of a step's `seconds` that may be spent on tokens between steps."""
        one_row = min(2 * self.token_s, MOST_IDLE_SHARE * seconds)
        return max(one_row, (IDLE_SHARE + self._asking * SHARE) * seconds)

    def _nobody_ready(self) -> bool:
        return all(row.backlog > self._ready_backlog for row in self._rows.values())

    def _catch_up(self, seconds: float) -> None:
        """Launch one chunk, of rows that are behind, whose time will be paid by the next steps."""
        context = self._model.context
        behind = [row for row in self._rows.values() if row.backlog > self._ready_backlog and row.length <= context]
        if not behind:
            return
        left = self._chunk(seconds)
        free, chunk = self._backend.free_blocks(), []
        for row in sorted(behind, key=lambda row: row.backlog):
            count = min(left, row.backlog)
            growth = self._blocks(row.known + count) - self._blocks(row.known)
            if count > 0 and (growth <= free or not self._backend.blocks):
                free, left = free - growth, left - count
                chunk.append((row, count))
        if chunk:
            self._compute(chunk)

    def _chunk(self, seconds: float) -> int:
        """Return the most tokens of a chunk, which should take no longer than a step of `seconds`."""
        fits = int(seconds / self.token_s) if self.token_s else CHUNK
        return min(self._most_chunk, max(LEAST_CHUNK, fits))

    def _compute(self, chunk: Sequence[tuple[_Row, int]]) -> None:
        with self._failed.on_failure([row.sequence for row, _ in chunk]):
            self._passes.compute([_rest(row, count) for row, count in chunk])
            for row, count in chunk:
                self._commit(row, count)
                self._debt_s += count * self.token_s

    def _warm(self, one: WarmPass, each: int = 1) -> float:
        """Run the passes of synthetic rows, of which those that decode compute `each` tokens. Return their seconds."""
        tokens = [0] * (sum(one.chunks) + 1)
        rows = [_Row(KvSequence(f"warm-up {i}", _SALT, [0] * each), ()) for i in range(one.decoding)]
        whole = _Row(KvSequence("warm-up", _SALT, tokens), ())
        self._live |= {row.sequence.id: row.sequence for row in (*rows, whole)}
        for row in (*rows, whole):
            self._backend.admit(row.sequence)
        try:
            with mlx_runtime("warming up the draft model"):
                return self._run_warm(rows, whole, one.chunks)
        finally:
            for row in (*rows, whole):
                self._backend.invalidate([row.sequence])
                del self._live[row.sequence.id]

    def _run_warm(self, rows: Sequence[_Row], whole: _Row, chunks: Sequence[int]) -> float:
        began, beside = self._clock(), [_rest(row) for row in rows]
        for size in chunks or (0,):
            self._passes.compute([*beside, *([_rest(whole, size)] if size else ())])
            self._passes.wait()
            beside, whole.known = [], whole.known + size
        return self._clock() - began

    def _forget(self, row_id: str) -> None:
        self._rows.pop(row_id, None)
        self._live.pop(row_id, None)


def _check(model: LoadedModel, backend: KvBackend) -> None:
    """Raise ModelError where drafts of `model` can't be taken back from `backend`: whatever of them is rejected."""
    reason = "it has recurrent layers, whose states can't be cut" if backend.replays else backend.no_drafts
    if reason:
        backend.close()
        raise ModelError(
            f"`draft` {model.name} can't draft tokens: {reason}; give another model, or leave it out", param="draft"
        )


def _reusable(tokens: Sequence[int]) -> Sequence[int]:
    """Return the first tokens of a row that others may have left in the cache, without its last one."""
    return tokens[: min(tokens.lead, len(tokens) - 1)] if isinstance(tokens, RowText) else tokens[:-1]


def _rest(row: _Row, count: int | None = None) -> RowSegment:
    """The next `count` tokens of a row to compute; all of them, the last one too, if it is None."""
    end = None if count is None else row.known + count
    return RowSegment(row.sequence, tuple(row.sequence.tokens[row.known : end]), row.known, wants=1, picks=True)
