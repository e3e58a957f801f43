"""An answer as messages: both wires have the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ...core.messages import TokenLogprob
from .sequence import Choice, Part


class MessageWriter:
    """Writes a wire's GenerateResponse. Chunks have the tokens that are new, and counts so far. `choice` has what was
    counted up to and with `part`."""

    def __init__(self, messages: ModuleType) -> None:
        self._messages = messages

    def chunk(self, choice: Choice, part: Part) -> Any:
        """What is new, in a stream."""
        chunk = self._messages.GenerateStreamChunk(
            token_ids=part.tokens,
            completion_tokens=self.counted(choice, part),
            output_logprobs=self._logprobs(part.tokens, part.logprobs),
            **self.scores(choice, part.prompt_logprobs),
            **_counts(choice),
        )
        return self._messages.GenerateResponse(chunk=chunk)

    def complete(self, choice: Choice, part: Part) -> Any:
        """The end of a choice, with all of it that the choice has kept."""
        complete = self._messages.GenerateComplete(
            output_ids=choice.tokens,
            finish_reason=part.finish_reason,
            completion_tokens=choice.completion_tokens,
            output_logprobs=self._logprobs(choice.tokens, choice.logprobs),
            **self.scores(choice, choice.prompt_logprobs),
            **_counts(choice),
            **self.stopped(part),
        )
        return self._messages.GenerateResponse(complete=complete)

    def counted(self, choice: Choice, part: Part) -> int:
        """The completion tokens that a chunk tells of."""
        return choice.completion_tokens

    def scores(self, choice: Choice, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The field that has the prompt's log-probabilities, on the wire that has one."""
        return {}

    def stopped(self, part: Part) -> dict[str, Any]:
        """The field that says what stopped a choice."""
        return {"matched_stop_token_id": part.stop_token_id}

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Any:
        """One entry a token, best first; None where none were asked for."""
        if not logprobs:
            return None
        return self._messages.OutputLogProbs(
            token_logprobs=[entry.logprob for entry in logprobs],
            token_ids=tokens,
            top_logprobs=[self._top(entry) for entry in logprobs],
        )

    def _top(self, entry: TokenLogprob) -> Any:
        return self._messages.TopLogProbs(
            values=[logprob for _, logprob in entry.top], token_ids=[token for token, _ in entry.top]
        )


def _counts(choice: Choice) -> dict[str, int]:
    return {"index": choice.index, "prompt_tokens": choice.prompt_tokens, "cached_tokens": choice.cached_tokens}
