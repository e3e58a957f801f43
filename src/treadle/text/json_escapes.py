r"""Escapes of JSON strings that models write: `\ud83d\ude00` is one code point, and half of such a pair is none."""

from __future__ import annotations

import re

_ESCAPE = re.compile(
    r"\\(?:"
    r"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})"
    r"|.)",
    re.DOTALL,
)


def with_whole_pairs(json_text: str) -> str:
    """Return JSON with U+FFFD in place of each half of a surrogate pair, which UTF-8 does not have."""
    if "\\u" not in json_text:
        return json_text
    return _ESCAPE.sub(lambda found: r"\ufffd" if found["half"] else found[0], json_text)


_WHOLE = re.compile(r"\\(?:u(?P<high>[dD][89abAB][0-9a-fA-F]{2})|u[0-9a-fA-F]{4}|[^u])", re.DOTALL)


class WholePairs:
    """The same for JSON that comes in pieces: what may be a part of an escape, or of a pair, is held back."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        """Return what is complete now."""
        text, self._held = self._held + piece, ""
        if "\\" not in text:
            return text
        end = _complete(text)
        self._held = text[end:]
        return with_whole_pairs(text[:end])

    def end(self) -> str:
        """Return what was held back, as nothing follows."""
        text, self._held = self._held, ""
        return with_whole_pairs(text)


def _complete(text: str) -> int:
    """Return where escapes and pairs of JSON text, which does not begin within one, are complete."""
    position, high, high_end = 0, 0, -1
    while (start := text.find("\\", position)) >= 0:
        found = _WHOLE.match(text, start)
        if found is None:
            return high if high_end == start else start
        position = found.end()
        if found["high"] is not None:
            high, high_end = start, position
    return high if high_end == len(text) else len(text)
