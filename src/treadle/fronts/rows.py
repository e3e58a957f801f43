"""One choice while it is generated: from the engine's tokens to text that may be shown.

A stop string ends the choice here: the engine is told to stop, tokens past the one that completed it are dropped, and
usage counts up to that one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..core.messages import CancelReason, Finish, FinishReason, TokenLogprob
from ..engine.generation import Delta, Generation
from ..text import TextDelta, TextStream, TokenEntry


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one choice. The first one has the prompt's log-probabilities, from its second token on, where
    they were asked for. `finish_reason` is set on the last one: stop or length."""

    text: str = ""
    entries: tuple[TokenEntry, ...] = ()
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Row:
    """Reads one generation to its end. Where the prompt is scored, every token of the completion is, also a stop token
    that shows no text: who sums log-probabilities counts on one for each."""

    def __init__(self, generation: Generation, text: TextStream) -> None:
        self.generation = generation
        self.cached_tokens = 0
        self._text = text
        self._shown = 0
        self._scores: list[TokenLogprob] | None = None if generation.request.prompt_logprobs is None else []

    @property
    def completion_tokens(self) -> int:
        """Up to the token that completed a stop."""
        return self._text.tokens

    @property
    def generated_tokens(self) -> int:
        """Those, and what has come that nobody has read."""
        return self._text.tokens if self._text.stop is not None else self.generation.completion_tokens

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The choice, piece by piece; the last one has its finish_reason. Raises what ended it badly."""
        async with contextlib.aclosing(aiter(self.generation)) as deltas:
            async for delta in deltas:
                piece = self._take(delta) if self._scores is None else self._scored(delta, self._scores)
                if piece.token_ids or piece.finish_reason:
                    yield piece
                if piece.finish_reason is not None:
                    return

    def _scored(self, delta: Delta, scores: list[TokenLogprob]) -> Piece:
        """The first piece takes along what came while the prompt was read, the last one its stop token."""
        piece = self._take(delta)
        scores += delta.prompt_logprobs
        self._shown += len(piece.text)
        entries = piece.entries
        if delta.logprobs and self._text.stop is None and _ends_with_stop_token(delta):
            entries += (TokenEntry(delta.tokens[-1], delta.logprobs[-1], self._shown),)
        if not (piece.token_ids or piece.finish_reason):
            return piece
        taken = tuple(scores)
        scores.clear()
        return replace(piece, entries=entries, prompt_logprobs=taken)

    def _take(self, delta: Delta) -> Piece:
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        stop_token = _ends_with_stop_token(delta)
        new = self._text.push(delta.tokens, delta.logprobs, stop_token=stop_token)
        if new.stop is not None:
            self.generation.cancel(CancelReason.STOP)
            return _piece(new, delta.tokens[: new.tokens], "stop")
        visible = delta.tokens[:-1] if stop_token else delta.tokens
        if delta.finish is None:
            return _piece(new, visible, None)
        return self._last(new, visible, delta.finish)

    def _last(self, new: TextDelta, visible: tuple[int, ...], finish: Finish) -> Piece:
        rest = self._text.finish()
        stopped = finish.reason is FinishReason.STOP or rest.stop is not None
        return Piece(new.text + rest.text, new.entries + rest.entries, visible, "stop" if stopped else "length")


def _piece(new: TextDelta, token_ids: tuple[int, ...], finish_reason: str | None) -> Piece:
    return Piece(new.text, new.entries, token_ids, finish_reason)


def _ends_with_stop_token(delta: Delta) -> bool:
    finish = delta.finish
    return finish is not None and finish.stop_token_id is not None and delta.tokens[-1:] == (finish.stop_token_id,)


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
