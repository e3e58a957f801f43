"""Check for lone surrogates: JSON allows them in strings, and no tokenizer accepts them."""

from __future__ import annotations

from ..errors import InvalidRequest


def check_text(text: str, *, param: str | None = None) -> None:
    """Raise InvalidRequest when `text` contains a lone surrogate, which has no UTF-8 form."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X}"
        raise InvalidRequest(
            f"the text holds half of a surrogate pair ({found} at character {error.start}); send whole characters",
            param=param,
        ) from None
