"""Conversation of a request, of any dialect that has one: its estimated size, and its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import InvalidRequest
from ...text.images import Layout
from ...text.images.prompt import images_of, without_images
from ...text.work.stages import RENDERING, TOKENIZING
from ..answer_options import AnswerOptions, tool_definitions
from ..chat_messages import asks_to_continue
from ..prepared import PreparedPrompts
from ..text_jobs import Enter, prepared_chat, with_prediction

if TYPE_CHECKING:
    from ...text import TextModel
    from ...text.tokenizer import ChatPrompt as RenderedPrompt

MESSAGE_OVERHEAD_BYTES = 16


@dataclass(frozen=True)
class ChatPrompt:
    """Turns as `chat_messages.read_turns` returns them, the tools in `options`, and `variables` for the template. The
    answer `continues` the last turn, or gets a turn of its own, which `opens_answer` opens. `layouts` are those of the
    turns' images, by their keys."""

    turns: Sequence[Mapping[str, Any]]
    options: AnswerOptions
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    opens_answer: bool = True
    layouts: Mapping[bytes, Layout] = field(default_factory=dict)

    @property
    def image_places(self) -> list[str]:
        """Return the places of the images in the request."""
        return [source.at for source in images_of(self.turns)]

    def size_bytes(self) -> int:
        """Return about how many bytes the prompt has, without images."""
        text = sum(len(str(without_images(part)).encode()) for turn in self.turns for part in turn.values())
        tools = len(msgspec.json.encode(tool_definitions(self.options) or ()))
        return text + tools + MESSAGE_OVERHEAD_BYTES * len(self.turns)

    def tokenize(self, model: TextModel, enter: Enter, most: int) -> PreparedPrompts:
        """Return the prompt's ids and what is prepared of its answer, in a text worker. Raises as
        `ParsedRequest.tokenize` does."""
        prompt = self.rendered(model, enter, most)
        prepared = prepared_chat(model, self.options, prompt.ids, enter)
        return PreparedPrompts([prompt.ids], with_prediction(model, self.options, prepared, most), [prompt.images])

    def rendered(self, model: TextModel, enter: Enter, most: int) -> RenderedPrompt:
        """Return the prompt alone. Raises as `tokenize` does."""
        enter(RENDERING)
        return model.chat_prompt(
            self.turns,
            tools=tool_definitions(self.options),
            add_generation_prompt=self.opens_answer,
            continue_final_message=self.continues,
            extra=self.variables,
            rendered=lambda: enter(TOKENIZING),
            most=most,
            images=self.layouts,
        )


def continues(messages: Sequence[Any], continue_final_message: bool | None, add_generation_prompt: bool | None) -> bool:
    """Whether the last message is left open. Raises InvalidRequest where a new one is to follow it, too."""
    if not continue_final_message:
        return asks_to_continue(messages)
    if add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true: the last message can't be left open and "
            "be followed by a new one; leave out one of them",
            param="continue_final_message",
        )
    return True
