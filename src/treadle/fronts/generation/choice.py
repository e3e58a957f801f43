"""Reader of one choice: from the deltas of its generation to pieces with text, up to a stop.

A stop string ends the choice here: the generation is cancelled, tokens behind the one that completed the string are
dropped, and usage counts up to that one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any

from ...core.messages import CancelReason, FinishReason, TokenLogprob
from ...engine.generation import Delta, Generation
from ...errors import RequestCancelled
from ...telemetry.access_log import RequestRecord
from ...text import TextStream, TokenEntry
from ...text.stream import TextDelta
from .pieces import ABORT, LENGTH, STOP, Piece

log = logging.getLogger(__name__)


class Choice:
    """One choice of a request. `text` detokenizes, finds stop strings and reads events; None where nothing of it is
    needed. With `text_logprobs` pieces have `entries`. With `abortable` a cancelled choice ends with ABORT; otherwise
    it raises RequestCancelled. `record` gets the time to the first token."""

    def __init__(
        self,
        index: int,
        generation: Generation,
        text: TextStream | None,
        record: RequestRecord,
        clock: Callable[[], float],
        *,
        text_logprobs: bool,
        abortable: bool,
    ) -> None:
        self.index = index
        self.generation = generation
        self.prompt = generation.request.prompt
        self._text = text
        self._text_logprobs = text_logprobs
        self._text_length = 0  # in characters; counted only where the prompt is scored
        self._malformed: int | None = None  # reasons to report; None for all
        self._abortable = abortable
        self._timed_out = False
        self._read_tokens = 0
        self._record = record
        self._clock = clock
        read = self._tokens_only if text is None else self._with_text
        self._read = read if generation.request.prompt_logprobs is None else self._scored(read)

    @property
    def completion_tokens(self) -> int:
        """Tokens in the pieces read so far."""
        return self._read_tokens if self._text is None else self._text.tokens

    @property
    def generated_tokens(self) -> int:
        """Tokens generated so far, read or not; up to a stop string."""
        stopped = self._text is not None and self._text.stop is not None
        return self.completion_tokens if stopped else self.generation.completion_tokens

    @property
    def draft_tokens(self) -> tuple[int, int]:
        """Draft tokens that steps verified so far: those among the answer's tokens, and all others. A stop string may
        end the answer within tokens that were accepted."""
        accepted = self.generation.accepted_among(self.generated_tokens)
        return accepted, self.generation.drafted - accepted

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning in the pieces read so far; 0 where the answer is not read for it."""
        return 0 if self._text is None else self._text.reasoning_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were reused from the prefix cache."""
        return self.generation.cached_tokens

    @property
    def sparse_tokens(self) -> tuple[int, int]:
        """Tokens of the prompt that were scored, and those that were not left out: 0 and all where the whole prompt is
        prefilled."""
        scored = self.generation.scored_tokens
        return scored, self.generation.kept_tokens if scored else len(self.prompt)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Read the choice to its end. The last piece has `finish_reason`. Raises the error that ended the generation,
        after the tokens that came before it."""
        record = self._record
        try:
            async with contextlib.aclosing(aiter(self.generation)) as deltas:
                async for delta in deltas:
                    piece = self._read(delta)
                    if not (piece.tokens or piece.finish_reason):
                        continue
                    if record.ttft_s is None:
                        record.ttft_s = self._clock() - record.started
                    if piece.finish_reason:
                        self._warn_of_malformed_calls()
                    yield piece
                    if piece.finish_reason:
                        return
        except RequestCancelled as error:
            if error.code != RequestCancelled.code or not (self._abortable or self._timed_out):
                raise
            yield self._cut()

    def expire(self) -> None:
        """Cancel the sequence, as the request's own timeout is over: the choice ends with LENGTH, where it has not
        ended yet."""
        self._timed_out = True
        self.generation.cancel()

    def _cut(self) -> Piece:
        """The last piece of a choice that was cancelled: text that was held back, and no token."""
        rest = TextDelta() if self._text is None else self._text.finish()
        reason = LENGTH if self._timed_out else ABORT
        if reason == ABORT:
            self._record.error = self._record.error or RequestCancelled.code
        return Piece(
            rest.text, rest.entries, (), (), reason, None, rest.stop, events=rest.events, timed_out=self._timed_out
        )

    def _warn_of_malformed_calls(self) -> None:
        reasons = () if self._text is None else self._text.malformed[: self._malformed]
        if reasons:
            log.warning(
                "request %s: output that began like a tool call was none, and was sent as text (%s); if this happens "
                "often, choose the model's format with --tool-parser",
                self.generation.tag,
                "; ".join(reasons[:3]),
            )

    def _tokens_only(self, delta: Delta) -> Piece:
        self._read_tokens += len(delta.tokens)
        finish = delta.finish
        if finish is None:
            return Piece("", (), delta.tokens, delta.logprobs)
        reason = STOP if finish.reason is FinishReason.STOP else LENGTH
        return Piece("", (), delta.tokens, delta.logprobs, reason, finish.stop_token_id)

    def _with_text(self, delta: Delta) -> Piece:
        text, finish, tokens, logprobs = self._text, delta.finish, delta.tokens, delta.logprobs
        assert text is not None
        stop_token_id = None if finish is None else finish.stop_token_id
        at_stop_token = stop_token_id is not None and tokens[-1:] == (stop_token_id,)
        new = text.push(tokens, logprobs if self._text_logprobs else (), stop_token=at_stop_token)
        if new.stop is not None:
            self.generation.cancel(CancelReason.STOP)
            cut = new.tokens
            return Piece(
                new.text, new.entries, tokens[:cut], logprobs[:cut], STOP, stop_string=new.stop, events=new.events
            )
        if finish is None:
            return Piece(new.text, new.entries, tokens, logprobs, events=new.events)
        malformed = len(text.malformed)
        rest = text.finish()
        stopped = finish.reason is FinishReason.STOP or rest.stop is not None
        if not stopped:  # a call that the limit cut is no mistake of the model
            self._malformed = malformed
        return Piece(
            new.text + rest.text,
            new.entries + rest.entries,
            tokens,
            logprobs,
            STOP if stopped else LENGTH,
            stop_token_id,
            rest.stop,
            events=new.events + rest.events,
        )

    def _scored(self, read: Callable[[Delta], Piece]) -> Callable[[Delta], Piece]:
        """Reader of a choice whose prompt is scored. The first piece has all scores. Each completion token has an
        entry, also a stop token without text: clients that sum log-probabilities count on one for each."""
        scores: list[TokenLogprob] = []

        def take(delta: Delta) -> Piece:
            piece = read(delta)
            scores.extend(delta.prompt_logprobs)
            self._text_length += len(piece.text)
            if self._text_logprobs and delta.logprobs and piece.ends_with_stop_token and piece.stop_string is None:
                piece.entries += (TokenEntry(delta.tokens[-1], delta.logprobs[-1], self._text_length),)
            if piece.tokens or piece.finish_reason:
                piece.prompt_logprobs = tuple(scores)
                scores.clear()
            return piece

        return take


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines. The first that fails cancels the others, and its error is raised."""
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
