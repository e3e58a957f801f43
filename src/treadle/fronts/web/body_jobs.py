"""Jobs of text workers that parse request bodies, and the calls that ask for them.

A large body is parsed in a worker, once to be checked and once to be tokenized; only its parameters come back.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import ContextLengthExceeded
from ...text import TextView
from ...text.images import Layout
from ...text.images.prompt import ImagesNeeded
from ...text.work.stages import PARSING
from .. import text_jobs
from ..media.parts import check_images, size_with_images
from ..media.tokenizing import ImagesOf, Layouts, no_images, with_images
from ..prepared import PreparedPrompts
from ..strict_json import parse_json
from ..text_jobs import (
    IMAGE_BYTES,
    Echoed,
    Enter,
    TextJobRunner,
    Tokenized,
    about_grammar,
    about_param,
    decode_tokenized,
    grammar_of,
    ids_of,
    needs_images,
    prompts_of,
    tokenized,
)
from ..validate import Limits, ValidatedRequest, prompt_beyond
from . import token_jobs
from .anthropic.messages import ParsedCount, ParsedMessages
from .echo import Echo
from .ollama.embedding_fields import OlderEmbed, OllamaEmbed
from .ollama.requests import OllamaChat, OllamaGenerate
from .openai.chat import ParsedChat
from .openai.completions import ParsedCompletion
from .openai.embedding_fields import ParsedEmbedding
from .parsed import ParsedRequest, Shape
from .responses.compaction import ParsedCompaction
from .responses.input_tokens import ParsedInputTokens
from .responses.parsed import ParsedResponse
from .worker_limits import WorkerLimits

if TYPE_CHECKING:
    from ...text import TextModel
    from ..media.service import RequestImages
    from .body import Body

_SHAPES: tuple[Shape | type[ParsedEmbedding], ...] = (
    ParsedChat,
    ParsedCompletion,
    ParsedEmbedding,
    OllamaEmbed,
    OlderEmbed,
    OllamaChat,
    OllamaGenerate,
    ParsedMessages,
    ParsedCount,
    ParsedResponse,
    ParsedCompaction,
    ParsedInputTokens,
)
SHAPES: Mapping[str, Shape | type[ParsedEmbedding]] = {shape.kind: shape for shape in _SHAPES}


# Messages


class ReadParams(msgspec.Struct, frozen=True):
    """The expected shape of a body, and the limits it is checked against."""

    kind: str
    limits: WorkerLimits


class Outline(msgspec.Struct, frozen=True, omit_defaults=True):
    """A checked request without its content: the other fields, about how many tokens its prompts have, the places of
    its images, and the digest of its grammar."""

    value: dict[str, Any]
    prompts: int
    size: int
    image_places: list[str] = []
    grammar: bytes = b""


class TokenizeParams(msgspec.Struct, frozen=True):
    """Parameters of `tokenize`: prompts of over `context` tokens are counted, not sent back. `carried` and `layouts`
    are those of the request."""

    kind: str
    context: int
    carried: bytes = b""
    layouts: dict[bytes, Layout] = {}


_encode = msgspec.msgpack.Encoder().encode


# In the worker


def read_job(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Parse and check a body."""
    enter(PARSING)
    given = msgspec.msgpack.decode(params, type=ReadParams)
    value = parse_json(payload)
    request = SHAPES[given.kind](value)
    request.check_against(given.limits.with_model(model))
    outline, places = request.outline(value), list(request.image_places)
    grammar = grammar_of(request.options) if isinstance(request, ParsedRequest) else b""
    return _encode(Outline(outline, request.prompts, request.size(model), places, grammar))


def tokenize_job(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Tokenize the prompts of a body that was checked before."""
    enter(PARSING)
    given = msgspec.msgpack.decode(params, type=TokenizeParams)
    request = SHAPES[given.kind](parse_json(payload))
    request.layouts = given.layouts
    if isinstance(request, ParsedRequest):
        request.carried = given.carried
    try:
        with about_param(request.prompt_param, given.context):
            prompts = request.tokenize(model, enter, given.context)
    except ImagesNeeded as images:
        return needs_images(images.sources)
    echoes = [Echoed(echo.text, bool(echo.tokens), array("I", echo.offsets).tobytes()) for echo in request.echoes]
    return tokenized(prompts.ids, given.context, echoes, prompts.prepared, prompts.places)


JOBS = {**text_jobs.JOBS, **token_jobs.JOBS, "read": read_job, "tokenize": tokenize_job}


# On the event loop


async def read_in_worker(pool: TextJobRunner, kind: str, body: bytes, limits: Limits, tenant: str) -> ParsedRequest:
    """Parse a large body in a text worker. The request comes without its content. Raises its first fault."""
    outline = await outline_in_worker(pool, kind, body, limits, tenant)
    request = SHAPES[kind](outline.value)
    assert isinstance(request, ParsedRequest)
    request.outlined, request.image_places = outline.size, outline.image_places
    request.outlined_grammar = outline.grammar
    return request


async def outline_in_worker(pool: TextJobRunner, kind: str, body: bytes, limits: Limits, tenant: str) -> Outline:
    """Parse a large body in a text worker. Return the request without its content. Raises its first fault."""
    params = ReadParams(kind, WorkerLimits.of(limits))
    data = await pool.run("read", _encode(params), body, tenant=tenant, parsed=len(body))
    return msgspec.msgpack.decode(data, type=Outline)


async def tokenize_in_worker(
    pool: TextJobRunner,
    kind: str,
    body: bytes,
    limits: Limits,
    tenant: str,
    carried: bytes = b"",
    layouts: Layouts | None = None,
    grammar: bytes = b"",
) -> Tokenized:
    """Tokenize the prompts of a body that was checked before, with what the request carries; `grammar` is that of
    `grammar_of`. Raises as `Prompts.tokenize` does."""
    given = _encode(TokenizeParams(kind, limits.context, carried, layouts or {}))
    size = len(body) + len(carried) + IMAGE_BYTES * len(layouts or ())
    return decode_tokenized(
        await pool.run("tokenize", given, body, tenant=tenant, parsed=size, tokenized=size, grammar=grammar)
    )


async def count_in_worker(
    pool: TextJobRunner,
    kind: str,
    body: bytes,
    limits: Limits,
    tenant: str,
    images: ImagesOf = no_images,
    *,
    carried: bytes = b"",
    cuts: bool = False,
) -> int:
    """Return the number of tokens of a checked body's prompts, with what the request carries; also of those that the
    context does not hold, unless the prompt `cuts` itself to it. Raises InvalidRequest, and Busy where the text workers
    have too much to do for `tenant`."""
    many = limits.countable
    counted = limits if cuts else many

    async def tokenize(layouts: Layouts) -> Tokenized:
        try:
            return await tokenize_in_worker(pool, kind, body, counted, tenant, carried, layouts)
        except ContextLengthExceeded as error:
            raise prompt_beyond(limits.context, f"more than {counted.context}", error.param or "") from None

    async with with_images(tokenize, images, many) as (found, held):
        if held is not None:
            held.release()
        return sum(found.counts)


@dataclass(frozen=True)
class BodyPrompts:
    """The prompts in a request's body (`generation.prompts.Prompts`). The body is let go once they are tokenized.
    `images` returns what prepares the prompt's images, under the request's `cache_salt`."""

    request: ParsedRequest
    body: Body
    images: Callable[[str | None], RequestImages | None] = lambda salt: None

    @property
    def param(self) -> str:
        return self.request.prompt_param

    def __len__(self) -> int:
        return self.request.prompts

    def size(self, text: TextView, limits: Limits) -> int:
        places, most = self.request.image_places, self._image_limits(limits).context
        check_images(places, text.images, limits.no_images or text.no_images, most)
        return size_with_images(self.request.size(text), len(places), text.images, limits, self.param, len(self))

    async def tokenize(
        self, pool: TextJobRunner, params: ValidatedRequest, limits: Limits, tenant: str
    ) -> PreparedPrompts:
        """Tokenize in a text worker; the request gets its echoes and what was prepared of it. Raises as
        `Prompts.tokenize` does."""
        images = partial(self.images, params.cache_salt)
        tokenize = partial(self._tokenized, pool, limits, tenant)
        async with with_images(tokenize, images, self._image_limits(limits)) as (found, held):
            prompts = prompts_of(found, params, limits, self.param).with_images(held)
        self.request.prepared = prompts.prepared
        self.request.echoes = [_echo(*both) for both in zip(found.echoes, prompts.ids, strict=False)]
        self.body.release()
        return prompts

    def _image_limits(self, limits: Limits) -> Limits:
        """Return the limits of a prompt's images, some of which may be left out with their turns."""
        return limits.countable if self.request.cuts else limits

    async def _tokenized(self, pool: TextJobRunner, limits: Limits, tenant: str, layouts: Layouts) -> Tokenized:
        request = self.request
        grammar = grammar_of(request.options) if request.outlined is None else request.outlined_grammar
        with about_grammar(request.options if request.outlined is None else None):
            return await tokenize_in_worker(
                pool, request.kind, self.body.data, limits, tenant, request.carried, layouts, grammar
            )


def _echo(echoed: Echoed, prompt: Sequence[int]) -> Echo:
    if not echoed.scored:
        return Echo(echoed.text)
    return Echo(echoed.text, prompt, ids_of(echoed.offsets))
