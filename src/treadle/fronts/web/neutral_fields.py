"""Refusal of fields that are known and not served, beyond their neutral values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...errors import UnsupportedParameter

HINTS = {
    "best_of": "answers are not ranked, n alone gives several; leave it out",
    "chat_template": "templates come from the server's operator, never from a request",
    "prompt_logprobs": "ask /v1/completions with echo and logprobs for a prompt's log-probabilities",
}


def refuse_beyond_neutral(given: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raise UnsupportedParameter for the first field that is not neutral. `prefix` is put before its name."""
    for name, allowed_values in neutral.items():
        value = given.get(name)
        if value is not None and not any(_same(value, allowed) for allowed in allowed_values):
            hint = HINTS.get(name, f"leave it out{_or_neutral(allowed_values)}")
            raise UnsupportedParameter(f"{prefix}{name} is not supported here: {hint}", param=prefix + name)


def _same(value: Any, allowed: Any) -> bool:
    """Compare as JSON does: 1 is 1.0 and not true, also inside of arrays and objects."""
    if isinstance(value, dict) and isinstance(allowed, dict):
        return value.keys() == allowed.keys() and all(_same(value[key], allowed[key]) for key in value)
    if isinstance(value, list) and isinstance(allowed, list):
        return len(value) == len(allowed) and all(map(_same, value, allowed))
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _or_neutral(allowed_values: tuple[Any, ...]) -> str:
    return f" or send {' or '.join(map(_as_json, allowed_values))}" if allowed_values else ""


def _as_json(value: Any) -> str:
    return json.dumps(value)
