"""A scorer whose choices are hashes: the part of the runner in `drive` that scores prompts, which holds the scheduler
to its contract."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from treadle.core.capabilities import SpecPrefillCapabilities
from treadle.core.messages import Submit
from treadle.core.plan import RowKept, ScoreChunk
from treadle.core.sparse_prompt import KEPT_CHUNK, LOOK_AHEAD, LOOK_AHEAD_UNITS, TAIL_CHUNKS, kept_chunks


def chosen(prompt: Sequence[int], start: int, keep: float) -> tuple[int, ...]:
    """The positions that are kept of a prompt behind its first `start` tokens: the first chunk, the last ones, and some
    by chance."""
    length = len(prompt)
    firsts = list(range(start, length, KEPT_CHUNK))
    count = kept_chunks(len(firsts), keep)
    sure = {*firsts[:1], *firsts[-TAIL_CHUNKS:]}
    others = sorted(
        (first for first in firsts if first not in sure), key=lambda i: zlib.crc32(repr(prompt[i]).encode())
    )
    kept = sorted([*sure, *others[: count - len(sure)]])
    return tuple(i for first in kept for i in range(first, min(first + KEPT_CHUNK, length)))


class HashScorer:
    """Scores prompts in places and blocks of its own. `fails` are prompts that it can't score, `evicts` those whose
    cached tokens are gone when they are to be taken over."""

    def __init__(self, can: SpecPrefillCapabilities, block: int) -> None:
        self.can = can
        self.rows: dict[str, int] = {}  # units that are done
        self.stored: set[tuple[str, tuple[int, ...]]] = set()
        self.fails: set[str] = set()
        self.evicts: set[str] = set()
        self.computed = 0
        self._block = block
        self._prompts: dict[str, tuple[int, ...]] = {}

    def match(self, request: Submit) -> int:
        """Whole blocks of prompts that were scored."""
        last, blocks = len(request.prompt) - 1, 0
        while (end := (blocks + 1) * self._block) <= last and (request.salt, request.prompt[:end]) in self.stored:
            blocks += 1
        return blocks * self._block

    def score(self, chunk: ScoreChunk, request: Submit, start: int) -> RowKept | None:
        """Do a chunk for a row whose first `start` tokens are cached. Raises KeyError where it has to be evicted."""
        if chunk.id not in self.rows:
            if chunk.start and chunk.id in self.evicts:
                self.evicts.remove(chunk.id)
                raise KeyError(chunk.id)
            assert chunk.start <= self.match(request), "it starts with what is not cached"
            self.rows[chunk.id], self._prompts[chunk.id] = chunk.start, request.prompt
        last, end = len(request.prompt) - 1, chunk.start + chunk.count
        assert self.rows[chunk.id] == chunk.start, "units are done in their order"
        assert chunk.count > 0, "an empty chunk"
        assert end <= last or chunk.start >= last, "units of one kind"
        self.rows[chunk.id] = end
        self._check_room()
        self.computed += max(0, min(end, last) - chunk.start)
        if end < last + LOOK_AHEAD_UNITS:
            return None
        assert end == last + LOOK_AHEAD_UNITS
        self.stored |= {(request.salt, request.prompt[:i]) for i in range(self._block, last + 1, self._block)}
        self.release(chunk.id)
        if request.id in self.fails:
            return RowKept(chunk.id, failure="it can't be scored")
        return RowKept(chunk.id, chosen(request.prompt, start, self.can.keep))

    def _check_room(self) -> None:
        assert len(self.rows) <= self.can.rows, "more prompts than places"
        held = sum(-(-(len(self._prompts[id_]) + LOOK_AHEAD) // self.can.block) for id_ in self.rows)
        assert not self.can.blocks or held <= self.can.blocks, "more blocks than there are"

    def release(self, row_id: str) -> None:
        self.rows.pop(row_id, None)
        self._prompts.pop(row_id, None)
