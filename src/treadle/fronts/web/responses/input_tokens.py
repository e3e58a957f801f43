"""Request of POST /v1/responses/input_tokens: the prompt of a response alone, whose tokens are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...prepared import PreparedPrompts
from ...text_jobs import Enter
from ..chat_prompt import ChatPrompt
from .items import Item
from .parsed import ParsedResponse

if TYPE_CHECKING:
    from ....text import TextModel


class ParsedInputTokens(ParsedResponse):
    """One request to count the tokens of an input, parsed. Its other fields are checked where they are given."""

    kind = "responses_input_tokens"

    def _parse(self, value: dict[str, Any]) -> None:
        super()._parse(value)
        facts = self.facts
        facts.stream = facts.store = facts.background = False
        facts.items, facts.ids = [], []

    def _chat(self, items: Sequence[Item], carried: int = 0) -> ChatPrompt:
        chat = super()._chat(items, carried)
        return _PromptAlone(chat.turns, chat.options, chat.variables, layouts=chat.layouts)


class _PromptAlone(ChatPrompt):
    """A conversation to which no answer is prepared: no grammar is compiled."""

    def tokenize(self, model: TextModel, enter: Enter, most: int) -> PreparedPrompts:
        return PreparedPrompts([self.rendered(model, enter, most).ids])
