"""Dialect that a request speaks, by its path and its headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANTHROPIC_PATH = "/v1/messages"
VERSION_HEADER = b"anthropic-version"


def is_anthropic(scope: Mapping[str, Any]) -> bool:
    """Whether the request of an ASGI `scope` is in Anthropic's dialect: by its path, or because it has the header that
    Anthropic's clients send with every request."""
    path = scope.get("path", "")
    if path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/"):
        return True
    return any(name == VERSION_HEADER for name, _ in scope.get("headers", ()))
