"""Incremental decoding over a short window of ids, for decoders that do more than join bytes (WordPiece and others).

The window is the last ids already decoded, for context, and the ids still held. Its text beyond the context's text is
new. Text that ends in U+FFFD may be an incomplete code point and is held for up to 16 tokens; it may also be a real
U+FFFD, which can't be distinguished.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_HELD = 16  # tokens to hold; more than four, as a token may end one code point and begin the next
_MAX_CONTEXT = 64  # tokens of context, at most


class WindowTokenDecoder:
    """Decoder for tokenizers whose tokens' texts depend on their neighbours.

    `anchor`: ids of a word, decoded before a single token to get that token's text in the middle of a text.
    """

    def __init__(self, tokenizer: Tokenizer, anchor: Sequence[int] | None = None) -> None:
        self._tokenizer = tokenizer
        self.anchor = tokenizer.encode("a", add_special_tokens=False).ids[:1] if anchor is None else list(anchor)

    @classmethod
    def from_vocabulary(cls, names: Mapping[str, int], decoder: str, anchor: Sequence[int]) -> WindowTokenDecoder:
        """Build from token names and tokenizer.json's decoder, without the encoding model."""
        model = {"type": "WordLevel", "vocab": dict(names), "unk_token": ""}
        parts = {"added_tokens": [], "decoder": json.loads(decoder), "model": model}
        return cls(Tokenizer.from_str(json.dumps({"version": "1.0", **parts})), anchor)

    @property
    def decoder(self) -> str:
        """tokenizer.json's decoder as JSON."""
        state = None if self._tokenizer.decoder is None else self._tokenizer.decoder.__getstate__()
        return "null" if state is None else str(state, "utf-8")

    def name_of(self, token: int) -> str | None:
        """Return the token's name in the vocabulary; None for an id without a token."""
        return self._tokenizer.id_to_token(token) if 0 <= token < 2**32 else None

    def bytes_of(self, token: int) -> bytes:
        if self.name_of(token) is None:
            return b""
        before = self._tokenizer.decode(self.anchor, skip_special_tokens=False)
        both = self._tokenizer.decode([*self.anchor, token], skip_special_tokens=False)
        return both.removeprefix(before).encode("utf-8")

    def stream(self) -> WindowStreamDecoder:
        return WindowStreamDecoder(self._tokenizer)


class WindowStreamDecoder:
    """Decoding window of one sequence."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []

    @property
    def pending(self) -> bool:
        return bool(self._held)

    def push(self, ids: Sequence[int]) -> str:
        return "".join(map(self._push_one, ids))

    def _push_one(self, token: int) -> str:
        self._held.append(token)
        text = self._decode([*self._context, *self._held])
        if text.endswith(_REPLACEMENT) and len(self._held) < _MAX_HELD:
            return ""
        return self._release(text)

    def finish(self) -> str:
        return self._release(self._decode([*self._context, *self._held])) if self._held else ""

    def _release(self, text: str) -> str:
        new = text[len(self._context_text) :] if text.startswith(self._context_text) else self._decode(self._held)
        # Keep tokens without text as context: the decoder may have stripped a leading space token.
        self._context = self._held if new else [*self._context, *self._held][-_MAX_CONTEXT:]
        self._context_text, self._held = self._decode(self._context), []
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
