"""Completions: short ways to the end of a grammar, for sequences whose last tokens must complete it."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

_CLOSING = (
    *('""', '"]}', '"}]', '"}}', '"]]', '"}', '"]', '"', "[]", "{}", "}]}", "}}}", "]}", "}]", "}}", "]]", "}", "]"),
    *("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "null", "true", "false"),
)
"""Texts that bring JSON nearer to its end, the better ones first."""
_ALTERNATIVES = 8
"""Most tokens that are tried in place of one on the way of the first completion."""
_MASK = 4
"""Work of a mask: it takes as long as about four other tokens, some 100 us where its lexer's states are new."""
WORK_A_STEP = 16 * _MASK
"""Most work of a row's search in one step, 1 to 2 ms."""
STEP_S = 0.004
"""Most CPU time of it, but for the mask at its end: over large vocabularies a mask of any text takes up to 10 ms."""
_MOST_WORK = 2048 * _MASK
"""Most work of a search. It is enough for a thousand tokens."""
_SHORTENING = 256 * _MASK
"""Most work for shorter completions: about 20 ms. Eight times as much makes them 2 % shorter."""
_SKIPPED = 64
"""Most tokens of a known completion that another token may take the place of."""
_MOST_VISITS = 64
"""Most times that the first way comes to the same mask, or takes a token without one: beyond, it goes in circles."""
_MOST_ENDS = 8
"""Most texts of each kind that a search tries as a whole: those behind repetitions, ends of texts and of patterns."""
_MOST_S = 1.0
"""Most seconds of a thread's CPU time for a first completion. Each way to search it has half of what is left."""
_SHORTENING_S = 0.1
"""Most of them for shorter ones."""
_BITS = 32
"""Tokens of one word of a bitmask."""

_Words = npt.NDArray[np.int32]
_Tokens = tuple[int, ...]
_Option = tuple[_Tokens, LLMatcher, _Words | None]
"""Tokens, the matcher behind them, and that matcher's bitmask where it was computed."""
_Steps = Generator[None, None, list[int] | None]
"""Part of a search: it yields after each mask, and returns a completion; None where there is none."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Facts for completions of a grammar: what a search tries first, texts behind repetitions, ends of texts and single
    tokens; the shortest completion found from the grammar's beginning (None: none was found); and `growth`."""

    candidates: tuple[_Tokens, ...]
    first: _Tokens | None
    growth: int


def ending_of(tokenizer: LLTokenizer, grammar: str, beginning: LLMatcher) -> Ending:
    """Return the ending of `grammar`. It takes tens of milliseconds, about a second at most. `beginning` is a matcher
    at its beginning."""
    text = _written(grammar)
    known = [*_texts_behind(tokenizer, text), *_special_tokens(tokenizer, text), *_ends(tokenizer, text)]
    candidates = tuple(dict.fromkeys([*known, *_usual_tokens(tokenizer)]))
    return Ending(candidates, shortest(tokenizer, candidates, beginning), growth(tokenizer, grammar))


def shortest(tokenizer: LLTokenizer, candidates: Sequence[_Tokens], beginning: LLMatcher) -> _Tokens | None:
    """Return the shortest completion found by searches for any, and then for shorter ones with another candidate in one
    place; None where none is found."""
    found, last = None, time.thread_time() + _MOST_S
    for detour, patient in ((False, False), (True, False), (False, True)):
        search = Search(tokenizer.vocab_size, candidates, beginning, _MOST_WORK, detour=detour, patient=patient)
        now = time.thread_time()
        if (found := _whole(search, now + (last - now) / 2)) is not None:
            break
    work, end = _SHORTENING, time.thread_time() + _SHORTENING_S
    while found:
        search = Search(tokenizer.vocab_size, candidates, beginning, len(found) - 1, detour=True, work=work)
        if (shorter := _whole(search, end)) is None:
            break
        found, work = shorter, search.work
    return None if found is None else tuple(found)


def _whole(search: Search, end: float) -> list[int] | None:
    """Return the completion that a search finds before this thread has had `end` seconds of CPU time. Other threads get
    the GIL between its pieces: they would wait for Python's switch interval otherwise, 5 ms."""
    found = None
    while not search.over and time.thread_time() < end:
        found = search.run(1)
        time.sleep(0)
    return found


def completes(matcher: LLMatcher, tokens: list[int]) -> bool:
    """Whether `tokens` complete the grammar."""
    copy = matcher.deep_copy()
    return copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()


class Search:
    """Search for up to `most` tokens that complete a grammar from the state of `matcher`, which is copied.

    At each place it takes the first candidate after which the grammar goes on differently, until `known` tokens, or the
    last ones of them, complete it. Where that goes round in circles, it takes another candidate at each visit of their
    masks; if `patient`, at some after the 64th one. With `detour` it takes another candidate in one place. It does
    `work` at most. `way` are the tokens taken so far, `over` is true at the end.
    """

    def __init__(
        self,
        vocabulary: int,
        candidates: Sequence[_Tokens],
        matcher: LLMatcher,
        most: int,
        known: Sequence[int] = (),
        *,
        detour: bool = False,
        patient: bool = False,
        work: int = _MOST_WORK,
    ) -> None:
        self.work = work
        self.way: list[int] = []
        self.over = False
        self._found: list[int] | None = None
        self._vocabulary = vocabulary
        self._candidates = candidates
        self._better: dict[int, _Tokens] = {}  # by hashes of masks: the first option after which the mask was another
        self._patient = patient
        self._circles: set[int | _Tokens] = set()  # hashes of masks that the first way came to again and again
        self._known: dict[int, list[list[int]]] = {}  # by their first tokens
        for skipped in range(min(len(known), _SKIPPED)):
            self._known.setdefault(known[skipped], []).append(list(known[skipped:]))
        matcher = matcher.deep_copy()
        self._steps = self._detour(matcher, most) if detour else self._walk(matcher, most)

    def run(self, work: int, seconds: float = math.inf) -> list[int] | None:
        """Do about so much `work`, or less where that takes `seconds` of the thread's CPU time: a mask more at most.
        Return the completion; None where there is none, or none yet (not `over`)."""
        end, last = max(0, self.work - work), time.thread_time() + seconds
        try:
            while self.work > end and not self.over and time.thread_time() < last:
                next(self._steps)
        except StopIteration as stopped:
            self.over, self._found = True, stopped.value
        self.over = self.over or self.work <= 0
        return self._found

    def _detour(self, matcher: LLMatcher, most: int) -> _Steps:
        way: list[int] = []
        words: _Words | None = None
        while len(way) < most and not matcher.is_accepting():
            if forced := _forced(matcher):
                way, words = way + forced, None
                continue
            if words is None:
                words = yield from self._mask(matcher)
            options = yield from self._options(matcher, words, _ALTERNATIVES)
            for tokens, after, _ in options[1:]:
                if (rest := (yield from self._walk(after, most - len(way) - len(tokens)))) is not None:
                    return [*way, *tokens, *rest]
            if not options:
                return None
            tokens, matcher, words = options[0]
            way = [*way, *tokens]
        return None

    def _walk(self, matcher: LLMatcher, most: int) -> _Steps:
        """Return the first way, or where that goes round in circles the one out of them."""
        self._circles = set()
        way = yield from self._way(matcher.deep_copy(), most)
        return (yield from self._way(matcher, most)) if way is None and self._circles else way

    def _way(self, matcher: LLMatcher, most: int) -> _Steps:
        turns = bool(self._circles)
        way = self.way = list[int]()
        visits: Counter[int | _Tokens] = Counter()
        words: _Words | None = None
        while not matcher.is_accepting():
            if len(way) >= most:
                self._circles = {key for key in visits if visits[key] > 1}
                return None
            if forced := _forced(matcher):
                way += forced
                words = None
                if option := self._continued(matcher, forced[-1]):
                    tokens, matcher = option
                    way += tokens
                    self.work -= 1
                    yield
                continue
            if (rest := self._joined(matcher, most - len(way))) is not None:
                return way + rest
            if words is None and not turns and (option := self._obvious(matcher)):
                tokens, after = option
                visits[tokens] += 1
                if visits[tokens] < _MOST_VISITS:
                    way += tokens
                    matcher = after
                    yield
                    continue
            if words is None:
                words = yield from self._mask(matcher)
            before = visits[key := hash(words.tobytes())]
            visits[key] += 1
            skipped = before if key in self._circles else 0
            if before >= _MOST_VISITS and not turns:
                if not self._patient:
                    self._circles = {key for key in visits if visits[key] > _MOST_VISITS // 2}
                    return None
                skipped = 0 if before % _ALTERNATIVES else before // _ALTERNATIVES
            if not (options := (yield from self._options(matcher, words, skipped + 1))):
                return None
            tokens, matcher, words = options[skipped % len(options)]
            way += tokens
        return way if len(way) <= most else None

    def _joined(self, matcher: LLMatcher, most: int) -> list[int] | None:
        """Return up to `most` of the known tokens that complete the grammar."""
        for first, rests in self._known.items():
            if matcher.validate_tokens([first]):
                for rest in rests:
                    if len(rest) <= most and completes(matcher, rest):
                        return rest
        return None

    def _continued(self, matcher: LLMatcher, first: int) -> tuple[_Tokens, LLMatcher] | None:
        """Return the rest of a candidate that may come behind its `first` token, and the matcher behind that."""
        for tokens in self._candidates:
            if len(tokens) > 1 and tokens[0] == first and (after := _behind(matcher, tokens[1:])):
                return tokens[1:], after
        return None

    def _obvious(self, matcher: LLMatcher) -> tuple[_Tokens, LLMatcher] | None:
        """Return an end of a text, or the first other candidate that may come, and the matcher behind it, where that
        needs no mask: because the grammar is complete then, or a certain token must follow."""
        self.work -= 1
        for tokens in self._candidates:
            if (after := _behind(matcher, tokens)) is not None:
                if after.is_accepting() or after.compute_ff_tokens():
                    return tokens, after
                break
        return None

    def _mask(self, matcher: LLMatcher) -> Generator[None, None, _Words]:
        self.work -= _MASK
        words: _Words = allocate_token_bitmask(1, self._vocabulary)
        fill_next_token_bitmask(matcher, words)
        yield
        first: _Words = words[0]
        return first

    def _options(self, matcher: LLMatcher, words: _Words, count: int) -> Generator[None, None, list[_Option]]:
        """Return up to `count` tokens that `words` allow, the bitmask of `matcher`: first those that lead to another
        state, as far as masks show it."""
        key, found, others = hash(words.tobytes()), list[_Option](), list[_Option]()
        better = self._better.get(key)
        for tokens in self._tokens(words, better):
            if len(found) == count:
                break
            if (after := _behind(matcher, tokens)) is None:
                continue
            if tokens == better or after.is_accepting() or after.compute_ff_tokens():
                found.append((tokens, after, None))
                continue
            next_words = yield from self._mask(after)
            differs = not np.array_equal(next_words, words)
            (found if differs else others).append((tokens, after, next_words))
        options = [*found, *others][:count]
        if options and better is None:
            self._better[key] = options[0][0]
        return options

    def _tokens(self, words: _Words, better: _Tokens | None) -> Iterator[_Tokens]:
        """Yield `better`, the candidates whose first tokens a bitmask allows, then the first tokens that it allows."""
        if better is not None:
            yield better
        yield from (tokens for tokens in self._candidates if tokens != better and _allows(words, tokens[0]))
        first = np.flatnonzero(words)[:_ALTERNATIVES]
        bits = np.unpackbits(words[first].view(np.uint8).reshape(len(first), -1), axis=1, bitorder="little")
        yield from ((int(first[i]) * _BITS + int(bit),) for i, bit in np.argwhere(bits)[:_ALTERNATIVES])


def _behind(matcher: LLMatcher, tokens: _Tokens) -> LLMatcher | None:
    """Return a matcher behind tokens; None where they may not come."""
    some = list(tokens)
    if matcher.validate_tokens(some) < len(some):
        return None
    after = matcher.deep_copy()
    return after if after.consume_tokens(some) else None


def _allows(words: _Words, token: int) -> bool:
    return bool(words[token // _BITS] >> token % _BITS & 1)


def _forced(matcher: LLMatcher) -> list[int]:
    """Take the tokens that must come next. Return them."""
    forced = matcher.compute_ff_tokens()
    return forced[: matcher.try_consume_tokens(forced)] if forced else []


def _written(grammar: str) -> str:
    """Return the Lark texts and the JSON schemas of a grammar, which may be a list of them in JSON."""
    if not grammar.startswith("{"):
        return grammar
    parts = json.loads(grammar)["grammars"]
    return "\n".join(part.get("lark_grammar") or json.dumps(part, ensure_ascii=False) for part in parts)


def _texts_behind(tokenizer: LLTokenizer, text: str) -> list[_Tokens]:
    """Return the tokens of the first fixed texts behind repetitions, such as the header of a message behind others. The
    walk goes round in circles where another token begins the next repetition."""
    runs = (_FIXED.findall(run) for run in _BEHIND_REPETITION.findall(text))
    return _first_of(chain.from_iterable(_tokens_of(tokenizer, part) for part in run) for run in runs)


def _special_tokens(tokenizer: LLTokenizer, text: str) -> list[_Tokens]:
    """Return the special tokens that a grammar may name: `<name>` or `<[id]>`."""
    named = (_tokens_of(tokenizer, name) for name in dict.fromkeys(_NAMES.findall(text)))
    return [tokens for tokens in named if len(tokens) == 1]


def _tokens_of(tokenizer: LLTokenizer, part: str) -> _Tokens:
    """Return the tokens of a literal or a special token of Lark; none of what is neither."""
    if part.startswith('"'):
        with suppress(ValueError):  # of escapes that JSON lacks
            return tuple(tokenizer.greedy_tokenize(json.loads(part)))
        return ()
    if number := _ID.fullmatch(part):
        return (int(number[1]),) if int(number[1]) < tokenizer.vocab_size else ()
    return tuple(tokenizer.tokenize_str(part, parse_special=True))


def _ends(tokenizer: LLTokenizer, text: str) -> list[_Tokens]:
    """Return the tokens of the first literals that end a text: in Lark they stand behind a terminal or a regular
    expression, or are its rule's `stop` or `suffix`; in a pattern they stand behind a repetition. Inside of a text the
    tokens of its end change no mask but the last one."""
    literals = dict.fromkeys(chain.from_iterable(_ENDS.findall(text)))
    patterns = dict.fromkeys(_pattern_ends(text))
    ends = _first_of(_tokens_of(tokenizer, literal) for literal in literals if literal)
    return [*ends, *_first_of(tokenizer.greedy_tokenize(end) for end in patterns if len(end) > 1)]


def _pattern_ends(text: str) -> Iterator[str]:
    """Yield the fixed texts behind repetitions in the regular expressions of a Lark text or a JSON schema."""
    for quoted, plain in _PATTERNS.findall(text):
        for end in _PATTERN_ENDS.findall(json.loads(quoted) if quoted else plain):
            fixed = _ESCAPED.sub(lambda escape: _CONTROLS.get(escape[1], escape[1]), end)
            yield json.dumps(fixed, ensure_ascii=False)[1:-1] if quoted else fixed


def _first_of(texts: Iterable[Iterable[int]]) -> list[_Tokens]:
    """Return the first `_MOST_ENDS` that have tokens."""
    return list(islice(filter(None, map(tuple, texts)), _MOST_ENDS))


@lru_cache(maxsize=1)
def _usual_tokens(tokenizer: LLTokenizer) -> tuple[_Tokens, ...]:
    """Return the tokens of texts that often end something."""
    texts = (*_CLOSING, *map(chr, range(0x21, 0x7F)), " ", "\n")
    return tuple((tokens[0],) for text in texts if len(tokens := tokenizer.greedy_tokenize(text)) == 1)


def growth(tokenizer: LLTokenizer, grammar: str) -> int:
    """Return an estimate of how many tokens one token can add to a grammar's completion; of more than `_MOST_GROWTH`
    any number above. It is twice the tokens of the grammar, whose text has all that can be required except the texts of
    formats, times the least numbers of repetitions."""
    if len(grammar) > 4 * _MOST_GROWTH:
        return _MOST_GROWTH + 1
    found = 2 * len(tokenizer.tokenize_str(grammar)) + _FORMAT_TOKENS * grammar.count("format")
    for number in _REPETITIONS.findall(grammar):
        found *= max(1, int(number))
        if found > _MOST_GROWTH:
            break
    return found


_MOST_GROWTH = 1 << 20
_REPETITIONS = re.compile(r'(?:min(?:Items|Length|Properties)\\*"\s*:|[{~])\s*([0-9]{1,9})')
_LITERAL = r'"(?:\\.|[^"\\\n])*"'
_ENDS = re.compile(rf"(?:\b[A-Z][A-Z0-9_]*|/)[ \t]+({_LITERAL})|\b(?:stop|suffix)[ \t]*=[ \t]*({_LITERAL})")
_NAMES = re.compile(r"<[^<>\s]+>")
_ID = re.compile(r"<\[([0-9]{1,7})\]>")
_FIXED = re.compile(rf"{_LITERAL}|{_NAMES.pattern}")
_BEHIND_REPETITION = re.compile(rf"[)\w][*+][ \t][( \t]*((?:(?:{_FIXED.pattern})[ \t]*)+)")
_PATTERNS = re.compile(rf'(?://|#)[^\n]*|"pattern"\s*:\s*({_LITERAL})|{_LITERAL}|/((?:\\.|[^/\\\n])+)/')
_PATTERN_ENDS = re.compile(r"[*+}]\??\)*((?:\\[^a-zA-Z0-9]|\\[nrt]|[^\\.^$*+?()\[\]{}|\n])+)(?![*+?{])")
_ESCAPED = re.compile(r"\\(.)")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_FORMAT_TOKENS = 40
"""Most tokens of a text of one of JSON Schema's formats: a UUID has 36 characters."""
