"""Error bodies of each dialect, chosen by the path of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import Scope

from ...errors import TreadleError

ErrorShape = Callable[[TreadleError], dict[str, Any]]


def openai_error(error: TreadleError) -> dict[str, Any]:
    """Return OpenAI's envelope. Messages may quote a client's text, half surrogate pairs too."""
    return {
        "error": {
            "message": encodable(error.message),
            "type": error.kind,
            "param": None if error.param is None else encodable(error.param),
            "code": error.code,
        }
    }


def encodable(text: str) -> str:
    """Return `text` without half surrogate pairs, which UTF-8 does not have."""
    return text.encode("utf-8", "replace").decode("utf-8")


def ollama_error(error: TreadleError) -> dict[str, Any]:
    """Return Ollama's error: a message alone."""
    return {"error": encodable(error.message)}


BY_PREFIX: Mapping[str, ErrorShape] = {"/api/": ollama_error}
"""Shapes of the paths that begin so; all others have OpenAI's."""


def error_shape(scope: Scope) -> ErrorShape:
    """Return the shape of errors of the dialect that a request speaks."""
    path = scope.get("path", "")
    return next((shape for prefix, shape in BY_PREFIX.items() if path.startswith(prefix)), openai_error)
