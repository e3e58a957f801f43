"""Bounds of JSON numbers: no number in a grammar has endless digits."""

from __future__ import annotations

import math
from typing import Any

from .places import below, refusal

LARGEST = 9223372036854774784
"""Largest magnitude of a number without limits of its own: the largest double below 2**63."""
STEP = 1e-9
"""Numbers have at most nine digits after the point."""
EXACT = 2**53
"""Integers up to this one are exact in a double, as llguidance holds them."""


def bounded(node: dict[str, Any], types: tuple[str, ...], place: str) -> dict[str, Any]:
    """Return the limits of a number's schema, with those that its digits need. Raises InvalidRequest for a range beyond
    LARGEST."""
    lows = [key for key in ("minimum", "exclusiveMinimum") if key in node]
    highs = [key for key in ("maximum", "exclusiveMaximum") if key in node]
    out: dict[str, Any] = {key: _inward(node[key], up=key in lows) for key in (*lows, *highs)}
    for key in (*lows, *highs):
        if (out[key] > LARGEST) if key in lows else (out[key] < -LARGEST):
            raise refusal(below(place, key), f"is out of range: use numbers between {-LARGEST} and {LARGEST}")
    if not any(out[key] >= -LARGEST for key in lows):
        out = {key: out[key] for key in highs} | {"minimum": -LARGEST}
    if not any(out[key] <= LARGEST for key in highs):
        out = {key: value for key, value in out.items() if key not in highs} | {"maximum": LARGEST}
    return out | _step(node, types, out)


def _step(node: dict[str, Any], types: tuple[str, ...], limits: dict[str, Any]) -> dict[str, Any]:
    if "multipleOf" in node:
        return {"multipleOf": node["multipleOf"]}
    fine = any(0 < abs(limit) < STEP for limit in limits.values())
    return {"multipleOf": STEP} if "number" in types and not fine else {}


def _inward(value: float, *, up: bool) -> float:
    """Return the nearest double on the inner side of a limit."""
    near = float(value)
    if isinstance(value, int) and abs(value) > EXACT and near != value and (near < value) is up:
        near = math.nextafter(near, math.inf if up else -math.inf)
    return int(near) if near.is_integer() and abs(near) <= LARGEST else near
