"""Multiples of numbers, as llguidance computes with them: in 32 bits, and wrongly where these are too few."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from .places import below, refusal

_BOUND = 2**32
_MAX_DIGITS = 9
_MAX_FOUND = 64
"""Most least common multiples that are compared with one another."""


def check_multiple(value: float, place: str) -> None:
    """Raise InvalidRequest for a `multipleOf` in the schema at `place` whose digits llguidance can't read."""
    digits, exponent = float(value), 0
    while not digits.is_integer():
        digits, exponent = 10 * digits, exponent + 1
    if digits >= _BOUND or Fraction(int(digits), 10**exponent) != Fraction(str(value)):
        raise refusal(below(place, "multipleOf"), "has too many digits for a grammar: use a number of fewer digits")


class Multiples:
    """Values of `multipleOf` in schemas that may be intersected. Those of different properties never meet; those of
    none, such as definitions, may meet all others."""

    def __init__(self) -> None:
        self._places: dict[str, dict[Fraction, str]] = {"": {}}

    def add(self, value: float, name: str, place: str) -> None:
        """Add the value of the schema at `place`, which describes the property `name` ("": none, or any)."""
        self._places.setdefault(name, {}).setdefault(Fraction(str(value)), place)

    def step(self) -> float:
        """Return the finest step that numbers without `multipleOf` can have beside these values. Raises InvalidRequest
        where the least common multiple of some of them may be too large."""
        digits = min(_digits({**self._places[""], **places}) for places in self._places.values())
        return float(f"1e-{digits}")


def _digits(places: dict[Fraction, str]) -> int:
    """Return how many digits after the point fit beside these values."""
    values = list(places)
    for count in range(1, len(values) + 1):
        if not _fit([Fraction(1), *values[:count]]):
            raise refusal(
                below(places[values[count - 1]], "multipleOf"),
                "is too large, or has too many digits, for what stands beside it in other schemas: use smaller numbers "
                "that divide one another, or a single schema without allOf, anyOf or $ref",
            )
    return next(digits for digits in range(_MAX_DIGITS, -1, -1) if _fit([Fraction(1, 10**digits), *values]))


def _fit(values: Iterable[Fraction]) -> bool:
    """Whether all least common multiples of some of these values can be computed."""
    found = list(values)
    for index, one in enumerate(found):
        for other in found[: index + 1]:
            scale = 10 ** max(_exponent(one), _exponent(other))
            first, second = int(one * scale), int(other * scale)
            if first * second >= _BOUND:
                return False
            least = Fraction(math.lcm(first, second), scale)
            if least not in found:
                found.append(least)
        if len(found) > _MAX_FOUND:
            return False
    return True


def _exponent(value: Fraction) -> int:
    exponent = 0
    while (value * 10**exponent).denominator > 1:
        exponent += 1
    return exponent
