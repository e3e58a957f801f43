"""The text side of a model without its tokenizer: all that checking requests and writing answers needs.

A server's own process holds only this; tokenizer and chat template stay in the text processes (`work/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .detokenizer import Detokenizer
from .token_bytes import TokenBytes


@dataclass(frozen=True, eq=False)
class TextView:
    """Facts about a model's text and the bytes that each token spells. Immutable, safe on any thread.

    `vocabulary` is the model's own size and may exceed the tokenizer's. `context` is in tokens. `bytes_per_token` is
    measured on a small mixed sample, for estimates only; `longest_token` is the bytes of the longest token.
    `default_sampling` holds generation_config.json's valid values, `stop_strings` those that end an answer in a chat.
    `special_ids` are hidden in answers; `named_ids` maps the text of each special token to its id. `prefix` is what
    the tokenizer puts before a text.
    """

    folder: Path
    vocabulary: int
    context: int
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, float | int]
    stop_strings: tuple[str, ...]
    special_tokens: Mapping[str, str]
    special_ids: frozenset[int]
    named_ids: Mapping[str, int] = field(repr=False)
    bytes_per_token: float
    longest_token: int
    model_type: str
    architectures: tuple[str, ...]
    has_template: bool
    pieces: TokenBytes = field(repr=False)
    prefix: tuple[int, ...]

    def stop_tokens(self, stops: Sequence[str]) -> tuple[int, ...]:
        """Ids of those stop strings that are special tokens: text hides these, so they must stop as tokens."""
        found = (self.named_ids.get(stop) for stop in stops)
        return tuple(dict.fromkeys(i for i in found if i is not None and i in self.special_ids))

    def special_id(self, name: str) -> int | None:
        """The id of a named special token (`bos_token`, `pad_token`, ...), where the folder names one."""
        content = self.special_tokens.get(name)
        return None if content is None else self.named_ids.get(content)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; the same text that a Detokenizer gives piece by piece."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token spells, maybe part of a code point; b"" for ids that have no token."""
        return self.pieces.bytes_of(token)

    def token_text(self, token: int) -> str:
        """`token_bytes` as text, with U+FFFD for what is no text on its own."""
        return self.pieces.bytes_of(token).decode("utf-8", "replace")
