"""Signatures of thinking blocks. Clients send them back unread.

A block whose text was shown has a digest of it. Where a request asks for thinking without its text (`display:
"omitted"`), the signature holds the text, so that the next prompt has the reasoning that this answer began with, and
its prefix is cached. Nothing depends on a signature being right: one of another server counts as no text.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

DIGEST, SEALED = "treadle-digest:", "treadle-text:"


def signature_of(text: str) -> str:
    """Return the signature of a block whose text is shown."""
    return DIGEST + base64.b64encode(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()).decode()


def sealed(text: str) -> str:
    """Return the signature of a block whose text is omitted."""
    return SEALED + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def unsealed(signature: str) -> str:
    """Return the text in a signature; "" where it holds none."""
    if not signature.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(SEALED), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return ""
