"""POST /v1/embeddings: its fields, and its requests, parsed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from ....core.messages import Pooling
from ....errors import ContextLengthExceeded, InvalidRequest
from ....text import TextView
from ....text.images import Layout
from ....text.images.prompt import ImagesNeeded, PlacedImage, images_of
from ....text.work.stages import TOKENIZING
from ...answer_options import NO_OPTIONS
from ...cache_salts import check_cache_salt
from ...chat_messages import MAX_PARTS, read_turns
from ...embedding_items import read_item
from ...generation.embedding_inputs import MAX_INPUTS, place_of
from ...prepared import PreparedPrompts
from ...text_jobs import Enter
from ...validate import MAX_PRIORITY, Limits, check_prompt_ids
from ...value_checks import check_whole
from ..chat_prompt import ChatPrompt, continues
from ..fields import CacheSalt, Priority, Text, TokenIds, Whole, neutral_only, optional, size, span
from ..neutral_fields import refuse_beyond_neutral
from ..parsing import read
from ..request_shapes import Strict
from ..template_kwargs import TemplateKwargs, checked_kwargs
from .schema import MAX_PROMPT_IDS, Messages

if TYPE_CHECKING:
    from ....text import TextModel

FLOAT, BASE64 = "float", "base64"
MAX_DIMENSIONS = 2**31 - 1
NEUTRAL: dict[str, tuple[Any, ...]] = {"mm_processor_kwargs": ()}


NULL: Any = {"type": "null"}
TEXT_GIVEN: Any = {"required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}, "content": NULL}}
IMAGE_GIVEN: Any = {"required": ["image"], "properties": {"image": {"type": "string"}, "content": NULL}}
CONTENT_GIVEN: Any = {
    "required": ["content"],
    "properties": {"content": {"type": ["string", "array"]}, "text": {"enum": [None, ""]}, "image": NULL},
}
TEXT_PARTS = {"type": "array", "items": {}, "minItems": 1, "maxItems": MAX_PARTS}


class EmbeddingItem(Strict):
    """An input that is a message of the user: text, an image, or both."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [TEXT_GIVEN, IMAGE_GIVEN, CONTENT_GIVEN]})

    text: str | None = optional("The text, behind the image.")
    image: str | None = optional("The image: a data URL, base64, or an http(s) URL of a host that the server allows.")
    content: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, TEXT_PARTS, NULL]})] = optional(
        "In place of both: a string or parts, as a message of a chat has them."
    )


Inputs = Annotated[list[Text | EmbeddingItem], Field(fail_fast=True), size(minItems=1, maxItems=MAX_INPUTS)]
InputIds = Annotated[TokenIds, size(minItems=1, maxItems=MAX_PROMPT_IDS)]
IdLists = Annotated[list[InputIds], Field(fail_fast=True), size(minItems=1, maxItems=MAX_INPUTS)]
Input = str | Sequence[int] | ChatPrompt


class EmbeddingOptions(Strict):
    """Fields of all requests for embeddings."""

    model: str | None = optional("The served model's name; left out, it is the served model.")
    encoding_format: Literal["float", "base64"] | None = optional(
        'Numbers, or "base64" of float32 numbers, little-endian. Default: "float".'
    )
    dimensions: Annotated[Whole, span(1, MAX_DIMENSIONS)] | None = optional(
        "Cut each embedding to so many numbers, and scale it to length 1 again. For models trained for it."
    )
    pooling: Literal["last", "mean", "cls"] | None = optional(
        "How the states of an input's tokens become one vector. Default: the model's own."
    )
    add_generation_prompt: bool | None = optional(
        "Whether the assistant's turn is opened behind a chat. Default: false for `messages`, true for objects in "
        "`input`."
    )
    chat_template_kwargs: TemplateKwargs | None = optional("Plain values for the model's template, by its names.")
    mm_processor_kwargs: Any = neutral_only("Accepted only at null.")
    priority: Priority | None = optional("Lower goes first; 0 is normal.")
    cache_salt: CacheSalt | None = optional(
        "Only requests of the same key and salt reuse each other's cached prompts. 1 to 256 characters."
    )
    user: Any = optional("Accepted and not used.")


class EmbeddingFields(EmbeddingOptions):
    """Body of a request for embeddings."""

    input: Text | EmbeddingItem | Inputs | InputIds | IdLists = Field(
        description="A string, an object with text or an image, a list of these, token ids, or lists of token ids: "
        "one embedding for each."
    )
    add_special_tokens: bool | None = optional("False tokenizes texts without BOS, EOS and the like.")


class EmbeddingChatFields(EmbeddingOptions):
    """Body of a request for the embedding of a chat, in vLLM's form."""

    messages: Messages = Field(description="The chat, which gets one embedding. It may hold images.")
    continue_final_message: bool | None = optional(
        "True leaves the last message open. Not with `add_generation_prompt: true`."
    )
    add_special_tokens: bool | None = optional(
        "True adds what the tokenizer adds behind a text, besides the template's own. Default: false."
    )


class ParsedEmbedding:
    """One request, parsed and within its shape. `outlined` is the size of one whose content stayed in a text worker.
    `image_places` are those of images, and `layouts` theirs, by their keys."""

    kind = "embedding"
    prompt_param = "input"
    outlined: int | None = None
    echoes: Sequence[Any] = ()
    layouts: Mapping[bytes, Layout] = {}

    def __init__(self, value: dict[str, Any]) -> None:
        refuse_beyond_neutral(value, NEUTRAL)
        _check_counts(value.get("input"))
        body = read(_shape(value), value)
        self.model = body.model
        self.add_special_tokens = body.add_special_tokens is not False
        if isinstance(body, EmbeddingChatFields):
            self.prompt_param = "messages"
            self.add_special_tokens = bool(body.add_special_tokens)
        self.inputs = _inputs(body)
        self.image_places = [place for chat in self.chats() for place in chat.image_places]
        self.base64 = body.encoding_format == BASE64
        self.dimensions = check_whole("dimensions", body.dimensions, 1, MAX_DIMENSIONS)
        self.pooling = None if body.pooling is None else Pooling(body.pooling)
        self.priority = check_whole("priority", body.priority, -MAX_PRIORITY, MAX_PRIORITY) or 0
        self.cache_salt = check_cache_salt(body.cache_salt)

    @property
    def prompts(self) -> int:
        return len(self.inputs)

    def chats(self) -> Iterator[ChatPrompt]:
        """Yield the inputs that are chats."""
        return (one for one in self.inputs if isinstance(one, ChatPrompt))

    def places_by_input(self) -> list[list[str]]:
        """Return the places of images of each chat. Those of several in an outlined request are not told apart: the
        first place stands for all."""
        if self.outlined is None:
            return [chat.image_places for chat in self.chats()]
        return [list(self.image_places) if self.prompts == 1 else list(self.image_places[:1])]

    def check_against(self, limits: Limits) -> None:
        """Check token ids. Raises InvalidRequest with the place."""
        for place, one in enumerate(self.inputs):
            if not isinstance(one, str | ChatPrompt):
                check_prompt_ids(one, limits, self.param(place))

    def size(self, text: TextView) -> int:
        """Estimate the number of tokens of all inputs without images, and without tokenizing."""
        if self.outlined is not None:
            return self.outlined
        size_bytes = sum(len(one.encode()) for one in self.inputs if isinstance(one, str))
        size_bytes += sum(chat.size_bytes() for chat in self.chats())
        ids = sum(len(one) for one in self.inputs if not isinstance(one, str | ChatPrompt))
        return max(len(self.inputs), ids + int(size_bytes / text.bytes_per_token))

    def tokenize(self, model: TextModel, enter: Enter, most: int) -> PreparedPrompts:
        """Tokenize each input, in a text worker. Raises ContextLengthExceeded with the place, and ImagesNeeded for
        images without a layout."""
        sources = {source.key: source for chat in self.chats() for source in images_of(chat.turns)}
        if model.images is not None and not sources.keys() <= self.layouts.keys():
            raise ImagesNeeded(list(sources.values()))
        enter(TOKENIZING)
        found = [self._ids(place, one, model, enter, most) for place, one in enumerate(self.inputs)]
        return PreparedPrompts([ids for ids, _ in found], places=[places for _, places in found])

    def outline(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return the request's JSON, `value`, with short inputs in place of its own."""
        if "messages" in value:
            return {**value, "messages": [{"role": "user", "content": ""}]}
        return {**value, "input": ["x"] * self.prompts}

    def param(self, place: int) -> str:
        """Return the name of an input in refusals."""
        return place_of(self.prompt_param, place, len(self.inputs))

    def _ids(
        self, place: int, one: Input, model: TextModel, enter: Enter, most: int
    ) -> tuple[Sequence[int], Sequence[PlacedImage]]:
        """Return the ids of an input, and the places of its images."""
        try:
            if isinstance(one, ChatPrompt):
                return self._chat_ids(one, model, enter, most)
            if isinstance(one, str):
                return model.encode(one, add_special_tokens=self.add_special_tokens, most=most), ()
        except ContextLengthExceeded as error:
            error.param = self.param(place)
            raise
        return one, ()

    def _chat_ids(
        self, chat: ChatPrompt, model: TextModel, enter: Enter, most: int
    ) -> tuple[Sequence[int], Sequence[PlacedImage]]:
        prompt = replace(chat, layouts=self.layouts).rendered(model, enter, most)
        if self.prompt_param == "messages" and self.add_special_tokens:
            return [*prompt.ids, *model.encode("")[len(model.prefix) :]], prompt.images
        return prompt.ids, prompt.images


def _shape(value: dict[str, Any]) -> type[EmbeddingFields | EmbeddingChatFields]:
    if "messages" not in value:
        return EmbeddingFields
    if value.get("input") is not None:
        raise InvalidRequest("give either messages, a chat, or input", param="messages")
    return EmbeddingChatFields


def _check_counts(given: Any) -> None:
    """Too many inputs are refused before each is looked at."""
    if not isinstance(given, list):
        return
    ids = bool(given) and isinstance(given[0], int)
    most, what = (MAX_PROMPT_IDS, "token ids") if ids else (MAX_INPUTS, "inputs")
    if len(given) > most:
        raise InvalidRequest(f"input has {len(given)} {what}: give at most {most}", param="input")


def _inputs(body: EmbeddingFields | EmbeddingChatFields) -> list[Input]:
    """Return the inputs, however they were given."""
    variables = checked_kwargs(body.chat_template_kwargs or {})
    if isinstance(body, EmbeddingChatFields):
        turns = read_turns(body.messages)
        is_open = continues(body.messages, body.continue_final_message, body.add_generation_prompt)
        return [ChatPrompt(turns, NO_OPTIONS, variables, is_open, opens_answer=body.add_generation_prompt is True)]
    given = body.input
    single = isinstance(given, str | EmbeddingItem) or (given and isinstance(given[0], int))
    inputs: list[Any] = [given] if single else list(given)
    if not inputs:
        raise InvalidRequest("input is empty: give at least one", param="input")
    found: list[Input] = []
    for place, one in enumerate(inputs):
        at = place_of("input", place, len(inputs))
        if isinstance(one, EmbeddingItem):
            turn = read_item(one.model_dump(exclude_none=True), at)
            one = ChatPrompt([turn], NO_OPTIONS, variables, opens_answer=body.add_generation_prompt is not False)
        elif not one:
            raise InvalidRequest(f"{at} is empty: give at least one character or token", param=at)
        found.append(one)
    return found
