"""Completions: short ways to the end of a grammar, for sequences whose last tokens must complete it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from .bitmask import BITS, Words

_CLOSING = (
    *('"]}', '"}]', '"}}', '"]]', '""', '"}', '"]', '"', "[]", "{}", "}]}", "}}}", "]}", "}]", "}}", "]]", "}", "]"),
    *("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "null", "true", "false"),
)
"""Texts that bring JSON nearer to its end, the better ones first."""
_ALTERNATIVES = 8
"""Most tokens that are tried in place of one on the way of the first completion."""


_MOST_MASKS = 2048
"""Most masks that a search computes, some 20 us each. It is enough for a thousand tokens."""
_SKIPPED = 64
"""Most tokens of a known completion that another token may take the place of."""
_MOST_VISITS = 64
"""Most times that the first way comes to the same mask: beyond, it goes round in circles."""


class Completions:
    """Completions of one grammar. One thread uses it."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        self._words = allocate_token_bitmask(1, tokenizer.vocab_size)
        self._next_words = allocate_token_bitmask(1, tokenizer.vocab_size)
        self._candidates = tuple(dict.fromkeys((*_special_tokens(tokenizer, grammar), *_usual_tokens(tokenizer))))
        self._masks_left = 0
        self._known: list[list[int]] = []

    def completes(self, matcher: LLMatcher, tokens: list[int]) -> bool:
        """Whether `tokens` complete the grammar."""
        copy = matcher.deep_copy()
        return copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()

    def greedy(self, matcher: LLMatcher, most: int, known: Sequence[int] = ()) -> list[int] | None:
        """Return up to `most` tokens that complete the grammar: at each place the first candidate after which it goes
        on differently, until `known` tokens, or the last ones of them, complete it. None where none are found."""
        self._masks_left = _MOST_MASKS
        self._known = [list(known[skipped:]) for skipped in range(min(len(known), _SKIPPED))]
        return self._walk(matcher, most)

    def short(self, matcher: LLMatcher, most: int) -> list[int] | None:
        """Return the same, if necessary with another token in one place."""
        found = self.greedy(matcher, most)
        return self._detour(matcher.deep_copy(), most) if found is None else found

    def _detour(self, matcher: LLMatcher, most: int) -> list[int] | None:
        way: list[int] = []
        while len(way) < most:
            self._mask(matcher)
            for token, after in islice(self._steps(matcher), 1, _ALTERNATIVES):
                if (rest := self._walk(after, most - len(way) - 1)) is not None:
                    return [*way, token, *rest]
            if not (tokens := self._forced(matcher)):
                self._mask(matcher)
                tokens = self._choose(matcher, 0)
            if not tokens:
                return None
            way += tokens
        return None

    def _walk(self, matcher: LLMatcher, most: int) -> list[int] | None:
        """Return the first way. Where it goes round in circles, take another candidate at each visit of a mask."""
        return self._way(matcher.deep_copy(), most, turns=False) or self._way(matcher.deep_copy(), most, turns=True)

    def _way(self, matcher: LLMatcher, most: int, *, turns: bool) -> list[int] | None:
        way: list[int] = []
        visits: Counter[bytes] = Counter()
        while not matcher.is_accepting():
            if len(way) >= most:
                return None
            if forced := self._forced(matcher):
                way += forced
                continue
            before = visits[mask := self._mask(matcher)]
            visits[mask] += 1
            if (rest := self._joined(matcher, most - len(way))) is not None:
                return way + rest
            if not (turns or before < _MOST_VISITS) or not (token := self._choose(matcher, before if turns else 0)):
                return None
            way += token
        return way if len(way) <= most else None

    def _joined(self, matcher: LLMatcher, most: int) -> list[int] | None:
        """Return up to `most` of the known tokens that complete the grammar."""
        for rest in self._known:
            allowed = self._words[0, rest[0] // BITS] >> rest[0] % BITS & 1
            if allowed and len(rest) <= most and self.completes(matcher, rest):
                return rest
        return None

    def _mask(self, matcher: LLMatcher) -> bytes:
        self._masks_left -= 1
        fill_next_token_bitmask(matcher, self._words)
        return self._words.tobytes()

    def _forced(self, matcher: LLMatcher) -> list[int]:
        """Take the tokens that must come next. Return them."""
        forced = matcher.compute_ff_tokens()
        return forced[: matcher.try_consume_tokens(forced)] if forced else []

    def _choose(self, matcher: LLMatcher, skipped: int) -> list[int]:
        """Take the best candidate of the last mask behind `skipped` ones. Return it; nothing at a dead end."""
        steps = [token for token, _ in islice(self._steps(matcher), skipped + 1)]
        tokens = steps[skipped % len(steps) :][:1] if steps else []
        return tokens if matcher.consume_tokens(tokens) else []

    def _steps(self, matcher: LLMatcher) -> Iterator[tuple[int, LLMatcher]]:
        """Yield tokens of the last mask, which is that of `matcher`, with the matchers behind them: first those that
        lead to another state, as far as masks show it."""
        words, others = self._words[0].copy(), []
        for token in self._tokens(words):
            if self._masks_left <= 0:
                return
            after = matcher.deep_copy()
            if not after.consume_token(token):
                continue
            if after.is_accepting() or self._differs(after, words):
                yield token, after
            else:
                others.append((token, after))
        yield from others

    def _differs(self, matcher: LLMatcher, words: Words) -> bool:
        self._masks_left -= 1
        fill_next_token_bitmask(matcher, self._next_words)
        return not np.array_equal(self._next_words[0], words)

    def _tokens(self, words: Words) -> Iterator[int]:
        """Yield the candidates that a bitmask allows, then the first tokens that it allows."""
        yield from (token for token in self._candidates if words[token // BITS] >> token % BITS & 1)
        first = np.flatnonzero(words)[:_ALTERNATIVES]
        bits = np.unpackbits(words[first].view(np.uint8).reshape(len(first), -1), axis=1, bitorder="little")
        yield from (int(first[i]) * BITS + int(bit) for i, bit in np.argwhere(bits)[:_ALTERNATIVES])


def _special_tokens(tokenizer: LLTokenizer, grammar: str) -> list[int]:
    """Return the special tokens that a grammar may name: `<name>` or `<[id]>`."""
    found = []
    for name in dict.fromkeys(re.findall(r"<[^<>\s]+>", grammar)):
        tokens = tokenizer.tokenize_str(name, parse_special=True)
        if number := re.fullmatch(r"<\[([0-9]{1,7})\]>", name):
            found.append(int(number[1]))
        elif len(tokens) == 1:
            found.append(tokens[0])
    return [token for token in found if token < tokenizer.vocab_size]


@lru_cache(maxsize=1)
def _usual_tokens(tokenizer: LLTokenizer) -> tuple[int, ...]:
    """Return the tokens of texts that often end something."""
    texts = (*_CLOSING, *map(chr, range(0x20, 0x7F)), "\n")
    return tuple(tokens[0] for text in texts if len(tokens := tokenizer.greedy_tokenize(text)) == 1)


def growth(tokenizer: LLTokenizer, grammar: str, most: int) -> int:
    """Return an estimate of how many tokens one token can add to a grammar's completion; of more than `most` any number
    above. It is twice the tokens of the grammar, whose text has all that can be required except the texts of formats,
    times the least numbers of repetitions."""
    if len(grammar) > 4 * most:
        return most + 1
    found = 2 * len(tokenizer.tokenize_str(grammar)) + _FORMAT_TOKENS * grammar.count("format")
    for number in _REPETITIONS.findall(grammar):
        found *= max(1, int(number))
        if found > most:
            break
    return found


_REPETITIONS = re.compile(r'(?:min(?:Items|Length|Properties)\\*"\s*:|[{~])\s*([0-9]{1,9})')
_FORMAT_TOKENS = 40
"""Most tokens of a text of one of JSON Schema's formats: a UUID has 36 characters."""


class Closing:
    """Keeps room for a completion of one row's grammar, so that it ends within `max_tokens`.

    The invariant: behind every token that is taken, a completion fits into what is left. A token after which none is
    found is replaced by the first one of the completion that was found before. While so much is left that no token can
    break the invariant, nothing is looked for.
    """

    def __init__(self, completions: Completions, growth: int) -> None:
        self._completions = completions
        self._growth = growth
        self._shortest: int | None = None  # from the beginning; 0 where none fits
        self.restart()

    def restart(self) -> None:
        """Begin at the beginning of the grammar."""
        self._known: list[int] | None = None
        self._exact = False  # `_known` completes the present state, not only an earlier one
        self._bound = self._growth
        self._off = False

    def fits_behind(self, beginning: LLMatcher, left: int, tokens: int) -> bool:
        """Whether the grammar, from its beginning, can be completed behind `tokens` more tokens with `left` left now;
        also where that would not fit even without them."""
        if left - tokens >= self._growth:
            return True
        if self._shortest is None:
            found = self._completions.short(beginning, left)
            self._shortest = 0 if found is None else len(found)
        return not left - tokens < self._shortest <= left

    def forced(self, left: int) -> int | None:
        """Return the only token that may come where `left` tokens are left; None where there are others."""
        if self._off or not self._exact or not self._known or len(self._known) < left:
            return None
        return self._known[0]

    def settle(self, matcher: LLMatcher, token: int, left: int) -> int | None:
        """Return the token to take in place of `token`, with `left` left before it: the same if a completion fits
        behind it. None where the grammar is complete and a stop token must come."""
        if self._off:
            return token
        if self._bound + self._growth < left:
            self._bound, self._exact = self._bound + self._growth, False
            return token
        after = matcher.deep_copy()
        if not after.consume_token(token):
            return token
        rest = self._rest(after, token, left - 1)
        if rest is not None:
            self._keep(rest)
            return token
        return self._instead(matcher, token, left)

    def _instead(self, matcher: LLMatcher, token: int, left: int) -> int | None:
        known = self._known if self._exact else self._completions.short(matcher, left)
        if known is None or len(known) > left:
            self._off = True  # nothing fits: the sequence ends by its length
            return token
        self._keep(known[1:])
        return known[0] if known else None

    def _keep(self, completion: list[int]) -> None:
        self._known, self._exact, self._bound = completion, True, len(completion)

    def _rest(self, after: LLMatcher, token: int, most: int) -> list[int] | None:
        """Return up to `most` tokens that complete the grammar from `after`; where possible, what is known already."""
        known = self._known or []
        if self._exact and known[:1] == [token]:
            return known[1:]
        for rest in (known[2:], known[1:], known):
            if self._known is not None and len(rest) <= most and self._completions.completes(after, rest):
                return rest
        return self._completions.greedy(after, most, known)
