"""Bounds of JSON numbers: no number in a grammar has endless digits."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from .multiples import check_multiple
from .places import below, refusal

LARGEST = 9223372036854774784
"""Largest magnitude of a number without limits of its own: the largest double below 2**63."""
STEP = 1e-9
"""Numbers have at most nine digits after the point."""
EXACT = 2**53
"""Integers up to this one are exact in a double, as llguidance holds them."""


def bounded(node: dict[str, Any], types: tuple[str, ...], place: str, step: float = STEP) -> dict[str, Any]:
    """Return the limits of a number's schema, with those that its digits need: it is a multiple of `step`, unless the
    schema says otherwise. Raises InvalidRequest for a range beyond LARGEST."""
    out: dict[str, Any] = {}
    if "multipleOf" in node:
        check_multiple(node["multipleOf"], place)
        out["multipleOf"] = node["multipleOf"]
    elif "number" in types:
        out["multipleOf"] = step
    grid = Fraction(str(out.get("multipleOf", 1)))
    lows = _limits(node, "minimum", "exclusiveMinimum", grid, place)
    highs = _limits(node, "maximum", "exclusiveMaximum", grid, place)
    return (lows or {"minimum": -LARGEST}) | (highs or {"maximum": LARGEST}) | out


def _limits(node: dict[str, Any], inclusive: str, exclusive: str, grid: Fraction, place: str) -> dict[str, float]:
    """Return the lower limits of a number's schema, or its upper ones, as far as they are within LARGEST.

    An exclusive limit next to zero becomes an inclusive one, the next multiple of `grid`: llguidance takes it as
    inclusive where it is whole and the other limit less than 1 away.
    """
    sign = 1 if inclusive == "minimum" else -1
    limits: dict[str, float] = {}
    for key in (inclusive, exclusive):
        if key not in node:
            continue
        value, kept = sign * Fraction(str(node[key])), key
        if key == exclusive and value >= 0:
            value, kept = grid * (value // grid + 1), inclusive
        limit = _inward(value)
        if limit > LARGEST:
            raise refusal(below(place, key), f"is out of range: use numbers between {-LARGEST} and {LARGEST}")
        if limit >= -LARGEST:
            limits[kept] = max(limit, limits.get(kept, limit))
    return {key: sign * limit for key, limit in limits.items()}


def _inward(value: Fraction) -> float:
    """Return the smallest double, by the digits that it is written with, that is not below a value."""
    near = float(value)
    while _as_written(near) < value:
        near = math.nextafter(near, math.inf)
    return int(near) if near.is_integer() and abs(near) <= LARGEST else near


def _as_written(near: float) -> Fraction:
    return Fraction(int(near)) if near.is_integer() else Fraction(repr(near))
