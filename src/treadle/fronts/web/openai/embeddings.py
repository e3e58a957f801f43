"""POST /v1/embeddings: from a request's body to its answer."""

from __future__ import annotations

import asyncio
import base64
from array import array
from dataclasses import dataclass
from functools import partial

from starlette.types import Receive, Scope, Send

from ....text import TextView
from ...generation.embedding import EmbeddingRequest, Embeddings, check_embedding, embed
from ...generation.embedding_inputs import check_count
from ...media.parts import check_images, size_with_images
from ...media.tokenizing import ImagesOf, no_images, with_images
from ...prepared import PreparedPrompts
from ...served_models import ServedModel
from ...strict_json import is_small, parse_json
from ...text_jobs import TextJobRunner, ids_of
from ...validate import Limits
from ..access_log import record_of
from ..answer import RouteContext, with_body
from ..body import Body
from ..body_jobs import outline_in_worker, tokenize_in_worker
from ..errors import send_json
from ..guard import caller_of
from .embedding_fields import ParsedEmbedding
from .wire import encode

EMBEDDINGS = "/v1/embeddings"
WRITE_ASIDE_NUMBERS = 8192
"""Numbers of an answer from which on it is written on a thread: the event loop has others to serve."""


@dataclass(frozen=True)
class BodyInputs:
    """The inputs in a request's body (`generation.embedding.EmbeddingInputs`). The body is let go once they are
    tokenized. `images` returns what prepares their images."""

    request: ParsedEmbedding
    body: Body
    images: ImagesOf = no_images

    def __len__(self) -> int:
        return self.request.prompts

    def size(self, text: TextView, limits: Limits) -> int:
        for places in self.request.places_by_input():
            check_images(places, text.images, limits.no_images or text.no_images, limits.context)
        if self.request.outlined is None:
            self.request.check_against(limits)
        images = len(self.request.image_places)
        return size_with_images(self.request.size(text), images, text.images, limits, "input", len(self))

    async def tokenize(self, pool: TextJobRunner, limits: Limits, tenant: str) -> PreparedPrompts:
        tokenize = partial(tokenize_in_worker, pool, self.request.kind, self.body.data, limits, tenant, b"")
        async with with_images(tokenize, self.images, limits, len(self)) as (found, held):
            for place, count in enumerate(found.counts):
                check_count(count, limits, self.request.param(place))
            ids = [ids_of(data) for data in found.ids]
            prompts = PreparedPrompts(ids, places=found.places).with_images(held)
        self.body.release()
        return prompts


class EmbeddingsAnswer:
    """The ASGI application of the route. `shape` parses its requests."""

    shape: type[ParsedEmbedding] = ParsedEmbedding

    def __init__(self, server: RouteContext) -> None:
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await with_body(self._server, scope, receive, send, lambda body: self._answer(body, scope, send))

    async def _answer(self, body: Body, scope: Scope, send: Send) -> None:
        server, caller = self._server, caller_of(scope)
        parsed = await self._parse(body.data, caller.tenant)
        model = server.models.get(parsed.model)
        public_id, record = "embd-" + server.new_id(), record_of(scope)
        request = EmbeddingRequest(
            kind=parsed.kind,
            id=public_id,
            inputs=BodyInputs(parsed, body, partial(server.images_for, caller, parsed.cache_salt)),
            caller=caller,
            arrival=server.arrival_of(scope),
            salts=server.authenticator.salts,
            record=record,
            dimensions=parsed.dimensions,
            pooling=parsed.pooling,
            priority=parsed.priority,
            cache_salt=parsed.cache_salt,
            register=partial(server.live.shared, (public_id, record.id), caller.tenant_digest),
        )
        found = await embed(model, request, clock=server.clock)
        await send_json(send, 200, await self._encoded(found, model, parsed))

    def encoded(self, found: Embeddings, model: ServedModel, parsed: ParsedEmbedding) -> bytes:
        """Return the answer in JSON."""
        return encode_embeddings(found, model.name, as_base64=parsed.base64)

    async def _encoded(self, found: Embeddings, model: ServedModel, parsed: ParsedEmbedding) -> bytes:
        numbers = sum(map(len, found.vectors)) // array("f").itemsize
        if numbers < WRITE_ASIDE_NUMBERS:
            return self.encoded(found, model, parsed)
        return await asyncio.to_thread(self.encoded, found, model, parsed)

    async def _parse(self, body: bytes, tenant: str) -> ParsedEmbedding:
        """Parse a small body here, a large one in a text worker, under the limits of the default model."""
        if is_small(body):
            return self.shape(parse_json(body))
        model = self._server.models.default
        check_embedding(model, None, None)
        outline = await outline_in_worker(model.texts.pool, self.shape.kind, body, model.limits(), tenant)
        parsed = self.shape(outline.value)
        parsed.outlined, parsed.image_places = outline.size, outline.image_places
        return parsed


def encode_embeddings(found: Embeddings, model: str, *, as_base64: bool) -> bytes:
    """Return the answer in JSON. Each vector is encoded by itself: the encoder holds the GIL for as long as it runs."""
    write = _base64 if as_base64 else numbers_of
    data = [
        encode({"object": "embedding", "index": index, "embedding": write(vector)})
        for index, vector in enumerate(found.vectors)
    ]
    usage = {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens}
    rest = encode({"model": model, "usage": usage})[1:]
    return b'{"object":"list","data":[' + b",".join(data) + b"]," + rest


def numbers_of(vector: bytes) -> list[float]:
    """Return the numbers of a vector."""
    return array("f", vector).tolist()


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()
