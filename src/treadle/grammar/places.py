"""Places in a request: the dotted paths that refusals name."""

from __future__ import annotations

import re

from ..errors import InvalidRequest

_NAME = re.compile(r"[\w$-]+")
MAX_NAME = 60


def below(place: str, step: str | int) -> str:
    """Return the place of a key or an index below `place`."""
    if isinstance(step, int):
        return f"{place}[{step}]"
    name = step[:MAX_NAME]
    return f"{place}.{name}" if _NAME.fullmatch(name) else f"{place}[{name!r}]"


def refusal(place: str, message: str) -> InvalidRequest:
    """Build the refusal of what stands at `place`; `message` goes on from its name."""
    return InvalidRequest(f"{place} {message}", param=place)
