"""One choice while it is generated: from the engine's tokens to what a wire sends, up to a stop string."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace

from ...core.messages import CancelReason, FinishReason, TokenLogprob
from ...engine.generation import Delta, Generation
from ...errors import RequestCancelled
from ...text import TextStream

STOP, LENGTH, ABORT = "stop", "length", "abort"


@dataclass(frozen=True, slots=True)
class Part:
    """What is new of one choice: `tokens` with one of `logprobs` each, where they were asked for. The last part has
    the `finish_reason`, and the token or the string that stopped it. `prompt_logprobs` are the prompt's, from its
    second token on, and all of them come with the first part."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str = ""
    stop_token_id: int | None = None
    stop_string: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class Choice:
    """What has come of one choice so far."""

    index: int
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    ended: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt: Tokens[int] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    def count(self, part: Part) -> None:
        self.completion_tokens += len(part.tokens)
        self.ended = bool(part.finish_reason)

    def keep(self, part: Part) -> None:
        """Hold on to it, for an answer in one message."""
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        self.prompt_logprobs += part.prompt_logprobs


class Sequence:
    """Reads one generation to its end. `text` is None where no stop string has to be found in it."""

    def __init__(self, generation: Generation, text: TextStream | None) -> None:
        self.generation = generation
        self._text = text
        self._scores: list[TokenLogprob] = []

    async def parts(self) -> AsyncGenerator[Part, None]:
        """The choice, part by part; one that was aborted ends with that reason. Raises what ended it badly."""
        try:
            async with contextlib.aclosing(aiter(self.generation)) as deltas:
                async for delta in deltas:
                    self._scores += delta.prompt_logprobs
                    part = self._part(delta)
                    if part.tokens or part.finish_reason:
                        yield self._scored(part)
                    if part.finish_reason:
                        return
        except RequestCancelled as error:
            if error.code != RequestCancelled.code:
                raise
            yield Part(finish_reason=ABORT)

    def _part(self, delta: Delta) -> Part:
        finish = delta.finish
        if finish is None:
            return self._until_stop(delta, Part(delta.tokens, delta.logprobs))
        reason = STOP if finish.reason is FinishReason.STOP else LENGTH
        return self._until_stop(delta, Part(delta.tokens, delta.logprobs, reason, finish.stop_token_id))

    def _scored(self, part: Part) -> Part:
        if not self._scores:
            return part
        scores, self._scores = tuple(self._scores), []
        return replace(part, prompt_logprobs=scores)

    def _until_stop(self, delta: Delta, part: Part) -> Part:
        """`part`, cut after the token that completed a stop string, if one did."""
        text = self._text
        if text is None:
            return part
        new = text.push(delta.tokens, stop_token=part.stop_token_id is not None)
        if new.stop is None and part.finish_reason:
            text.finish()
        if text.stop is None:
            return part
        self.generation.cancel(CancelReason.STOP)
        return Part(delta.tokens[: new.tokens], delta.logprobs[: new.tokens], STOP, stop_string=text.stop)
