"""Text settings and token bytes of a model, without its tokenizer: enough to check requests and write answers.

The server's process holds only this. Tokenizer and chat template stay in the text processes (`work/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .answer_formats import AnswerFormats
from .detokenizer import Detokenizer
from .images import AnySettings
from .token_decoder import TokenDecoder

NO_CHATS_CURE = "use /v1/completions, or start the server with --chat-template FILE"
"""End of the refusal of a chat that the model's template, or its absence, makes impossible."""


@dataclass(frozen=True, eq=False)
class TextView:
    """A model's text settings and token bytes. Immutable, safe on any thread.

    `vocabulary`: the model's size, which may exceed the tokenizer's. `context`: in tokens. `bytes_per_token`: measured
    on a small mixed sample, for estimates only. `longest_token`: in bytes. `default_sampling`: valid values of
    generation_config.json. `stop_strings`: strings that end an answer in a chat. `special_ids`: hidden in answers.
    `named_ids`: ids of special tokens by text. `no_chats`: the reason for which chats are refused, "" if they are not.
    `prefix`: ids that the tokenizer puts before a text. `formats`: of tool calls and reasoning. `images`: how the model
    sees images; None for `no_images`, the reason.
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
    no_chats: str
    token_decoder: TokenDecoder = field(repr=False)
    prefix: tuple[int, ...]
    formats: AnswerFormats
    images: AnySettings | None
    no_images: str

    def stop_tokens(self, stops: Sequence[str]) -> tuple[int, ...]:
        """Return ids of stop strings that are special tokens. They are hidden in text, so they must match as tokens."""
        found = (self.named_ids.get(stop) for stop in stops)
        return tuple(dict.fromkeys(i for i in found if i is not None and i in self.special_ids))

    def special_id(self, name: str) -> int | None:
        """Return the id of a named special token (`bos_token`, `pad_token`, ...); None if it is not given."""
        content = self.special_tokens.get(name)
        return None if content is None else self.named_ids.get(content)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode a whole sequence. Equal to the joined output of a `Detokenizer`."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes, possibly part of a code point; b"" for an id without a token."""
        return self.token_decoder.bytes_of(token)

    def token_text(self, token: int) -> str:
        """Return `token_bytes` as text, with U+FFFD for incomplete code points."""
        return self.token_decoder.bytes_of(token).decode("utf-8", "replace")
