"""Random texts of a grammar, drawn byte by byte from its masks."""

from __future__ import annotations

import random

from llguidance import LLMatcher, LLTokenizer

BYTES = LLTokenizer("byte", slices=[])
END = BYTES.eos_token
_STRING = 64
"""More bytes than these may follow within a string alone."""
_CALM_AFTER = 150
"""Bytes after which a walk takes the way that closes what is open, where there is one."""


class Astray(AssertionError):
    """A walk that came to a state without a way on, or did not end."""


def matcher_of(grammar: str) -> LLMatcher:
    """Return a matcher over bytes. Raises Astray for a grammar that can't be compiled."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    if matcher.is_error():
        raise Astray(matcher.get_error())
    return matcher


def accepts(grammar: str, text: str) -> bool:
    """Whether `text` is a whole text of the grammar."""
    matcher = matcher_of(grammar)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def random_text(grammar: str, seed: int, *, longest: int = 4000) -> str:
    """Return a random text of the grammar. Raises Astray where the walk finds no end within `longest` bytes."""
    draws, matcher, text = random.Random(seed), matcher_of(grammar), bytearray()
    for _ in range(longest):
        allowed = _allowed(matcher)
        if not allowed:
            raise Astray(f"no way on after {bytes(text)!r}: {matcher.get_error()}")
        token = _draw(draws, allowed, calm=len(text) > _CALM_AFTER)
        if token == END:
            return text.decode()
        text.append(token)
        matcher.consume_token(token)
    raise Astray(f"no end after {bytes(text[-200:])!r}")


def _allowed(matcher: LLMatcher) -> list[int]:
    if matcher.is_stopped():
        return [] if matcher.is_error() else [END]
    mask = matcher.compute_bitmask()
    return [index for index in range(BYTES.vocab_size) if mask[index >> 3] >> (index & 7) & 1]


def _draw(draws: random.Random, allowed: list[int], *, calm: bool) -> int:
    if END in allowed and (calm or draws.random() < 0.5):
        return END
    if calm and (plain := [token for token in b"abcde0.:@" if token in allowed]) and 34 not in allowed:
        return draws.choice(plain)
    closing = b'"' if len(allowed) > _STRING else b"}]"  # within a string, brackets are text
    closers = [token for token in closing if token in allowed]
    if closers and draws.random() < (0.9 if calm else 0.2):
        return draws.choice(closers)
    return draws.choice([token for token in allowed if token != END] or allowed)
