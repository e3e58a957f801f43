"""Prompts of a request before they are token ids: token ids, a text, or chat messages.

A front with prompts of another form, such as a body that only a text worker parses, brings a class of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ...text import TextView
from ...text.images.prompt import images_of, without_images
from ..answer_options import NO_OPTIONS, AnswerOptions
from ..chat_messages import asks_to_continue, read_turns
from ..media.parts import check_images, size_with_images
from ..media.tokenizing import Layouts, with_images
from ..prepared import PreparedPrompts
from ..text_jobs import (
    TextJobRunner,
    TextParams,
    Tokenized,
    prepare_options,
    prompts_of,
    tokenize_messages,
    tokenize_text,
)
from ..validate import Limits, ValidatedRequest, check_prompt_ids, check_size

if TYPE_CHECKING:
    from ..media.service import RequestImages

TokenIds = Sequence[int]


class Prompts(Protocol):
    """The prompts of one request. `param` is the field that refusals name."""

    @property
    def param(self) -> str: ...

    def __len__(self) -> int:
        """The number of prompts."""
        ...

    def size(self, text: TextView, limits: Limits) -> int:
        """Return about how many tokens all prompts have. Raises InvalidRequest for prompts that are wrong, or too long
        beyond doubt, before anything is reserved for them."""
        ...

    async def tokenize(
        self, pool: TextJobRunner, params: ValidatedRequest, limits: Limits, tenant: str
    ) -> PreparedPrompts:
        """Return each prompt's token ids, and the values that all sequences share. Raises ContextLengthExceeded,
        InvalidRequest, and Busy where the text workers have too much to do for `tenant`."""
        ...


@dataclass(frozen=True)
class IdsPrompt:
    """One prompt of token ids."""

    ids: TokenIds
    param: str = "prompt"
    options: AnswerOptions = NO_OPTIONS

    def __len__(self) -> int:
        return 1

    def size(self, text: TextView, limits: Limits) -> int:
        check_prompt_ids(self.ids, limits, self.param)
        return len(self.ids)

    async def tokenize(
        self, pool: TextJobRunner, params: ValidatedRequest, limits: Limits, tenant: str
    ) -> PreparedPrompts:
        return PreparedPrompts([self.ids], await prepare_options(pool, self.options, limits, tenant, self.ids))


@dataclass(frozen=True)
class TextPrompt:
    """One prompt of text, for which special tokens are added as the tokenizer does."""

    text: str
    param: str = "prompt"
    options: AnswerOptions = NO_OPTIONS

    def __len__(self) -> int:
        return 1

    def size(self, text: TextView, limits: Limits) -> int:
        size = max(1, int(len(self.text.encode("utf-8", "surrogatepass")) / text.bytes_per_token))
        check_size(size, 1, limits, self.param)
        return size

    async def tokenize(
        self, pool: TextJobRunner, params: ValidatedRequest, limits: Limits, tenant: str
    ) -> PreparedPrompts:
        return await tokenize_text(pool, self.text, params, limits, tenant, self.param, self.options)


@dataclass(frozen=True)
class MessagesPrompt:
    """One chat, rendered by the model's template; `chat_messages` has the form of a message. `variables` are for the
    template. `images` returns what prepares its images, under the request's `cache_salt`."""

    messages: Sequence[Mapping[str, Any]]
    param: str = "messages"
    options: AnswerOptions = NO_OPTIONS
    variables: Mapping[str, Any] | None = None
    images: Callable[[str | None], RequestImages | None] = lambda salt: None

    @cached_property
    def turns(self) -> list[dict[str, Any]]:
        """The messages, read. Raises as `read_turns` does."""
        return read_turns(self.messages, self.param)

    def __len__(self) -> int:
        return 1

    def size(self, text: TextView, limits: Limits) -> int:
        places = [source.at for source in images_of(self.turns)]
        check_images(places, text.images, limits.no_images or text.no_images, limits.context)
        contents = (str(without_images(turn["content"])) for turn in self.turns)
        size_bytes = sum(len(content.encode("utf-8", "surrogatepass")) for content in contents)
        size = len(self.messages) + int(size_bytes / text.bytes_per_token)
        return size_with_images(size, len(places), text.images, limits, self.param)

    async def tokenize(
        self, pool: TextJobRunner, params: ValidatedRequest, limits: Limits, tenant: str
    ) -> PreparedPrompts:
        continues, variables = asks_to_continue(self.messages), dict(self.variables or {})
        given = TextParams(limits.context, self.param, continues, self.options, variables)

        async def tokenize(layouts: Layouts) -> Tokenized:
            return await tokenize_messages(pool, self.turns, msgspec.structs.replace(given, layouts=layouts), tenant)

        async with with_images(tokenize, partial(self.images, params.cache_salt), limits) as (found, held):
            return prompts_of(found, params, limits, self.param).with_images(held)
