"""Prompt of a conversation of items: rendered by the model's template, and cut to the context where that is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ....errors import ContextLengthExceeded
from ...prepared import PreparedPrompts
from ...text_jobs import Enter
from ..chat_prompt import ChatPrompt

if TYPE_CHECKING:
    from ....text import TextModel

LEFT_FOR_ANSWER = 4
"""Of an input that is cut, a quarter of the context is left for an answer whose length is not limited."""


@dataclass(frozen=True)
class ItemsPrompt:
    """A chat whose oldest turns may be left out where `cut` is set. `answer_tokens` are the most tokens of the answer;
    None for no limit."""

    chat: ChatPrompt
    cut: bool = False
    answer_tokens: int | None = None

    def tokenize(self, model: TextModel, enter: Enter, most: int) -> PreparedPrompts:
        """Return the prompt's ids and what is prepared of its answer. Raises as `ParsedRequest.tokenize` does."""
        if not self.cut:
            return self.chat.tokenize(model, enter, most)
        limited = self.answer_tokens is not None and self.answer_tokens < most  # the context can't hold a longer answer
        limit = self.answer_tokens if limited else None
        found = self._fitting(0, model, enter, most, most - (limit or 1))
        if found is not None:
            return found
        target = most - (limit or most // LEFT_FOR_ANSWER)
        starts = _starts(self.chat.turns)
        low, high = 1, len(starts) - 1
        while low <= high:  # the fewest turns to leave out
            middle = (low + high) // 2
            fits = self._fitting(starts[middle], model, enter, most, target)
            found, low, high = (found, middle + 1, high) if fits is None else (fits, low, middle - 1)
        return found or self.chat.tokenize(model, enter, most)

    def _fitting(self, start: int, model: TextModel, enter: Enter, most: int, target: int) -> PreparedPrompts | None:
        """Return the prompt without the turns before `start`, if it has at most `target` tokens."""
        turns = [turn for i, turn in enumerate(self.chat.turns) if i >= start or turn["role"] == "system"]
        try:
            found = replace(self.chat, turns=turns).tokenize(model, enter, most)
        except ContextLengthExceeded:
            return None
        return found if len(found.ids[0]) <= target else None


def _starts(turns: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the places at which a cut conversation may begin: behind nothing, and at messages of the user."""
    return [0, *(i for i, turn in enumerate(turns) if i and turn["role"] == "user")]
