"""Configurations that lie: a tiny one of some architecture, with one value that its weights do not have."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from typing import Any

from tests.support.architectures import ARCHITECTURES, UNAVAILABLE, Config, config_of

Place = tuple[str, ...]
NUMBERS: tuple[Any, ...] = (0, -1, 1, 3, 7, 10**6, 2**31, 10**30, 0.5, None, "x", True, [], {})
OTHERS: tuple[Any, ...] = (None, 0, -1, "x", [], {}, True, [None], {"x": 1})
_KEPT = ("model_type", "architectures")


def places(config: Mapping[str, Any], above: Place = ()) -> Iterator[Place]:
    """Every field of `config`, those of objects inside it included."""
    for name, value in config.items():
        if name not in _KEPT:
            yield (*above, name)
            if isinstance(value, dict):
                yield from places(value, (*above, name))


def broken(config: Mapping[str, Any], place: Place, value: Any) -> Config:
    """A copy of `config` with `value` at `place`; a list keeps its length where `value` is not one."""
    changed = copy.deepcopy(dict(config))
    inside: Any = changed
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = value
    return changed


def values_for(old: Any) -> list[Any]:
    """Values of another kind or size than `old`."""
    if isinstance(old, list):
        return [*OTHERS, old[:-1], old + old[:1]]
    return list(NUMBERS if isinstance(old, (int, float)) and not isinstance(old, bool) else OTHERS)


def cases(seed: int, count: int) -> Iterator[tuple[str, Place, Any]]:
    """`count` random ones: an architecture, a place in its configuration, and a value for it."""
    dice = random.Random(seed)
    names = sorted(ARCHITECTURES.keys() - UNAVAILABLE.keys())
    for _ in range(count):
        name = dice.choice(names)
        config = config_of(name)
        place = dice.choice(list(places(config)))
        old: Any = config
        for part in place:
            old = old[part]
        yield name, place, dice.choice(values_for(old))
