"""Grammars for tests: compiled when they are asked for, over a vocabulary of bytes or of pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.tiny import EOS, IM_END, SPECIAL, _byte_symbols
from treadle.core.grammar_state import READY, GrammarStatus
from treadle.core.messages import Constraint
from treadle.grammar.compiler import GrammarCompiler
from treadle.grammar.completions import Ending, ending_of
from treadle.grammar.limits import LIMITS


def byte_tokenizer(size: int, added: tuple[str, ...] = ()) -> LLTokenizer:
    """The vocabulary of `make_tiny`: 256 bytes, its special tokens, and `added` ones."""
    return _tokenizer(_byte_symbols(), size, added)


def piece_tokenizer(pieces: tuple[str, ...], size: int, added: tuple[str, ...] = ()) -> LLTokenizer:
    """The same with `pieces` of ASCII text behind the added tokens."""
    symbols = _byte_symbols()
    return _tokenizer(
        [*symbols, *SPECIAL, *added, *("".join(symbols[ord(c)] for c in one) for one in pieces)], size, added
    )


def merged_tokenizer(pieces: tuple[str, ...], size: int) -> LLTokenizer:
    """The same, and the tokenizer makes these pieces, each of which is one before it and a piece or a byte."""
    symbols = _byte_symbols()
    known = ["".join(symbols[ord(c)] for c in one) for one in pieces]
    merges = []
    for i, piece in enumerate(known):
        parts = {*symbols, *known[:i]}
        merges.append(next((piece[:n], piece[n:]) for n in range(1, len(piece)) if {piece[:n], piece[n:]} <= parts))
    return _tokenizer([*symbols, *SPECIAL, *known], size, (), merges)


def _tokenizer(
    symbols: list[str], size: int, added: tuple[str, ...], merges: Sequence[tuple[str, str]] = ()
) -> LLTokenizer:
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *added)])
    return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=[EOS, IM_END])


class Grammars(GrammarCompiler):
    """Compiler that compiles each grammar when it is first asked for. `made` counts matchers."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        super().__init__(tokenizer)
        self.vocabulary = tokenizer
        self.made = 0
        self._compiled: dict[str, LLMatcher] = {}
        self._endings: dict[str, Ending] = {}

    def state(self, constraint: Constraint) -> GrammarStatus:
        return READY

    def matcher(self, constraint: Constraint) -> LLMatcher:
        self.made += 1
        grammar = constraint.grammar
        if grammar not in self._compiled:
            compiled = LLMatcher(self.vocabulary, grammar, log_level=0, limits=LIMITS)
            assert not compiled.is_error(), compiled.get_error()
            self._compiled[grammar] = compiled
        return self._compiled[grammar].deep_copy()

    def ending(self, constraint: Constraint) -> Ending | None:
        if not constraint.close_at_limit:
            return None
        grammar = constraint.grammar
        if grammar not in self._endings:
            self._endings[grammar] = ending_of(self.vocabulary, grammar, self.matcher(constraint))
        return self._endings[grammar]


def schema(value: dict[str, Any], **fields: Any) -> Constraint:
    """A constraint to JSON of a schema, without whitespace."""
    overrides: Any = {"whitespace_flexible": False}
    return Constraint(
        "json_schema", LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=overrides), **fields
    )


def regex(pattern: str, **fields: Any) -> Constraint:
    return Constraint("regex", LLMatcher.grammar_from_regex(pattern), **fields)


def lark(text: str, **fields: Any) -> Constraint:
    return Constraint("grammar", LLMatcher.grammar_from_lark(text), **fields)
