"""Random walks over grammars: texts that a model could generate under a constraint, with a vocabulary of bytes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

MAX_TOKENS = 3000
LONG = 400
CLOSING = (b"}", b"]", b":", b"1", b'"')
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclass
class ByteVocabulary:
    """Every byte is a token; `special` tokens follow, and one that ends the answer."""

    special: Sequence[str] = ()
    eos_token_id: int = 0
    bos_token_id: int | None = None
    tokens: list[bytes] = field(default_factory=list)
    special_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.tokens += [text.encode() for text in (*self.special, "<|end of answer|>")]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1

    @property
    def ids(self) -> dict[str, int]:
        return {text: 256 + index for index, text in enumerate(self.special)}

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class Walker:
    """Walker over the grammars of one vocabulary."""

    def __init__(self, special: Sequence[str] = ()) -> None:
        self.vocabulary = ByteVocabulary(special)
        self._tokenizer = LLTokenizer(TokenizerWrapper(self.vocabulary))

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar)
        assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
        return matcher

    def walk(self, grammar: str, draw: random.Random) -> list[int]:
        """Return random tokens of a whole answer. Besides single bytes it tries the grammar's literals, or a text
        would hardly ever end."""
        matcher, tokens = self.matcher(grammar), list[int]()
        lines = [line for line in grammar.splitlines() if "%json" not in line]
        texts = [json.loads(literal) for line in lines for literal in _LITERAL.findall(line)]
        jumps = [list(text.encode()) for text in (*texts, '"', "}", "]", '", "', "1,") if text]
        while not matcher.is_stopped() and not (matcher.is_accepting() and draw.random() < 0.3):
            assert len(tokens) < MAX_TOKENS, f"the answer does not end: {self.text(tokens)!r}\n{grammar}"
            step = self._closing(matcher, draw) if len(tokens) > LONG else None
            step = step or self._step(matcher, jumps, draw)
            assert matcher.consume_tokens(step)
            tokens += step
        return [token for token in tokens if token != self.vocabulary.eos_token_id]

    def _closing(self, matcher: LLMatcher, draw: random.Random) -> list[int] | None:
        """Return tokens that go towards the end of nested values, mostly."""
        if draw.random() < 0.8:
            in_string = matcher.validate_tokens([ord("#")]) == 1
            for jump in CLOSING[::-1] if in_string else CLOSING:
                if matcher.validate_tokens(list(jump)) == len(jump):
                    return list(jump)
        return None

    def _step(self, matcher: LLMatcher, jumps: list[list[int]], draw: random.Random) -> list[int]:
        tokens = [[token] for token in self.vocabulary.ids.values()]
        for jump in [*tokens, *draw.sample(jumps, k=min(len(jumps), 6))] if draw.random() < 0.5 else ():
            if matcher.validate_tokens(jump) == len(jump):
                return jump
        mask = allocate_token_bitmask(1, len(self.vocabulary.tokens))
        fill_next_token_bitmask(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        return [int(draw.choice(list(allowed)))]

    def segments(self, tokens: Sequence[int]) -> list[tuple[str, bool]]:
        """Return the answer as segments of text and special tokens."""
        found: list[tuple[str, bool]] = []
        text = bytearray()
        for token in tokens:
            if token < 256:
                text.append(token)
                continue
            found += [(text.decode(), False), (self.vocabulary.tokens[token].decode(), True)]
            text.clear()
        return [*found, (text.decode(), False)]

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(self.vocabulary.tokens[token] for token in tokens).decode("utf-8", "replace")
