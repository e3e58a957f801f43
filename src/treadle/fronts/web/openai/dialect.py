"""What chat and completions have in common: reading the shared fields, and what `answer` needs of a request."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from ....errors import InvalidRequest
from ....text import TextView
from ...rows import Piece
from ...validate import Limits, RawParams, ValidatedRequest, check
from .field_aliases import Renamed
from .ignored_fields import refuse_beyond_neutral
from .schema import Generate, OptionFields
from .wire import Choice, ChunkWriter, Head, Usage

if TYPE_CHECKING:
    from ....text import TextModel
    from .echo import Echo

MAX_NAME_CHARS = 1024
STREAM_NEUTRAL = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}
SPELLED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
PLAIN = ("logit_bias", "n", "min_tokens", "stop_token_ids", "ignore_eos", "priority", "cache_salt")


class Ask(ABC):
    """One request, read and within its shape, and how its answer is written."""

    kind: ClassVar[str]
    id_prefix: ClassVar[str]
    prompt_param: ClassVar[str]

    wanted: RawParams
    least_tokens: int = 1  # that may be asked for
    given: Renamed
    outlined: int | None = None  # the size of a request whose content stayed in a text worker
    echoes: Sequence[Echo] = ()
    spellings: Mapping[str, str] = {}  # the validator's name of a field to the one that this request used

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
        """How many prompts there are."""

    def size(self, model: TextView) -> int:
        """About how many tokens all prompts have, without tokenizing."""
        return self._size(model) if self.outlined is None else self.outlined

    @abstractmethod
    def _size(self, model: TextView) -> int: ...

    @abstractmethod
    def tokenize(self, model: TextModel, rendered: Callable[[], None], most: int) -> list[Sequence[int]]:
        """Each prompt's token ids; `rendered` is called once a template has done its work. Runs in a text worker.

        Raises ContextLengthExceeded for a text of which that is certain; others of over `most` tokens are returned."""

    @abstractmethod
    def outline(self, value: dict[str, Any]) -> dict[str, Any]:
        """The request's JSON, `value`, without its content: what the event loop needs of it."""

    @abstractmethod
    def chunks(self, head: Head) -> ChunkWriter: ...

    @abstractmethod
    def first_events(self, writer: ChunkWriter, row: int, piece: Piece, model: TextView) -> bytes:
        """What a choice's stream begins with, before the events of `piece`, its first."""

    @abstractmethod
    def events(self, writer: ChunkWriter, row: int, piece: Piece, model: TextView) -> bytes:
        """A piece of one choice as server-sent events; empty when there is nothing to show."""

    @abstractmethod
    def whole(self, head: Head, choices: Sequence[Choice], usage: Usage, model: TextView) -> bytes:
        """The answer as one JSON body."""

    def check_against(self, limits: Limits) -> ValidatedRequest:
        """The parameters as the validator takes them; also what another value wins over is in range. Raises
        InvalidRequest."""
        with self.in_its_words():
            checked = self._checked(self.wanted, limits)
            _check_context(self.given["num_ctx"], limits)
        for field, name, value in self.given.unused:
            with in_words({field: name}):
                self._check_unused(field, value, limits)
        return checked

    def _checked(self, wanted: RawParams, limits: Limits) -> ValidatedRequest:
        return check(wanted, limits, least_tokens=self.least_tokens, as_many_as_fit=True)

    def _check_unused(self, field: str, value: Any, limits: Limits) -> None:
        if field == "num_ctx":
            _check_context(value, limits)
        else:
            value = [value] if field == "stop" and isinstance(value, str) else value
            self._checked(dataclasses.replace(self.wanted, **{field: value}), limits)

    def in_its_words(self) -> AbstractContextManager[None]:
        """Refusals within the block name the fields as this request does."""
        return in_words(self.spellings)

    @staticmethod
    def tokens_of(size_bytes: int, model: TextView) -> int:
        return max(1, math.ceil(size_bytes / model.bytes_per_token))


def outline_of(value: Mapping[str, Any], acted_on: Collection[str], content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request that are acted upon, with `content` in place of its own; a name that is none is cut."""
    kept = {key: value[key] for key in acted_on if value.get(key) is not None}
    if isinstance(kept.get("model"), str):
        kept["model"] = kept["model"][:MAX_NAME_CHARS]
    if isinstance(kept.get("options"), dict):
        kept["options"] = {key: given for key, given in kept["options"].items() if key in OptionFields.model_fields}
    return {**kept, **content}


@contextlib.contextmanager
def in_words(spellings: Mapping[str, str]) -> Iterator[None]:
    """Refusals within the block name the fields by these names."""
    try:
        yield
    except InvalidRequest as error:
        name = error.param or ""
        if name not in spellings:
            raise
        spelled = spellings[name]
        raise type(error)(error.message.replace(name, spelled), param=spelled) from None


def _check_context(num_ctx: int | None, limits: Limits) -> None:
    if num_ctx is not None and num_ctx < 1:
        raise InvalidRequest(f"num_ctx is {num_ctx}: it must be at least 1", param="num_ctx")
    if num_ctx is not None and num_ctx > limits.context:
        raise InvalidRequest(
            f"num_ctx is {num_ctx} and this model is served with a context of {limits.context} tokens: leave it out, "
            "or start the server with a longer --context",
            param="num_ctx",
        )


def wanted_of(body: Generate, given: Renamed, **own: Any) -> RawParams:
    """The shared fields as the validator knows them; `own` are those that a route reads in its own way."""
    stop = given["stop"]
    spelled = {name: given[name] for name in SPELLED}
    plain = {name: getattr(body, name) for name in PLAIN}
    return RawParams(**spelled, **plain, stop=[stop] if isinstance(stop, str) else stop, **own)
