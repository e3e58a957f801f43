"""Conversation of a request, of any dialect that has one: its estimated size, and its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ...text.work.stages import RENDERING, TOKENIZING
from ..answer_options import AnswerOptions, tool_definitions
from ..prepared import PreparedPrompts
from ..text_jobs import Enter, prepared_chat, with_prediction

if TYPE_CHECKING:
    from ...text import TextModel

MESSAGE_OVERHEAD_BYTES = 16


@dataclass(frozen=True)
class ChatPrompt:
    """Turns as `chat_messages.read_turns` returns them, the tools in `options`, and `variables` for the template. The
    answer `continues` the last turn, or gets a turn of its own, which `opens_answer` opens."""

    turns: Sequence[Mapping[str, Any]]
    options: AnswerOptions
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    opens_answer: bool = True

    def size_bytes(self) -> int:
        """Return about how many bytes the prompt has."""
        text = sum(len(str(part).encode()) for turn in self.turns for part in turn.values())
        tools = len(msgspec.json.encode(tool_definitions(self.options) or ()))
        return text + tools + MESSAGE_OVERHEAD_BYTES * len(self.turns)

    def tokenize(self, model: TextModel, enter: Enter, most: int) -> PreparedPrompts:
        """Return the prompt's ids and what is prepared of its answer, in a text worker. Raises as
        `ParsedRequest.tokenize` does."""
        ids = self.ids(model, enter, most)
        prepared = prepared_chat(model, self.options, ids, enter)
        return PreparedPrompts([ids], with_prediction(model, self.options, prepared, most))

    def ids(self, model: TextModel, enter: Enter, most: int) -> Sequence[int]:
        """Return the prompt's ids alone. Raises as `tokenize` does."""
        enter(RENDERING)
        return model.chat_prompt(
            self.turns,
            tools=tool_definitions(self.options),
            add_generation_prompt=self.opens_answer,
            continue_final_message=self.continues,
            extra=self.variables,
            rendered=lambda: enter(TOKENIZING),
            most=most,
        ).ids
