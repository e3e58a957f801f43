"""Bitmasks of the rows of a batch, filled into one kept array: in parallel where that was measured to be faster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from ...grammar.faults import fault_of_matcher
from .bitmask import BITS, Words
from .constraints import Limit, RowConstraint

_NEWEST = 0.1
"""Weight of a new measurement in a running mean."""
_TRY_EACH = 64
"""One fill in this many goes the way that was slower so far, so that it is measured again."""


class FillTimes:
    """Measured seconds a row of filling bitmasks in parallel and one after the other.

    Parallel fills wake threads, which takes longer than some masks; and sequences that began together with the same
    grammar share a lexer and wait for each other.
    """

    def __init__(self) -> None:
        self._seconds: dict[bool, float] = {}
        self._fills = 0

    def parallel(self) -> bool:
        """Whether the next fill is to be parallel."""
        self._fills += 1
        if len(self._seconds) < 2:
            return bool(self._seconds)
        faster = self._seconds[True] < self._seconds[False]
        return not faster if self._fills % _TRY_EACH == 0 else faster

    def observe(self, parallel: bool, seconds: float, rows: int) -> None:
        """Learn from a fill of `rows` bitmasks."""
        past = self._seconds.setdefault(parallel, seconds / rows)
        self._seconds[parallel] = past + _NEWEST * (seconds / rows - past)


class TokenMasks:
    """Bitmasks for constrained rows. Their width is that of the tokenizer, at least `vocabulary` bits."""

    def __init__(self, vocabulary: int) -> None:
        self._width = -(-vocabulary // BITS)
        self._words: Words = np.empty((0, self._width), np.int32)
        self._times = FillTimes()

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    def fill(self, rows: Sequence[RowConstraint | None]) -> Words:
        """Return a bitmask for each of `rows`: what its constraint allows, and everything for None and without a limit.
        It is overwritten by the next call."""
        if len(rows) > len(self._words):
            self._words = np.empty((len(rows), self._width), np.int32)
        words, limits = self._words[: len(rows)], [None if row is None else row.limit for row in rows]
        self._compute([(limit.matcher, i) for i, limit in enumerate(limits) if limit is not None and limit.matcher])
        for row, limit, mask in zip(rows, limits, words, strict=True):
            if row is None or limit is None:
                mask[:] = -1
            else:
                _edit(mask, limit)
                _check(row, limit, mask)
        return words

    def _compute(self, matchers: list[tuple[LLMatcher, int]]) -> None:
        parallel, began = len(matchers) > 1 and self._times.parallel(), time.perf_counter()
        if parallel:
            fill_next_token_bitmask_par(self._executor, matchers, self._words)
        else:
            for matcher, place in matchers:
                fill_next_token_bitmask(matcher, self._words, place)
        if len(matchers) > 1:
            self._times.observe(parallel, time.perf_counter() - began, len(matchers))


def _edit(mask: Words, limit: Limit) -> None:
    """Add and exclude single tokens."""
    if limit.matcher is None:
        mask[:] = 0
    for token in limit.excluded:
        mask[token // BITS] &= ~_bit(token)
    for token in limit.added:
        mask[token // BITS] |= _bit(token)


def _check(row: RowConstraint, limit: Limit, mask: Words) -> None:
    """Fail the row where its matcher did, or no token is left; its neighbours are not touched. A special token that is
    the only one, or was excluded, may stand for text: an ordinary one is left then. Settled later, it would be a token
    that has changed, and the step behind would be computed again for all its rows."""
    if limit.matcher is not None and limit.matcher.is_error():
        row.fail(f"the grammar can't be followed any further: {fault_of_matcher(limit.matcher)}")
    elif not mask.any():
        token = None if limit.matcher is None else row.ordinary_token()
        if token is None:
            row.fail("the grammar allows no token here")
        else:
            mask[token // BITS] |= _bit(token)
    elif not limit.added and (only := _only(mask)) is not None and (instead := row.corrected(only)) != only:
        mask[only // BITS] = 0
        mask[instead // BITS] |= _bit(instead)
    if row.failure:
        mask[:] = -1


def _only(mask: Words) -> int | None:
    """Return the only token of a bitmask; None where there are others."""
    if np.count_nonzero(mask) != 1:
        return None
    word = int(mask.nonzero()[0][0])
    bits = int(mask[word]) & (1 << BITS) - 1
    return None if bits & (bits - 1) else word * BITS + bits.bit_length() - 1


def _bit(token: int) -> np.int32:
    return np.int32(-(1 << 31) if token % BITS == BITS - 1 else 1 << token % BITS)
