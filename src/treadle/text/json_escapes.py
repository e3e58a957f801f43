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
