"""The drafter with a head: layers that predict the token behind the next one, an MTP head or an EAGLE-3 head.

The head reads pairs: the model's hidden state of a token, behind its last norm or out of some of its layers, and the
next token. It has a KV backend of its own, with a place for each pair. What the model computes for a row comes here as
hidden states, on the device (`observe`). Those of a prompt become keys and values at once, which needs no more of the
head's last layer than its first products. A few later ones wait for the next proposal, whose first pass computes them.
Where none comes they are computed for a small share of the time of steps, or dropped. Further drafts come from the
head's own state and token, fed to it again; what that wrote is retracted, as the model's own states will take its
place.

A row that misses states, as its prompt was reused from the prefix cache or nothing was to be drafted for a while,
begins anew with the next ones: its head sees fewer tokens. Positions count from there, as attention knows distances
alone; those of a row whose positions are apart from the indices, behind images or a prompt of which a part is computed,
are the row's own.

A failure of the head costs a row its drafts, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ...core.plan import DraftTrial
from ...core.statistics import DrafterStatistics
from ..device.owner_thread import mlx_runtime
from ..forward.segments import KvSequence, RowSegment
from ..kv.backend import MOST_DRAFTS, Clock
from ..loading.headed import HeadedModel
from ..loading.model import LoadedModel, build_backend
from .draft_passes import DraftPasses
from .drafter import DraftedRow, NewStates
from .failed_rows import FailedRows

MOST_WAITING = 32
"""Pairs of a row that wait for its next proposal; twice as many where there is no time to compute them."""
SHARE = 1 / 64
"""Share of the time of steps for pairs that no proposal asks for."""
MOST_CREDIT_S = 0.1
_CHUNK = 512
_SALT = "warm-up"


@dataclass(slots=True, eq=False)
class _Row:
    """A row in the head's cache, which holds `known` pairs from that of its cached token `start` on. `states` (n, D) of
    the `waiting` next ones are there. The first `prompt` of its cached tokens are its prompt. `moved` is the row of the
    model whose positions its pairs have, where these are apart from indices."""

    sequence: KvSequence
    start: int
    prompt: int = 0
    moved: DraftedRow | None = None
    known: int = 0
    waiting: int = 0
    states: list[Any] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The first of the row's cached tokens whose hidden state is missing."""
        return self.start + self.known + self.waiting

    @property
    def is_prompt(self) -> bool:
        """Whether the waiting pairs begin in the prompt."""
        return self.start + self.known + 1 < self.prompt

    @property
    def is_up_to_date(self) -> bool:
        """Whether all pairs are there up to the row's last token."""
        return self.waiting > 0 and self.end + self._skipped == len(self.sequence.tokens) - 1

    @property
    def reach(self) -> int:
        """The position behind its pairs, which is no less than their number."""
        return self.end - self.start if self.moved is None else len(self.sequence.tokens)

    @property
    def _skipped(self) -> int:
        return 0 if self.moved is None else self.moved.skipped

    def add(self, start: int, states: Any) -> bool:
        """Add the `states` of tokens from `start` on that are not there. False if some before them are missing."""
        skip = self.end - start
        if 0 <= skip < states.shape[0]:
            self.states.append(states[skip:] if skip else states)
            self.waiting += states.shape[0] - skip
        return skip >= 0

    def take(self, wants: int) -> RowSegment:
        """Return the waiting pairs as a segment, which are known from now on. One that `wants` logits wants the hidden
        state of its last pair, too; without, the last pair goes on waiting."""
        count = self.waiting - 1 + wants
        states = self.states[0] if len(self.states) == 1 else mx.concatenate(self.states)
        positions = self._positions(count)
        segment = RowSegment(
            self.sequence,
            self._next_tokens(positions, count),
            self.known,
            wants,
            picks=wants > 0,
            hidden=wants,
            states=states[:count],
            positions=positions,
        )
        self.states = [] if wants else [states[count:]]
        self.known, self.waiting = self.known + count, self.waiting - count
        return segment

    def _positions(self, count: int) -> Any:
        """Return the positions of the next `count` pairs; None for their indices."""
        known = None if self.moved is None else self.moved.positions
        return None if known is None else known.of(self.start + self.known, count)

    def _next_tokens(self, positions: Any, count: int) -> tuple[int, ...]:
        """Return the tokens behind those of the next `count` pairs, whether or not they are cached."""
        tokens, first = self.sequence.tokens, self.start + self.known + 1
        if self._skipped:
            return tuple(tokens[place + 1] for place in positions.tolist())
        return tuple(tokens[first : first + count])


class HeadDrafter:
    """Drafts of the head of `headed`. The thread that builds it owns it. `token_s` are seconds of a pair that is
    computed for its keys and values, as the warm-up measured them (0: not measured)."""

    reads_states = True

    def __init__(self, headed: HeadedModel, clock: Clock = time.monotonic) -> None:
        head: LoadedModel = headed.head
        self.names = (headed.kind.drafter,)
        self._clock = clock
        self.token_s = self._credit_s = 0.0
        self._scale = headed.scale
        self._context = head.context
        self._live: dict[str, KvSequence] = {}  # the registry of the backend's sequences
        self._backend = build_backend(head, self._live, clock)
        self._has_axes = not self._backend.no_axes
        self._passes = DraftPasses(self._backend, head.vocabulary, headed.own_scale, headed.ids)
        self._rows: dict[str, _Row] = {}
        self._failed = FailedRows(self._passes, self._backend, self._forget, f"the {headed.kind.title}")
        self._free = self._backend.free_blocks()

    # The protocol of drafters --------------------------------------------------------------------------------------

    def observe(self, found: Sequence[NewStates]) -> None:
        for one in found:
            self._take(one)
        full = [row for row in self._rows.values() if row.waiting > MOST_WAITING]
        fitting = self._within_memory(full, 0)
        paid = [row for row in fitting if self._pays(row)]
        self._drop([row for row in full if row not in fitting or (row not in paid and row.waiting > 2 * MOST_WAITING)])
        if paid:
            with self._failed.on_failure([row.sequence for row in paid]):
                self._passes.compute([row.take(0) for row in paid])
        self._free = self._backend.free_blocks()

    def _pays(self, row: _Row) -> bool:
        """Whether there is time to compute a row's waiting pairs. Those of a prompt take a small part of its own."""
        seconds = 0.0 if row.is_prompt else row.waiting * self.token_s
        paid = seconds <= self._credit_s
        self._credit_s -= seconds if paid else 0.0
        return paid

    def propose(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> list[Sequence[int]]:
        drafts: list[Sequence[int]] = [() for _ in rows]
        wanted = sorted((i for i, row in enumerate(rows) if most[i] > 0 and self.ready(row)), key=lambda i: -most[i])
        fitting = self._within_memory([self._rows[rows[i].id] for i in wanted], max(most, default=0))
        places = [i for i in wanted if self._rows[rows[i].id] in fitting]
        if not places:
            return drafts
        with self._failed.on_failure([row.sequence for row in fitting]):
            segments = [self._rows[rows[i].id].take(1) for i in places]
            found = self._passes.chain(segments, [min(most[i], MOST_DRAFTS) for i in places])
            for i, tokens in zip(places, found, strict=True):
                row, drafts[i] = self._rows[rows[i].id], tokens
                self._backend.retract(row.sequence, row.known)
        return drafts

    def follow(self, rows: Sequence[DraftedRow], seconds: float) -> list[DraftTrial]:
        """Plain steps prove nothing about proposals, as those cost passes: no trial is returned."""
        self._credit_s = min(self._credit_s + SHARE * seconds, MOST_CREDIT_S)
        return []

    def ready(self, row: DraftedRow) -> int:
        known = self._rows.get(row.id)
        if known is None or known.sequence.tokens is not row.tokens or not known.is_up_to_date:
            return 0
        if known.reach + MOST_DRAFTS > self._context or not self._fits(known, MOST_DRAFTS, self._free):
            return 0
        return MOST_DRAFTS

    def match(self, row: DraftedRow) -> int:
        return 0

    def release(self, row_id: str) -> None:
        self._failed.release(row_id)
        row = self._rows.get(row_id)
        self._drop([] if row is None else [row])

    # The owner's ---------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Run passes of a prompt, the second of which is timed, and a chain. Leaves nothing behind."""
        row = self._begin(_Row(KvSequence(_SALT, _SALT, ()), 0))
        try:
            with mlx_runtime("warming up a head for drafts"):
                self._warm(row)
        finally:
            self._drop([row])

    def _warm(self, row: _Row) -> None:
        count = max(1, min(_CHUNK, (self._most_pairs - MOST_DRAFTS) // 2))
        for turn in range(2):
            mx.synchronize()
            began = self._clock()
            self._passes.compute([RowSegment(row.sequence, (0,) * count, turn * count)])
            mx.synchronize()
            self.token_s = (self._clock() - began) / count
        last = RowSegment(row.sequence, (0,), 2 * count, wants=1, picks=True, hidden=1)
        self._passes.chain([last], [MOST_DRAFTS])

    def reset(self) -> None:
        """Nothing is cached for rows to come: what the head would need of them are hidden states."""

    def statistics(self) -> DrafterStatistics:
        """Return what the head's cache holds, and the pairs that wait for it."""
        return DrafterStatistics(self._backend.kv_bytes(), sum(row.waiting for row in self._rows.values()))

    def close(self) -> None:
        """Free everything."""
        self._drop(list(self._rows.values()))
        self._backend.close()
        del self._passes, self._backend

    # Rows ----------------------------------------------------------------------------------------------------------

    def _take(self, new: NewStates) -> None:
        known = self._rows.get(new.row.id)
        if known is not None and known.sequence.tokens is not new.row.tokens:
            self._drop([known])
            known = None
        states = new.states if self._scale is None else new.states * self._scale
        if new.row.id in self._failed or (known is not None and known.add(new.start, states)):
            return
        if known is not None:
            self._drop([known])
        row, sequence = new.row, KvSequence(new.row.id, new.row.salt, new.row.tokens)
        moved = row if row.skipped or (row.request.images and self._has_axes) else None
        prompt = len(row.request.prompt) - row.skipped
        self._begin(_Row(sequence, new.start, prompt, moved)).add(new.start, states)

    def _begin(self, row: _Row) -> _Row:
        self._live[row.sequence.id] = row.sequence
        self._backend.admit(row.sequence)
        self._rows[row.sequence.id] = row
        return row

    def _drop(self, rows: Sequence[_Row]) -> None:
        for row in rows:
            del self._rows[row.sequence.id], self._live[row.sequence.id]
            self._backend.release(row.sequence)

    @property
    def _most_pairs(self) -> int:
        return min(self._context, self._backend.blocks * self._backend.block or self._context)

    def _within_memory(self, rows: Iterable[_Row], drafts: int) -> list[_Row]:
        """Return the rows for whose waiting pairs, and `drafts` more, there are blocks."""
        free, found = self._backend.free_blocks(), list[_Row]()
        for row in rows:
            if self._fits(row, drafts, free):
                free -= self._growth(row, drafts)
                found.append(row)
        return found

    def _fits(self, row: _Row, drafts: int, free: int) -> bool:
        return not self._backend.blocks or self._growth(row, drafts) <= free

    def _growth(self, row: _Row, drafts: int) -> int:
        """Return the blocks that a row needs for its waiting pairs, and `drafts` more."""
        return self._blocks(row.known + row.waiting + drafts) - self._blocks(row.known)

    def _blocks(self, pairs: int) -> int:
        return -(-pairs // self._backend.block)

    def _forget(self, row_id: str) -> None:
        self._rows.pop(row_id, None)
        self._live.pop(row_id, None)
