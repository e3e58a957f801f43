"""Error bodies of each dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ContextLengthExceeded, ThreadUnsupported, TreadleError

ErrorShape = Callable[[TreadleError], dict[str, Any]]

ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors by status. Others are invalid_request_error below 499, and api_error from there on."""
CLIENT_LEFT = 499


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


def anthropic_error(error: TreadleError, request_id: str | None = None) -> dict[str, Any]:
    """Return Anthropic's envelope, with the request's id where that is known."""
    other = "api_error" if error.http_status >= CLIENT_LEFT else "invalid_request_error"
    kind = ANTHROPIC_TYPES.get(error.http_status, other)
    inner: dict[str, Any] = {"type": kind, "message": encodable(_anthropic_message(error))}
    if isinstance(error, ThreadUnsupported):
        inner["details"] = {"error_code": error.code, "unsupported": [error.param]}
    body = {"type": "error", "error": inner}
    return body if request_id is None else {**body, "request_id": request_id}


def _anthropic_message(error: TreadleError) -> str:
    """Return the message; for a prompt that is too long behind Anthropic's own words: clients search for them, and read
    the two numbers, to shorten a conversation and try again."""
    if not isinstance(error, ContextLengthExceeded):
        return error.message
    if error.prompt_tokens is None or error.context is None:
        return f"prompt is too long: {error.message}"
    return f"prompt is too long: {error.prompt_tokens} tokens > {error.context - 1} maximum: {error.message}"


def encodable(text: str) -> str:
    """Return `text` without half surrogate pairs, which UTF-8 does not have."""
    return text.encode("utf-8", "replace").decode("utf-8")


def ollama_error(error: TreadleError) -> dict[str, Any]:
    """Return Ollama's error: a message alone."""
    return {"error": encodable(error.message)}
