"""Incremental text for decoders that do more than join bytes (WordPiece and others): decode a short window.

The window is the last ids whose text is out, for context, and the ids whose text is not. What the second adds to the
first is new text. Text that ends in U+FFFD may be half a code point and is held for a while; that it may also be a real
U+FFFD, a window can't tell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST = 16  # tokens to hold: one may end a code point and begin the next, so it can take more than four
_CONTEXT = 64  # tokens of context, at most


class WindowPieces:
    """Pieces of a tokenizer whose texts depend on their neighbours. `anchor` are ids of a word that others follow."""

    def __init__(self, tokenizer: Tokenizer, anchor: Sequence[int] | None = None) -> None:
        self._tokenizer = tokenizer
        self.anchor = tokenizer.encode("a", add_special_tokens=False).ids[:1] if anchor is None else list(anchor)

    @classmethod
    def of(cls, names: Mapping[str, int], decoder: str, anchor: Sequence[int]) -> WindowPieces:
        """From the tokens' names and tokenizer.json's decoder, without the model that encodes."""
        model = {"type": "WordLevel", "vocab": dict(names), "unk_token": ""}
        parts = {"added_tokens": [], "decoder": json.loads(decoder), "model": model}
        return cls(Tokenizer.from_str(json.dumps({"version": "1.0", **parts})), anchor)

    @property
    def decoder(self) -> str:
        """tokenizer.json's decoder, as JSON."""
        state = None if self._tokenizer.decoder is None else self._tokenizer.decoder.__getstate__()
        return "null" if state is None else str(state, "utf-8")

    def name_of(self, token: int) -> str | None:
        """The token's name in the vocabulary; None for an id that has no token."""
        return self._tokenizer.id_to_token(token) if 0 <= token < 2**32 else None

    def bytes_of(self, token: int) -> bytes:
        if self.name_of(token) is None:
            return b""
        before = self._tokenizer.decode(self.anchor, skip_special_tokens=False)
        both = self._tokenizer.decode([*self.anchor, token], skip_special_tokens=False)
        return both.removeprefix(before).encode("utf-8")

    def joiner(self) -> WindowJoiner:
        return WindowJoiner(self._tokenizer)


class WindowJoiner:
    """One sequence's window."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._shown = ""
        self._held: list[int] = []

    @property
    def pending(self) -> bool:
        return bool(self._held)

    def push(self, ids: Sequence[int]) -> str:
        return "".join(map(self._push_one, ids))

    def _push_one(self, token: int) -> str:
        self._held.append(token)
        text = self._decode([*self._context, *self._held])
        if text.endswith(_REPLACEMENT) and len(self._held) < _LONGEST:
            return ""
        return self._release(text)

    def finish(self) -> str:
        return self._release(self._decode([*self._context, *self._held])) if self._held else ""

    def _release(self, text: str) -> str:
        new = text[len(self._shown) :] if text.startswith(self._shown) else self._decode(self._held)
        # Tokens that add nothing stay in front: a space that the decoder took off the start was one.
        self._context = self._held if new else [*self._context, *self._held][-_CONTEXT:]
        self._shown, self._held = self._decode(self._context), []
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
