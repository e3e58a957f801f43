"""Past calls as text in a model's own format, for templates that describe tools but write no calls."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from .formats.base import ToolFormat
from .json_escapes import with_whole_pairs


class PastCallWriter:
    """Writer of the calls of one conversation, in `tool_format` or, where that has no form for them, in Hermes'.

    Special tokens in the texts of a conversation stay text, also in a call's arguments. So the format's own markers are
    written as random names, which `restore` replaces in the rendered prompt.
    """

    def __init__(self, tool_format: ToolFormat | None = None) -> None:
        self._format = tool_format
        self._name = secrets.token_hex(16)

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return calls, in OpenAI's form, as text."""
        objects = [_object(call["function"]) for call in calls]
        own = None if self._format is None else self._format.past_calls(objects, self._mark)
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects) if own is None else own

    def _mark(self, marker: str) -> str:
        return f"{self._name}-{marker.encode().hex()}-"

    def restore(self, rendered: str) -> str:
        """Return the rendered prompt with the format's markers."""
        return re.sub(f"{self._name}-([0-9a-f]+)-", lambda found: bytes.fromhex(found[1]).decode(), rendered)


def _object(function: Mapping[str, Any]) -> str:
    """Return a call as a JSON object. Arguments that are no object stay a text."""
    value = arguments_object(function["arguments"])
    arguments = function["arguments"] if value is None else value
    return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)


def arguments_object(text: str) -> dict[str, Any] | None:
    """Return the object in a call's arguments; None if they are none."""
    try:
        value = json.loads(with_whole_pairs(text) or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
