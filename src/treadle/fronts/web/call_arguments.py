"""Arguments of a complete call, as a value within an answer's JSON."""

from __future__ import annotations

import msgspec

_ONE_LINE = str.maketrans("\r\n", "  ")


def raw_arguments(text: str) -> msgspec.Raw:
    """Return arguments, which are JSON, on one line and otherwise as the model wrote them: no number is too long, and
    no array too deep."""
    return msgspec.Raw(text.translate(_ONE_LINE) or "{}")
