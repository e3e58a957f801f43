"""One choice while it is generated: from the engine's tokens to text that may be shown, with its log-probabilities.

A stop string ends the choice here: the engine is told to stop, tokens past the one that completed it are dropped, and
usage counts up to that one. A token's log-probability goes out with the text it begins.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from ...core.messages import CancelReason, Finish, FinishReason, TokenLogprob
from ...engine.generation import Delta, Generation
from ..text import TextStream


@dataclass(frozen=True, slots=True)
class Entry:
    """A token's log-probability; `offset` is where its text begins in the answer, in characters."""

    token: int
    logprob: TokenLogprob
    offset: int


@dataclass(slots=True)
class Piece:
    """What is new of one choice. `finish_reason` is set on the last one: stop or length."""

    text: str = ""
    entries: list[Entry] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Row:
    """Reads one generation to its end."""

    def __init__(self, generation: Generation, text: TextStream) -> None:
        self.generation = generation
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._text = text
        self._shown = 0
        self._pending: deque[Entry] = deque()

    async def pieces(self) -> AsyncIterator[Piece]:
        """The choice, piece by piece; the last one has its finish_reason. Raises what ended it badly."""
        async with contextlib.aclosing(aiter(self.generation)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                piece = self._take(delta)
                if piece.token_ids or piece.finish_reason:
                    yield piece
                if piece.finish_reason is not None:
                    return

    def _take(self, delta: Delta) -> Piece:
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        piece = Piece()
        unseen = _stop_token(delta.finish)
        last = len(delta.tokens) - 1
        for i, token in enumerate(delta.tokens):
            self.completion_tokens += 1
            if i == last and token == unseen:
                break
            piece.token_ids.append(token)
            self._feed(piece, token, delta.logprobs[i] if delta.logprobs else None)
            if self._text.stopped:
                self.generation.cancel(CancelReason.STOP)
                return self._end(piece, "stop")
        if delta.finish is not None:
            self._show(piece, self._text.finish())
            return self._end(piece, "stop" if delta.finish.reason is FinishReason.STOP else "length")
        return piece

    def _feed(self, piece: Piece, token: int, logprob: TokenLogprob | None) -> None:
        if logprob is not None:
            self._pending.append(Entry(token=token, logprob=logprob, offset=self._shown + self._text.held))
        self._show(piece, self._text.feed(token))

    def _show(self, piece: Piece, text: str) -> None:
        piece.text += text
        self._shown += len(text)
        while self._pending and self._pending[0].offset < self._shown:
            piece.entries.append(self._pending.popleft())

    def _end(self, piece: Piece, reason: str) -> Piece:
        """Tokens without text of their own still count; those of a stop string are not shown."""
        if not self._text.stopped:
            piece.entries.extend(self._pending)
        self._pending.clear()
        piece.finish_reason = reason
        return piece


def _stop_token(finish: Finish | None) -> int | None:
    return None if finish is None else finish.stop_token_id


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of them; the first that fails ends the others, and its own error is raised."""
    coroutines = list(work)
    if len(coroutines) == 1:
        await coroutines[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
