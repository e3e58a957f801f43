"""Check of a structured answer against the schemas of its request."""

from __future__ import annotations

from typing import Any

import msgspec

from .schemas import matches
from .wire import AnswerReader


def check(fields: dict[str, Any], answer: AnswerReader) -> tuple[int, int]:
    """Return the number of parts of an answer that have a schema, and of those that match it: the text under
    `response_format`, else each tool call. An answer without any counts as one part."""
    if "response_format" in fields:
        schema = fields["response_format"]["json_schema"]["schema"]
        return 1, int(_is_valid(answer.content, schema))
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in fields["tools"]}
    valid = sum(
        call.name in parameters and _is_valid(call.arguments, parameters[call.name]) for call in answer.calls.values()
    )
    return max(1, len(answer.calls)), valid


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        return matches(msgspec.json.decode(text), schema)
    except msgspec.DecodeError:
        return False
