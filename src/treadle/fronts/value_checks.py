"""Checks of single values that a client sent: numbers within a range, token ids, and lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..errors import InvalidRequest


def check_sequence(param: str, given: object, wanted: str) -> None:
    """Raise InvalidRequest for what is not a list; `wanted` says what to give."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InvalidRequest(f"{param} is {shown(given)}: give {wanted}", param=param)


def check_token_id(name: str, token: Any, vocabulary: int) -> int:
    """Return the token id. Raises InvalidRequest for anything but 0 to `vocabulary` - 1."""
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
        raise InvalidRequest(
            f"{name} has {shown(token)}: token ids of this model are 0 to {vocabulary - 1}", param=name
        )
    return token


def check_flag(name: str, value: Any) -> bool | None:
    """Return `value`, true or false; None stays None. Raises InvalidRequest."""
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {shown(value)}: it must be true or false", param=name)
    return value


def check_number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> float | None:
    """Return `value` as a float from `low` (not itself, with `above`) to `high`; None stays None. Raises
    InvalidRequest."""
    if value is None:
        return None
    fits = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(_float(value))
    if not fits or not (low < value if above else low <= value) or value > high:
        bounds = (shown(low), shown(high))
        span = "above {} and at most {}".format(*bounds) if above else "from {} to {}".format(*bounds)
        raise InvalidRequest(f"{name} is {shown(value)}: it must be a number {span}", param=name.partition("[")[0])
    return float(value)


def check_whole(name: str, value: Any, low: int, high: int) -> int | None:
    """Return `value` as an int from `low` to `high`; None stays None. Raises InvalidRequest."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {shown(value)}: it must be a whole number from {low} to {high}", param=name)
    return value


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def shown(value: Any) -> str:
    """Return a short spelling of a value for a refusal."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a number of more than 128 bits"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
