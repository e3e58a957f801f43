"""Requests of the OpenAI dialect, parsed: the fields that chat and completions share, and how answers are written."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ....errors import InvalidRequest
from ....text import TextView
from ...answer_options import AnswerOptions
from ...generation.pieces import Piece, Usage, WholeChoice
from ...prepared import NOTHING, Prepared, PreparedPrompts
from ...text_jobs import Enter
from ...validate import Limits, RawParams, ValidatedRequest, check, rename_params
from .field_aliases import Renamed
from .ignored_fields import refuse_beyond_neutral
from .schema import Generate, OptionFields
from .wire import ChunkWriter, Head

if TYPE_CHECKING:
    from ....text import TextModel
    from .echo import Echo

MAX_NAME_CHARS = 1024
STREAM_NEUTRAL = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}
ALIASED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
UNALIASED = ("logit_bias", "n", "min_tokens", "stop_token_ids", "ignore_eos", "priority", "cache_salt")


class ParsedRequest(ABC):
    """One request, parsed and within its shape, and the writer of its answer."""

    kind: ClassVar[str]
    id_prefix: ClassVar[str]
    prompt_param: ClassVar[str]
    stops_of_model: ClassVar[bool] = False  # the model's own stop strings end an answer

    params: RawParams
    options: AnswerOptions
    least_tokens: int = 1  # of max_tokens
    given: Renamed
    outlined: int | None = None  # the size of a request whose content stayed in a text worker
    echoes: Sequence[Echo] = ()
    prepared: Prepared = NOTHING
    spellings: Mapping[str, str] = {}  # the validator's names of fields to those that this request used

    def __init__(self, body: Generate) -> None:
        options = body.stream_options
        if options is not None:
            refuse_beyond_neutral(options.model_dump(), STREAM_NEUTRAL, "stream_options.")
        self.model = body.model
        self.stream = bool(body.stream)
        self.include_usage = options is not None and bool(options.include_usage)
        self.skip_special_tokens = body.skip_special_tokens is not False
        self.return_token_ids = bool(body.return_token_ids)

    @property
    @abstractmethod
    def prompts(self) -> int:
        """The number of prompts."""

    def size(self, model: TextView) -> int:
        """Estimate the number of tokens of all prompts, without tokenizing."""
        return self._size(model) if self.outlined is None else self.outlined

    @abstractmethod
    def _size(self, model: TextView) -> int: ...

    @abstractmethod
    def tokenize(self, model: TextModel, enter: Enter, most: int) -> PreparedPrompts:
        """Tokenize each prompt and prepare the answers, in a text worker; `enter` is called at the start of each stage.

        Raises InvalidRequest for a grammar, and ContextLengthExceeded for a text of which that is certain; others of
        over `most` tokens are returned."""

    @abstractmethod
    def outline(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return the request's JSON, `value`, without its content, for the event loop."""

    @abstractmethod
    def chunks(self, head: Head) -> ChunkWriter: ...

    @abstractmethod
    def first_events(self, writer: ChunkWriter, index: int, piece: Piece, model: TextView) -> bytes:
        """Write the beginning of a choice's stream, before the events of `piece`, its first."""

    @abstractmethod
    def events(self, writer: ChunkWriter, index: int, piece: Piece, model: TextView) -> bytes:
        """Write a piece of one choice as server-sent events; empty when there is nothing to show."""

    @abstractmethod
    def whole(self, head: Head, choices: Sequence[WholeChoice], usage: Usage, model: TextView) -> bytes:
        """Write the answer as one JSON body."""

    def check_against(self, limits: Limits) -> ValidatedRequest:
        """Validate the parameters, also values that another one overrides. Raises InvalidRequest."""
        with rename_params(self.spellings):
            validated = self._validated(self.params, limits)
            _check_context(self.given["num_ctx"], limits)
        for field, name, value in self.given.unused:
            with rename_params({field: name}):
                self._check_unused(field, value, limits)
        return validated

    def _validated(self, params: RawParams, limits: Limits) -> ValidatedRequest:
        return check(params, limits, least_tokens=self.least_tokens, as_many_as_fit=True)

    def _check_unused(self, field: str, value: Any, limits: Limits) -> None:
        if field == "num_ctx":
            _check_context(value, limits)
        else:
            value = [value] if field == "stop" and isinstance(value, str) else value
            self._validated(dataclasses.replace(self.params, **{field: value}), limits)

    @staticmethod
    def tokens_of(size_bytes: int, model: TextView) -> int:
        return max(1, math.ceil(size_bytes / model.bytes_per_token))


def outline_of(value: Mapping[str, Any], acted_on: Collection[str], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that are acted upon, with `content` in place of its own. A model name of more than
    MAX_NAME_CHARS characters is cut: no model has it."""
    kept = {key: value[key] for key in acted_on if value.get(key) is not None}
    if isinstance(kept.get("model"), str):
        kept["model"] = kept["model"][:MAX_NAME_CHARS]
    if isinstance(kept.get("options"), dict):
        kept["options"] = {key: given for key, given in kept["options"].items() if key in OptionFields.model_fields}
    return {**kept, **content}


def _check_context(num_ctx: int | None, limits: Limits) -> None:
    if num_ctx is not None and num_ctx < 1:
        raise InvalidRequest(f"num_ctx is {num_ctx}: it must be at least 1", param="num_ctx")
    if num_ctx is not None and num_ctx > limits.context:
        raise InvalidRequest(
            f"num_ctx is {num_ctx} and this model is served with a context of {limits.context} tokens: leave it out, "
            "or start the server with a longer --context",
            param="num_ctx",
        )


def raw_params_of(body: Generate, given: Renamed, **own: Any) -> RawParams:
    """Return the shared fields under the validator's names; `own` are those that a route reads in its own way."""
    stop = given["stop"]
    aliased = {name: given[name] for name in ALIASED}
    others = {name: getattr(body, name) for name in UNALIASED}
    return RawParams(**aliased, **others, stop=[stop] if isinstance(stop, str) else stop, **own)
