"""Opaque texts of the API (`encrypted_content`): reasoning and summaries that clients hold and send back.

They are not encrypted: a client that gets one has its text anyway. Each is a kind and the text in base64.
"""

from __future__ import annotations

import base64
import binascii

REASONING, SUMMARY = "reasoning", "summary"
_PREFIX = "treadle."


def wrap(kind: str, text: str) -> str:
    """Return `text` as an opaque text."""
    return f"{_PREFIX}{kind}.{base64.b64encode(text.encode()).decode()}"


def unwrap(kind: str, value: str) -> str | None:
    """Return the text in an opaque text of this kind; None for one that another server made."""
    start = f"{_PREFIX}{kind}."
    if not value.startswith(start):
        return None
    try:
        return base64.b64decode(value[len(start) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return None
