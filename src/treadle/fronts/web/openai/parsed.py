"""Requests of the OpenAI dialect, parsed: the fields that chat and completions share, and how answers are written."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from ....errors import InvalidRequest, TreadleError, UnsupportedParameter
from ....text import TextView
from ...generation.pieces import Piece, Usage
from ...service_tiers import check_tier
from ...validate import Limits, RawParams, ValidatedRequest, check, rename_params
from ..error_shapes import openai_error
from ..neutral_fields import refuse_beyond_neutral
from ..parsed import MAX_NAME_CHARS, Head, ParsedRequest, StreamWriter
from ..request_shapes import ALIASED, UNALIASED
from .field_aliases import Renamed
from .schema import Generate, OptionFields
from .wire import DONE, ChunkWriter, encode

STREAM_NEUTRAL = {"include_obfuscation": (False,)}
CHOICE_FIELDS = ("n", "stop_token_ids", "timeout")


class ParsedOpenAi(ParsedRequest):
    """A chat or completion of the OpenAI dialect: its shared fields, and the writer of its answer in chunks."""

    given: Renamed

    def __init__(self, body: Generate) -> None:
        options = body.stream_options
        if options is not None:
            refuse_beyond_neutral(options.model_dump(), STREAM_NEUTRAL, "stream_options.")
        self.model = body.model
        self.service_tier = check_tier(body.service_tier)
        self.stream = bool(body.stream)
        asked = (options and options.include_usage, body.usage and body.usage.include)
        self.include_usage = any(asked)
        self.counts_chunks = self.include_usage and bool(options and options.continuous_usage_stats)
        self.skip_special_tokens = body.skip_special_tokens is not False
        self.return_token_ids = bool(body.return_token_ids)

    @abstractmethod
    def chunks(self, head: Head) -> ChunkWriter: ...

    @abstractmethod
    def first_events(self, writer: ChunkWriter, index: int, piece: Piece, model: TextView) -> bytes:
        """Write the beginning of a choice's stream, before the events of `piece`, its first."""

    @abstractmethod
    def events(self, writer: ChunkWriter, index: int, piece: Piece, model: TextView) -> bytes:
        """Write a piece of one choice as server-sent events; empty when there is nothing to show."""

    def stream_writer(self, head: Head, text: TextView) -> StreamWriter:
        stream = CountedStream if self.counts_chunks else ChunkStream
        return stream(self, self.chunks(head), text)

    def check_against(self, limits: Limits) -> ValidatedRequest:
        """Validate the parameters, also values that another one overrides. Raises InvalidRequest."""
        with rename_params(self.spellings):
            validated = self._validated(self.params, limits)
            _check_context(self.given["num_ctx"], limits)
            _check_window(self.given["repeat_last_n"], validated)
        for field, name, value in self.given.unused:
            with rename_params({field: name}):
                self._check_unused(field, value, limits)
        return validated

    def _validated(self, params: RawParams, limits: Limits) -> ValidatedRequest:
        return check(params, limits, least_tokens=self.least_tokens, as_many_as_fit=True)

    def _check_unused(self, field: str, value: Any, limits: Limits) -> None:
        if field == "num_ctx":
            _check_context(value, limits)
        elif field != "repeat_last_n":
            value = [value] if field == "stop" and isinstance(value, str) else value
            self._validated(dataclasses.replace(self.params, **{field: value}), limits)


@dataclasses.dataclass
class ChunkStream:
    """Writer of a stream of chunks, which ends with the usage, if asked for, and [DONE]; or with one error."""

    request: ParsedOpenAi
    chunks: ChunkWriter
    text: TextView

    def start(self, usage: Usage) -> bytes:
        return b""

    def first(self, index: int, piece: Piece) -> bytes:
        return self.request.first_events(self.chunks, index, piece, self.text)

    def piece(self, index: int, piece: Piece) -> bytes:
        return self.request.events(self.chunks, index, piece, self.text)

    def end(self, usage: Usage) -> bytes:
        return (self.chunks.usage(usage) if self.request.include_usage else b"") + DONE

    def error(self, error: TreadleError, usage: Usage) -> bytes:
        return b"data: " + encode(openai_error(error)) + b"\n\n"


@dataclasses.dataclass
class CountedStream(ChunkStream):
    """Writer of a stream whose chunks have the tokens of all choices so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    begun: dict[int, bytes] = dataclasses.field(default_factory=dict)

    def start(self, usage: Usage) -> bytes:
        self.prompt_tokens = usage.prompt_tokens
        return super().start(usage)

    def first(self, index: int, piece: Piece) -> bytes:
        """Keep the beginning of a choice for `piece`: other choices may go on while it is encoded on a thread, and
        counts must not decrease."""
        self.begun[index] = super().first(index, piece)
        return b""

    def piece(self, index: int, piece: Piece) -> bytes:
        begun = self._counted(self.begun.pop(index, b""))
        self.completion_tokens += len(piece.tokens)
        return begun + self._counted(super().piece(index, piece))

    def _counted(self, events: bytes) -> bytes:
        return self.chunks.counted(events, self.prompt_tokens, self.completion_tokens)


def outline_of(value: Mapping[str, Any], acted_on: Collection[str], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that are acted upon, with `content` in place of its own. A model name of more than
    MAX_NAME_CHARS characters is cut: no model has it."""
    fields = {key: value[key] for key in acted_on if value.get(key) is not None}
    if isinstance(fields.get("model"), str):
        fields["model"] = fields["model"][:MAX_NAME_CHARS]
    if isinstance(fields.get("options"), dict):
        fields["options"] = {key: given for key, given in fields["options"].items() if key in OptionFields.model_fields}
    return {**fields, **content}


def _check_context(num_ctx: int | None, limits: Limits) -> None:
    if num_ctx is not None and num_ctx < 1:
        raise InvalidRequest(f"num_ctx is {num_ctx}: it must be at least 1", param="num_ctx")
    if num_ctx is not None and num_ctx > limits.context:
        raise InvalidRequest(
            f"num_ctx is {num_ctx} and this model is served with a context of {limits.context} tokens: leave it out, "
            "or start the server with a longer --context",
            param="num_ctx",
        )


def _check_window(last: int | None, validated: ValidatedRequest) -> None:
    """Raise UnsupportedParameter for a window of penalties that would change an answer."""
    sampling = validated.sampling
    penalized = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
    if penalized and last not in (None, -1):
        raise UnsupportedParameter(
            "repeat_last_n is not supported here with a penalty, which looks at all tokens: leave it out or send -1",
            param="repeat_last_n",
        )


def raw_params_of(body: Generate, given: Renamed, **own: Any) -> RawParams:
    """Return the shared fields under the validator's names; `own` are those that a route reads in its own way."""
    stop = given["stop"]
    aliased = {name: given[name] for name in ALIASED}
    others = {name: getattr(body, name) for name in (*UNALIASED, *CHOICE_FIELDS)}
    return RawParams(**aliased, **others, stop=[stop] if isinstance(stop, str) else stop, **own)
