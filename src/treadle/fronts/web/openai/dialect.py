"""What chat and completions have in common: reading the shared fields, and what `answer` needs of a request."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ....errors import InvalidRequest, UnsupportedParameter
from ....text import TextModel
from ...rows import Piece
from ...validate import Limits, Wanted
from .schema import Generate
from .wire import Choice, ChunkWriter, Head, Usage


class Ask(ABC):
    """One request, read and within its shape, and how its answer is written."""

    kind: ClassVar[str]
    id_prefix: ClassVar[str]
    prompt_param: ClassVar[str]

    wanted: Wanted
    least_tokens: int = 1  # that may be asked for
    spellings: Mapping[str, str] = {}  # the validator's name of a field to the one that this request used

    def __init__(self, body: Generate) -> None:
        options = body.stream_options
        if options is not None and not body.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        for name in ("include_obfuscation", "continuous_usage_stats"):
            if getattr(options, name, None):
                raise UnsupportedParameter(f"stream_options.{name} is not supported here", param="stream_options")
        self.model = body.model
        self.stream = bool(body.stream)
        self.include_usage = options is not None and bool(options.include_usage)
        self.skip_special_tokens = body.skip_special_tokens is not False
        self.return_token_ids = bool(body.return_token_ids)

    @property
    @abstractmethod
    def prompts(self) -> int:
        """How many prompts there are."""

    @abstractmethod
    def size(self, model: TextModel) -> int:
        """About how many tokens all prompts have, without tokenizing."""

    @abstractmethod
    def tokenize(self, model: TextModel) -> list[Sequence[int]]:
        """Each prompt's token ids. Slow: runs in the text pool."""

    @abstractmethod
    def chunks(self, head: Head) -> ChunkWriter: ...

    @abstractmethod
    def first_events(self, writer: ChunkWriter, row: int, piece: Piece, model: TextModel) -> bytes:
        """What a choice's stream begins with, before the events of `piece`, its first."""

    @abstractmethod
    def events(self, writer: ChunkWriter, row: int, piece: Piece, model: TextModel) -> bytes:
        """A piece of one choice as server-sent events; empty when there is nothing to show."""

    @abstractmethod
    def whole(self, head: Head, choices: Sequence[Choice], usage: Usage, model: TextModel) -> bytes:
        """The answer as one JSON body."""

    def check_ids(self, limits: Limits) -> None:
        """Token ids that the client sent are in the vocabulary. Raises InvalidRequest."""
        return

    @contextlib.contextmanager
    def in_its_words(self) -> Iterator[None]:
        """Refusals within the block name the fields as this request does."""
        try:
            yield
        except InvalidRequest as error:
            name = error.param or ""
            if name not in self.spellings:
                raise
            spelled = self.spellings[name]
            raise type(error)(error.message.replace(name, spelled), param=spelled) from None

    @staticmethod
    def tokens_of(size_bytes: int, model: TextModel) -> int:
        return max(1, math.ceil(size_bytes / model.bytes_per_token))


def wanted_of(body: Generate, **own: Any) -> Wanted:
    """The shared fields as the validator knows them; `own` are those that a route reads in its own way."""
    same: dict[str, Any] = {
        name: getattr(body, name)
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "seed",
            "n",
            "min_tokens",
            "stop_token_ids",
            "ignore_eos",
            "priority",
            "cache_salt",
        )
    }
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    return Wanted(**same, stop=stop, **own)
