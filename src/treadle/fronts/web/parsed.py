"""A request of an API that generates: parsed, within its shape, and able to write its answer.

Each dialect has a subclass for each of its routes. `answer.Answer` runs it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ...errors import TreadleError
from ...text import TextView
from ...text.events import Event, Text
from ...text.images import Layout
from ..answer_options import AnswerOptions
from ..generation.pieces import Piece, Usage, WholeChoice
from ..prepared import NOTHING, Prepared, PreparedPrompts
from ..service_tiers import priority_of
from ..text_jobs import Enter
from ..validate import Limits, RawParams, ValidatedRequest
from .echo import Echo
from .framing import SERVER_SENT_EVENTS, Framing

if TYPE_CHECKING:
    from ...telemetry.access_log import RequestRecord
    from ...text import TextModel
    from ..authentication import Caller
    from ..served_models import Models, ServedModel

MAX_NAME_CHARS = 1024


@dataclass(frozen=True)
class Head:
    """Fields of the answer to one request. `created` is in seconds since 1970; `fingerprint` names the model's
    configuration. `record` has the request's times. `service_tier`: the tier that was used, where the request names
    one. `caches_prompts`: all tokens of prompts that are computed are added to the prefix cache."""

    id: str
    created: int
    model: str
    fingerprint: str
    record: RequestRecord | None = None
    service_tier: str | None = None
    caches_prompts: bool = False


class StreamWriter(Protocol):
    """Writer of one stream, which may have several choices. All methods return whole events, or nothing."""

    def start(self, usage: Usage) -> bytes:
        """Return the beginning of the stream, once the request is admitted; `usage` has no completion tokens yet."""
        ...

    def first(self, index: int, piece: Piece) -> bytes:
        """Return the beginning of a choice, before the events of `piece`, its first."""
        ...

    def piece(self, index: int, piece: Piece) -> bytes:
        """Return the events of a piece of one choice."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Return the end of a stream whose choices have all ended."""
        ...

    def error(self, error: TreadleError, usage: Usage) -> bytes:
        """Return the end of a stream that has failed."""
        ...


class ParsedRequest(ABC):
    """One request, parsed and within its shape.

    `params`: sampling parameters as the client sent them. `options`: tools, grammar and reasoning. `model`: the name it
    asks for; None for none. `service_tier`: the tier it asks for. `spellings`: the dialect's own names of the
    validator's fields. `least_tokens`: the smallest `max_tokens`. `outlined`: the size of a request whose content
    stayed in a text worker; `outlined_grammar`: the digest of its grammar. `carried`: what the prompts need of the
    server's state, for the text worker; `layouts`: those of the prompt's images, by their keys. `image_places`: the
    places of images in it. `cuts`: turns are left out of a prompt that the context does not hold. `prepared` and
    `echoes` are set when the prompts are tokenized.
    """

    kind: ClassVar[str]
    id_prefix: ClassVar[str]
    prompt_param: ClassVar[str]
    stops_of_model: ClassVar[bool] = False  # the model's own stop strings end an answer
    framing: ClassVar[Framing] = SERVER_SENT_EVENTS

    model: str | None = None
    service_tier: str | None = None
    stream: bool = False
    skip_special_tokens: bool = True
    params: RawParams
    options: AnswerOptions
    least_tokens: int = 1
    outlined: int | None = None
    outlined_grammar: bytes = b""
    carried: bytes = b""
    layouts: Mapping[bytes, Layout] = {}
    image_places: Sequence[str] = ()
    cuts: bool = False
    echoes: Sequence[Echo] = ()
    prepared: Prepared = NOTHING
    spellings: Mapping[str, str] = {}

    @abstractmethod
    def __init__(self, value: dict[str, Any]) -> None:
        """Parse a body's JSON. Raises InvalidRequest."""

    def served_by(self, models: Models) -> ServedModel:
        """Return the model that answers. Raises as `Models.get` does."""
        return models.get(self.model)

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        return 1

    def apply_tier(self, caller: Caller) -> None:
        """Set the priority of the tier that the request asks for; its own `priority` counts more."""
        if self.service_tier is not None and self.params.priority is None:
            self.params = replace(self.params, priority=priority_of(self.service_tier, caller))

    def size(self, model: TextView) -> int:
        """Estimate the number of tokens of all prompts, without tokenizing."""
        return self._size(model) if self.outlined is None else self.outlined

    @abstractmethod
    def _size(self, model: TextView) -> int: ...

    @abstractmethod
    def tokenize(self, model: TextModel, enter: Enter, most: int) -> PreparedPrompts:
        """Tokenize each prompt and prepare the answers, in a text worker; `enter` is called at the start of each stage.

        Raises InvalidRequest for a grammar, ImagesNeeded for images without a layout, and ContextLengthExceeded for a
        text of which that is certain; others of over `most` tokens are returned."""

    @abstractmethod
    def outline(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return the request's JSON, `value`, without its content, for the event loop."""

    @abstractmethod
    def check_against(self, limits: Limits) -> ValidatedRequest:
        """Validate the parameters. Raises InvalidRequest."""

    @abstractmethod
    def stream_writer(self, head: Head, text: TextView) -> StreamWriter: ...

    @abstractmethod
    def whole(self, head: Head, choices: Sequence[WholeChoice], usage: Usage, text: TextView) -> bytes:
        """Return the answer as one JSON body."""

    def events_of(self, part: Piece | WholeChoice) -> Sequence[Event]:
        """Return the events of a piece or of a whole choice; its text as one, where the answer is not read for more."""
        if self.prepared.reader is not None:
            return part.events
        text = part.text if isinstance(part.text, str) else "".join(part.text)
        return (Text(text),) if text else ()

    @staticmethod
    def tokens_of(size_bytes: int, model: TextView) -> int:
        return max(1, math.ceil(size_bytes / model.bytes_per_token))


Shape = type[ParsedRequest]
"""Class of the requests of one route."""
