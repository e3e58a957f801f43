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

EMBED, OLDER = "/api/embed", "/api/embeddings"


class OllamaEmbedAnswer(EmbeddingsAnswer):
    """The ASGI application of /api/embed."""

    shape = OllamaEmbed

    def encoded(self, found: Embeddings, model: ServedModel, parsed: ParsedEmbedding) -> bytes:
        assert isinstance(parsed, OllamaEmbed)
        counts = {"load_duration": 0, "prompt_eval_count": found.prompt_tokens}
        total = {"total_duration": round((time.monotonic() - parsed.began) * NS)}
        vectors = b",".join(encode(numbers_of(vector)) for vector in found.vectors)
        return b'{"embeddings":[' + vectors + b"]," + encode({"model": model.name, **total, **counts})[1:]


class OlderEmbedAnswer(EmbeddingsAnswer):
    """The ASGI application of /api/embeddings."""

    shape = OlderEmbed

    def encoded(self, found: Embeddings, model: ServedModel, parsed: ParsedEmbedding) -> bytes:
        return encode({"embedding": numbers_of(found.vectors[0])})
