"""Messages of an answer, of the same shape on both wires."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ...core.messages import TokenLogprob
from ..generation.choice import Choice
from ..generation.pieces import ABORT, Piece, WholeChoice


class MessageWriter:
    """Writer of a wire's GenerateResponse. Chunks have new tokens and the counts so far: those of `choice`, which has
    read `piece`. `messages` is the module of the wire's messages."""

    def __init__(self, messages: ModuleType) -> None:
        self._messages = messages

    def chunk(self, choice: Choice, piece: Piece) -> Any:
        """Write new tokens of a stream."""
        chunk = self._messages.GenerateStreamChunk(
            token_ids=piece.tokens,
            completion_tokens=self.counted(choice, piece),
            output_logprobs=self._logprobs(piece.tokens, piece.logprobs),
            **self.scores(choice, piece.prompt_logprobs),
            **_counts(choice),
        )
        return self._messages.GenerateResponse(chunk=chunk)

    def complete(self, choice: Choice, piece: Piece, whole: WholeChoice) -> Any:
        """Write the end of a choice: `piece` is its last. `whole` has all of the choice, and nothing in a stream."""
        complete = self._messages.GenerateComplete(
            output_ids=whole.tokens,
            finish_reason=piece.finish_reason,
            completion_tokens=choice.completion_tokens,
            output_logprobs=self._logprobs(whole.tokens, whole.logprobs),
            **self.scores(choice, whole.prompt_logprobs),
            **_counts(choice),
            **self.ending(choice, piece),
        )
        return self._messages.GenerateResponse(complete=complete)

    def aborted(self, index: int, prompt_tokens: int) -> Any:
        """Write the end of a choice that was aborted before it ran."""
        complete = self._messages.GenerateComplete(finish_reason=ABORT, index=index, prompt_tokens=prompt_tokens)
        return self._messages.GenerateResponse(complete=complete)

    def counted(self, choice: Choice, piece: Piece) -> int:
        """The count of completion tokens in a chunk."""
        return choice.completion_tokens

    def scores(self, choice: Choice, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The field of the prompt's log-probabilities, on the wire that has one."""
        return {}

    def ending(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """The fields that the end of a choice has beside those of both wires: the token or string that stopped it."""
        return {"matched_stop_token_id": piece.stop_token_id}

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Any:
        """One entry a token, best first; None where none were requested."""
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
    return {"index": choice.index, "prompt_tokens": len(choice.prompt), "cached_tokens": choice.cached_tokens}
