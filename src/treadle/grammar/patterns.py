"""Regular expressions of clients: their size is bounded before they are compiled."""

from __future__ import annotations

import re

from .places import refusal

MAX_CHARACTERS = 8192
MAX_COPIES = 50_000
"""Most copies of one part of a pattern that nested repetitions may ask for."""

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)


def check_pattern(pattern: str, place: str) -> None:
    """Raise InvalidRequest for a pattern that is too long, or whose counted repetitions multiply beyond MAX_COPIES."""
    if len(pattern) > MAX_CHARACTERS:
        raise refusal(place, f"is longer than {MAX_CHARACTERS} characters: use a shorter pattern")
    if copies(pattern) > MAX_COPIES:
        raise refusal(place, f"repeats a part over {MAX_COPIES} times: use smaller counts")


def copies(pattern: str) -> int:
    """Return the characters and classes of a pattern, each as often as the counted repetitions around it say."""
    groups: list[int] = []
    total = last = 0
    for match in _TOKEN.finditer(pattern):
        part = match[0]
        if match[1]:
            total += last * max(0, _count(match) - 1)
            last = 0
        elif part == "(":
            groups.append(total)
            last = 0
        elif part == ")":
            last = total - (groups.pop() if groups else 0)
        elif part not in "*+?|":
            total += 1
            last = 1
    return total


def _count(match: re.Match[str]) -> int:
    digits = match[2] or match[1]
    return int(digits) if len(digits) < 10 else MAX_COPIES + 1
