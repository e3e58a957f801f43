"""Places in a request, the dotted paths that refusals name, and positions of schemas."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..errors import InvalidRequest

_NAME = re.compile(r"[\w$-]+")
MAX_NAME = 60
_OF_SAME_VALUE = ("allOf", "anyOf", "oneOf")


def below(place: str, step: str | int) -> str:
    """Return the place of a key or an index below `place`."""
    if isinstance(step, int):
        return f"{place}[{step}]"
    name = step[:MAX_NAME]
    return f"{place}.{name}" if _NAME.fullmatch(name) else f"{place}[{name!r}]"


def refusal(place: str, message: str) -> InvalidRequest:
    """Build the refusal of what stands at `place`; `message` goes on from its name."""
    return InvalidRequest(f"{place} {message}", param=place)


@dataclass(frozen=True, slots=True)
class Node:
    """Position of a schema. `merged`: its objects may be intersected with others. `met`: its numbers may be, even if it
    is not merged. `exact`: it must not become narrower, as llguidance compares it with others of a oneOf. `name`: the
    property that it describes, "" for none or any. `levels`: schemas above it."""

    place: str
    merged: bool = False
    met: bool = False
    exact: bool = False
    name: str = ""
    levels: int = 1

    def below(self, *steps: str | int) -> Node:
        """Return the position of a schema at the end of these keys and indices."""
        place = self.place
        for step in steps:
            place = below(place, step)
        inside = self.name if steps[0] in _OF_SAME_VALUE else ""
        name = str(steps[1]) if steps[0] == "properties" else inside
        return replace(self, place=place, name=name, levels=self.levels + 1)
