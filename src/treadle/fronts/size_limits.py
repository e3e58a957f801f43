"""Limits of request sizes, derived from the model's context: requests that can never fit are refused before parsing."""

from __future__ import annotations

from ..text import TextView

JSON_ESCAPE = 6
"""Bytes of JSON that one byte of text may take: \\u0000 for each."""
OTHER_FIELDS_BYTES = 1 << 20
LEAST_BODY_BYTES = 4 << 20
MOST_BODY_BYTES = 64 << 20
VARINT_BYTES = 5
TEXT_BYTES = 12
"""Bytes of text to a token, at most, over a whole gRPC message: parsing a message holds the event loop."""
TRANSPORT_BYTES = 16 << 20
"""Bytes of a gRPC message that the transport takes: it has one limit, from before a model is loaded."""


def body_bytes(model: TextView, context: int, *, images: bool = False) -> int:
    """Return the longest request body: the context full of the longest tokens, each byte escaped, and the other fields;
    with `images` as long as any may be.

    At least LEAST_BODY_BYTES, so that a prompt which is merely too long is counted and refused by its tokens.
    """
    if images:
        return MOST_BODY_BYTES
    return _bounded(context * model.longest_token * JSON_ESCAPE + OTHER_FIELDS_BYTES)


def message_bytes(context: int | None, longest_token: int = VARINT_BYTES, *, images: bool = False) -> int:
    """Return the longest gRPC message: the context full of token ids or, as text, of long tokens, and the other fields.
    Without a context, as one is not known yet, and with `images` as long as the transport takes."""
    if context is None or images:
        return TRANSPORT_BYTES
    return min(MOST_BODY_BYTES, context * max(VARINT_BYTES, min(TEXT_BYTES, longest_token)) + OTHER_FIELDS_BYTES)


def _bounded(size: int) -> int:
    return min(MOST_BODY_BYTES, max(LEAST_BODY_BYTES, size))
