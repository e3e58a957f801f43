"""Fields of POST /api/embed and the older /api/embeddings."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from ....errors import InvalidRequest
from ..openai.embedding_fields import ParsedEmbedding
from .requests import model_of, unknown_fields

UNUSED = ("truncate", "options", "keep_alive")
"""Fields that change nothing: an input that is too long is refused. Unknown fields are ignored too, and logged."""


class OllamaEmbed(ParsedEmbedding):
    """A request of /api/embed, parsed: a string or strings."""

    kind = "ollama_embed"
    fields: ClassVar[tuple[str, ...]] = ("model", "input", "dimensions", *UNUSED)

    def __init__(self, value: dict[str, Any]) -> None:
        self.began = time.monotonic()
        self.unknown = unknown_fields({**value, "options": None}, self.fields)
        given = value.get(self.prompt_param)
        texts = given if isinstance(given, list) else [given]
        if not all(isinstance(text, str) for text in texts):
            expected = "a string, or an array of strings"
            raise InvalidRequest(f"{self.prompt_param} must be {expected}", param=self.prompt_param)
        if not given:
            raise InvalidRequest(f"{self.prompt_param} is empty: give a text", param=self.prompt_param)
        super().__init__({"input": given, "model": model_of(value), "dimensions": value.get("dimensions")})

    def outline(self, value: dict[str, Any]) -> dict[str, Any]:
        known = {name: value[name] for name in self.fields if name in value and name not in UNUSED}
        return {**dict.fromkeys(self.unknown), **super().outline(known)}


class OlderEmbed(OllamaEmbed):
    """A request of /api/embeddings, parsed: one string, as `prompt`."""

    kind = "ollama_embeddings"
    prompt_param = "prompt"
    fields = ("model", "prompt", *UNUSED)

    def __init__(self, value: dict[str, Any]) -> None:
        if isinstance(value.get("prompt"), list):
            raise InvalidRequest("prompt is an array: it must be a string; /api/embed takes several", param="prompt")
        super().__init__(value)

    def outline(self, value: dict[str, Any]) -> dict[str, Any]:
        return {**dict.fromkeys(self.unknown), "model": value.get("model"), "prompt": "x"}
