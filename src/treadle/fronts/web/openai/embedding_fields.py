"""POST /v1/embeddings: its fields, and its requests, parsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ....core.messages import Pooling
from ....errors import ContextLengthExceeded, InvalidRequest
from ....text import TextView
from ....text.work.stages import TOKENIZING
from ...cache_salts import check_cache_salt
from ...generation.embedding import MAX_INPUTS
from ...generation.embedding_inputs import Input, place_of
from ...prepared import PreparedPrompts
from ...text_jobs import Enter
from ...validate import MAX_PRIORITY, Limits, check_prompt_ids
from ...value_checks import check_whole
from ..fields import CacheSalt, Priority, Text, TokenIds, Whole, optional, size, span
from ..parsing import read
from ..request_shapes import Strict
from .schema import MAX_PROMPT_IDS

if TYPE_CHECKING:
    from ....text import TextModel

FLOAT, BASE64 = "float", "base64"
MAX_DIMENSIONS = 2**31 - 1

Inputs = Annotated[list[Text], Field(fail_fast=True), size(minItems=1, maxItems=MAX_INPUTS)]
InputIds = Annotated[TokenIds, size(minItems=1, maxItems=MAX_PROMPT_IDS)]
IdLists = Annotated[list[InputIds], Field(fail_fast=True), size(minItems=1, maxItems=MAX_INPUTS)]


class EmbeddingFields(Strict):
    """Body of a request for embeddings."""

    input: Text | Inputs | InputIds | IdLists = Field(
        description="A string, strings, token ids, or lists of token ids: one embedding for each."
    )
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
    add_special_tokens: bool | None = optional("False tokenizes texts without BOS, EOS and the like.")
    priority: Priority | None = optional("Lower goes first; 0 is normal.")
    cache_salt: CacheSalt | None = optional(
        "Only requests of the same key and salt reuse each other's cached prompts. 1 to 256 characters."
    )
    user: Any = optional("Accepted and not used.")


class ParsedEmbedding:
    """One request, parsed and within its shape. `outlined` is the size of one whose content stayed in a text worker."""

    kind = "embedding"
    prompt_param = "input"
    outlined: int | None = None
    echoes: Sequence[Any] = ()

    def __init__(self, value: dict[str, Any]) -> None:
        _check_counts(value.get("input"))
        body = read(EmbeddingFields, value)
        self.model = body.model
        self.inputs = _inputs(body.input)
        self.base64 = body.encoding_format == BASE64
        self.dimensions = check_whole("dimensions", body.dimensions, 1, MAX_DIMENSIONS)
        self.pooling = None if body.pooling is None else Pooling(body.pooling)
        self.add_special_tokens = body.add_special_tokens is not False
        self.priority = check_whole("priority", body.priority, -MAX_PRIORITY, MAX_PRIORITY) or 0
        self.cache_salt = check_cache_salt(body.cache_salt)

    @property
    def prompts(self) -> int:
        return len(self.inputs)

    def check_against(self, limits: Limits) -> None:
        """Check token ids. Raises InvalidRequest with the place."""
        for place, one in enumerate(self.inputs):
            if not isinstance(one, str):
                check_prompt_ids(one, limits, self.param(place))

    def size(self, text: TextView) -> int:
        """Estimate the number of tokens of all inputs, without tokenizing."""
        if self.outlined is not None:
            return self.outlined
        size_bytes = sum(len(one.encode()) for one in self.inputs if isinstance(one, str))
        ids = sum(len(one) for one in self.inputs if not isinstance(one, str))
        return max(len(self.inputs), ids + int(size_bytes / text.bytes_per_token))

    def tokenize(self, model: TextModel, enter: Enter, most: int) -> PreparedPrompts:
        """Tokenize each input, in a text worker. Raises ContextLengthExceeded with the place."""
        enter(TOKENIZING)
        return PreparedPrompts([self._ids(place, one, model, most) for place, one in enumerate(self.inputs)])

    def outline(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return the request's JSON, `value`, with short inputs in place of its own."""
        return {**value, "input": ["x"] * self.prompts}

    def param(self, place: int) -> str:
        """Return the name of an input in refusals."""
        return place_of(self.prompt_param, place, len(self.inputs))

    def _ids(self, place: int, one: Input, model: TextModel, most: int) -> Sequence[int]:
        if not isinstance(one, str):
            return one
        try:
            return model.encode(one, add_special_tokens=self.add_special_tokens, most=most)
        except ContextLengthExceeded as error:
            error.param = self.param(place)
            raise


def _check_counts(given: Any) -> None:
    """Too many inputs are refused before each is looked at."""
    if not isinstance(given, list):
        return
    ids = bool(given) and isinstance(given[0], int)
    most, what = (MAX_PROMPT_IDS, "token ids") if ids else (MAX_INPUTS, "inputs")
    if len(given) > most:
        raise InvalidRequest(f"input has {len(given)} {what}: give at most {most}", param="input")


def _inputs(given: Any) -> list[Input]:
    """Return the inputs, however they were given."""
    inputs: list[Input] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    if not inputs:
        raise InvalidRequest("input is empty: give at least one", param="input")
    for place, one in enumerate(inputs):
        if not one:
            at = place_of("input", place, len(inputs))
            raise InvalidRequest(f"{at} is empty: give at least one character or token", param=at)
    return inputs
