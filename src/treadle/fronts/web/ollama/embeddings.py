"""POST /api/embed and the older /api/embeddings: their answers."""

from __future__ import annotations

import time

from ...generation.embedding import Embeddings
from ...served_models import ServedModel
from ..openai.embedding_fields import ParsedEmbedding
from ..openai.embeddings import EmbeddingsAnswer, numbers_of
from ..openai.wire import encode
from .answers import NS
from .embedding_fields import OlderEmbed, OllamaEmbed
from .reports import report_unknown

EMBED, OLDER = "/api/embed", "/api/embeddings"


class OllamaEmbedAnswer(EmbeddingsAnswer):
    """The ASGI application of /api/embed."""

    shape = OllamaEmbed

    async def _parse(self, body: bytes, tenant: str) -> ParsedEmbedding:
        parsed = await super()._parse(body, tenant)
        assert isinstance(parsed, OllamaEmbed)
        report_unknown(parsed.unknown)
        return parsed

    def encoded(self, found: Embeddings, model: ServedModel, parsed: ParsedEmbedding) -> bytes:
        assert isinstance(parsed, OllamaEmbed)
        counts = {"load_duration": 0, "prompt_eval_count": found.prompt_tokens}
        total = {"total_duration": round((time.monotonic() - parsed.began) * NS)}
        vectors = b",".join(encode(numbers_of(vector)) for vector in found.vectors)
        return b'{"embeddings":[' + vectors + b"]," + encode({"model": model.name, **total, **counts})[1:]


class OlderEmbedAnswer(OllamaEmbedAnswer):
    """The ASGI application of /api/embeddings."""

    shape = OlderEmbed

    def encoded(self, found: Embeddings, model: ServedModel, parsed: ParsedEmbedding) -> bytes:
        return encode({"embedding": numbers_of(found.vectors[0])})
