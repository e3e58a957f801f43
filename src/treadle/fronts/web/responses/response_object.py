"""The response object: fields that repeat the request, encoded once, and those that change while it is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ....errors import TreadleError
from ....text import TextView
from ...generation.pieces import Usage
from ...validate import RawParams
from ..error_shapes import encodable
from ..parsed import Head
from .output import COMPLETED

encode = msgspec.json.encode

QUEUED, FAILED, CANCELLED = "queued", "failed", "cancelled"
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""The API's codes of failed responses, by HTTP status; others are `server_error`."""


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return token counts. Tokens written to the prefix cache cost nothing and are not counted."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
            **usage.prompt_details,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def failure_json(error: TreadleError) -> dict[str, str]:
    """Return the error of a failed response."""
    return {"code": _CODES.get(error.http_status, "server_error"), "message": encodable(error.message)}


class ResponseObject:
    """Encoder of one response. `repeated` are the members that repeat the request, as JSON without braces."""

    def __init__(self, head: Head, repeated: bytes, params: RawParams, text: TextView) -> None:
        self._start = encode({"id": head.id, "object": "response", "created_at": head.created, "model": head.model})
        effective = {**_sampling(params, text), "service_tier": head.service_tier or "default"}
        self._repeated = b"," + repeated + b"," + encode(effective)[1:-1]

    def json(
        self,
        status: str,
        items: Sequence[bytes] = (),
        *,
        usage: Usage | None = None,
        error: TreadleError | None = None,
        incomplete: str | None = None,
        completed: int | None = None,
    ) -> bytes:
        """Return the response. `incomplete` is the reason why it is; `completed` is in seconds since 1970."""
        changing = {
            "status": status,
            "completed_at": completed if status == COMPLETED else None,
            "error": None if error is None else failure_json(error),
            "incomplete_details": None if incomplete is None else {"reason": incomplete},
            "usage": None if usage is None else usage_json(usage),
        }
        output = b',"output":[' + b",".join(items) + b"],"
        return self._start[:-1] + self._repeated + output + encode(changing)[1:]


def _sampling(params: RawParams, text: TextView) -> Mapping[str, Any]:
    """Return the sampling parameters in effect."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    given = {name: getattr(params, name) for name in defaults}
    return {
        name: text.default_sampling.get(name, default) if given[name] is None else given[name]
        for name, default in defaults.items()
    }
