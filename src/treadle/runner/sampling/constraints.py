"""Constraint of one row: the tokens that its reasoning and its grammar allow next.

It advances on settled tokens only: a token that is drawn again, or that the scheduler drops, never reaches it. While it
allows every token, `limit` is None: the row is drawn at once, and again where the token before turns out to begin the
grammar.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice, takewhile

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ...core.messages import Submit
from ...grammar.compiler import GrammarCompiler
from ...grammar.completions import Ending
from .closing import Closing
from .reasoning import Reasoning, ReasoningPhase
from .row_grammar import RowGrammar

MOST_FORCED = 1024
"""Most forced tokens of a row in one step: to follow them takes 2 ms."""
_SHORT_GRAMMAR = 8192
"""Characters of a grammar whose bitmasks never take long: one before a required text of so many takes 0.6 ms, as
llguidance cuts all of it into tokens each time."""


class GrammarGone(Exception):
    """The compiled grammar of a request is not there any more."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Tokens that may come next: those of `matcher` (None: no others) without `excluded`, and `added` ones."""

    matcher: LLMatcher | None
    added: tuple[int, ...] = ()
    excluded: tuple[int, ...] = ()


class RowConstraint:
    """State of a row's constraint and reasoning after the tokens of `history`.

    `beginning` is a matcher at the beginning of the request's grammar, None without one; `ending` is that grammar's,
    given with `close_at_limit`, and `gave_up` is called where no completion is found. `limit` is None while every token
    may come next, but stop tokens in `held`: a grammar comes after the reasoning. With `only_stops` nothing but stop
    tokens may come. `ended` is true where the last token ended the sequence, and `over` where nothing is limited any
    more. `failure` says why the row can't go on. Raises ValueError for a `history` that breaks the grammar.
    """

    def __init__(
        self,
        request: Submit,
        history: Sequence[int],
        vocabulary: int,
        beginning: LLMatcher | None = None,
        tokenizer: LLTokenizer | None = None,
        ending: Ending | None = None,
        gave_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._stops = tuple(token for token in request.stop_token_ids if 0 <= token < vocabulary)
        reasoning = None if request.thinking is None else Reasoning(request.thinking)
        self._reasoning = None if reasoning is None or reasoning.phase is ReasoningPhase.OVER else reasoning
        self._grammar: RowGrammar | None = None
        self._closing: Closing | None = None
        self._foreign: tuple[int, ...] = ()
        if request.constraint is not None:
            assert beginning is not None
            assert tokenizer is not None
            self._grammar = RowGrammar(request.constraint, beginning, tokenizer, frozenset(self._stops))
            self._foreign = tuple(set(tokenizer.eos_tokens) - set(self._stops))
            if ending is not None:
                self._closing = Closing(ending, tokenizer.vocab_size, gave_up)
        self._required = deque[int]()  # the next tokens, where the grammar leaves no choice about them
        self._only_next: Limit | None = None  # the limit to the first one of them
        self._has_long_texts = request.constraint is not None and len(request.constraint.grammar) > _SHORT_GRAMMAR
        self._left = request.max_tokens
        self._free_from = request.max_tokens - request.min_tokens  # tokens left from which stop tokens may come
        self._failure = ""
        self.ended = False
        self.over = False
        self.only_stops = False
        self.held: tuple[int, ...] = ()
        self.limit: Limit | None = None
        self._update()
        for token in history:
            self._remember(token)
        if self.failure:
            raise ValueError(self.failure)

    @property
    def failure(self) -> str:
        return self._failure or ("" if self._grammar is None or self._reasoning is not None else self._grammar.failure)

    def fork(self) -> RowConstraint:
        """Return a constraint that goes on from here by itself, along tokens that may not be taken. It may not be
        `searching`."""
        made = copy(self)
        made._reasoning = copy(self._reasoning)
        made._grammar = None if self._grammar is None else self._grammar.fork()
        made._closing = None if self._closing is None else self._closing.fork()
        made._required = self._required.copy()
        if self.limit is not None and self.limit.matcher is not None and made._grammar is not None:
            made.limit = replace(self.limit, matcher=made._grammar.matcher)
        return made

    def allows(self, token: int) -> bool:
        """Whether `token` may come next."""
        limit = self.limit
        if limit is None:
            return token not in self.held
        if token in limit.added:
            return True
        if token in limit.excluded or limit.matcher is None:
            return False
        return bool(limit.matcher.validate_tokens([token]))

    def settle(self, token: int) -> int:
        """Return the token to take in place of a drawn one: another one where a special token stands for text, or where
        a completion would not fit any more."""
        grammar = self._grammar
        if grammar is None or self._reasons(token):
            return token
        token = grammar.corrected(token)
        if self._closing is None or grammar.matcher is None:
            return token
        if token in self._stops and grammar.accepting:
            return token
        settled = self._closing.settle(grammar.matcher, token, self._left)
        return settled if settled is not None else self._stops[0] if self._stops else token

    def accept(self, token: int) -> None:
        """Take over a settled token."""
        if self.over:
            return
        self._left -= 1
        if self._required and self._required.popleft() != token:
            self._required.clear()
        if self._reasoning is None:
            self._follow(token)
        else:
            self._reason(self._reasoning, token)
        if self._grammar is not None:
            self.ended = self._grammar.ended or (self._left <= 0 and self._complete(self._grammar))
        self._update()

    def forced(self) -> list[int]:
        """Return the next tokens that the grammar leaves no choice about: its only bytes, as the tokenizer cuts them,
        without those at the end that may be cut otherwise. They end before a stop token, with `max_tokens`, and after
        `MOST_FORCED`: of a longer text the next ones follow a token that is drawn."""
        limit = self.limit
        if limit is None or self.searching or (limit.added and limit is not self._only_next):
            return []
        if not self._required:
            self._require(limit)
        return list(islice(self._required, min(MOST_FORCED, self._left)))

    def _require(self, limit: Limit) -> None:
        """Find the tokens that the grammar leaves no choice about."""
        if limit.matcher is not None:
            ends = {*self._stops, *limit.excluded}
            self._required = deque(takewhile(lambda token: token not in ends, limit.matcher.compute_ff_tokens()))

    @property
    def searching(self) -> bool:
        """Whether a search for a completion goes on with each token that is settled: one a step."""
        return self._closing is not None and self._closing.searching

    def unsettle(self) -> None:
        """Forget the last token that was settled: it is not taken."""
        if self._closing is not None:
            self._closing.unsettle()

    def _remember(self, token: int) -> None:
        """Take over a token of the history."""
        if self.settle(token) != token and self._closing is not None:
            self._closing.restart(at_beginning=False)
        self.accept(token)

    def _reasons(self, token: int) -> bool:
        """Whether a token belongs to the reasoning, or to what opens it."""
        reasoning = self._reasoning
        return reasoning is not None and (reasoning.phase is ReasoningPhase.OPEN or token == reasoning.opening_id)

    def _complete(self, grammar: RowGrammar) -> bool:
        return grammar.exhausted or (self._closing is not None and grammar.accepting)

    def corrected(self, token: int) -> int:
        """Return the ordinary token to take in place of a special one that stands for text, or the token itself."""
        return token if self._grammar is None or self._grammar.matcher is None else self._grammar.corrected(token)

    def ordinary_token(self) -> int | None:
        """Return an ordinary token where the grammar's bitmask has none that may come."""
        return None if self._grammar is None or self._grammar.matcher is None else self._grammar.ordinary_token()

    def fail(self, reason: str) -> None:
        """Give up: the row fails, and every token may come next."""
        self._failure = reason
        self._update()

    def _follow(self, token: int) -> None:
        if self._grammar is not None:
            waited = self._grammar.awaits_trigger
            self._grammar.accept(token)
            if waited and self._closing is not None and not self._grammar.awaits_trigger:
                self._closing.restart(at_beginning=False)

    def _reason(self, reasoning: Reasoning, token: int) -> None:
        ahead = reasoning.phase is ReasoningPhase.AHEAD
        reasoning.accept(token)
        if ahead and reasoning.phase is ReasoningPhase.OPEN and self._grammar is not None:
            self._grammar.reset()
            self._required.clear()
            if self._closing is not None:
                self._closing.restart(at_beginning=True)
        elif ahead and reasoning.phase is not ReasoningPhase.OPEN:
            self._follow(token)
        if reasoning.phase is not ReasoningPhase.OVER:
            return
        if reasoning.reopens and (self._grammar is None or self._grammar.awaits_trigger):
            reasoning.await_more(token)
        else:
            self._reasoning = None

    def _update(self) -> None:
        """Find the next token's limit."""
        self.held = ()
        self.limit = self._next_limit()
        self.only_stops = self.limit is not None and self._has_stops_alone(self.limit)
        self.over = self.ended or (self._reasoning is None and self._grammar is None)

    def _has_stops_alone(self, limit: Limit) -> bool:
        """Whether nothing but stop tokens may come: the end of the grammar or, before `min_tokens`, text of it that is
        one."""
        matcher = limit.matcher
        if matcher is None:
            return set(limit.added) <= set(self._stops)
        is_early = self._left > self._free_from
        if not is_early or not any(matcher.validate_tokens([token]) for token in self._stops):
            return False
        allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8)).tolist()
        return {*allowed, *limit.added} - {*limit.excluded} <= {*self._stops}

    def _next_limit(self) -> Limit | None:
        reasoning = self._reasoning
        if reasoning is not None and reasoning.phase is ReasoningPhase.OPEN:
            return self._reasoning_limit(reasoning)
        if self._failure or self._grammar is None or self._grammar.awaits_trigger:
            return None
        if reasoning is not None and reasoning.phase is ReasoningPhase.AHEAD:
            return self._opening_limit(reasoning)
        return None if self._grammar.failure or self._grammar.ended else self._grammar_limit(self._grammar)

    def _reasoning_limit(self, reasoning: Reasoning) -> Limit | None:
        if reasoning.exhausted or not self._leaves_room(reasoning.close_ids, 1):
            return Limit(None, (reasoning.closing_id,))
        if self._grammar is not None and self._grammar.matcher is not None:
            self.held = tuple(set(self._stops) - set(reasoning.close_ids))
        return None

    def _opening_limit(self, reasoning: Reasoning) -> Limit:
        """The next token of the opening, and the grammar's where that has the tokens of the opening so far."""
        assert self._grammar is not None
        if self._grammar.failure:
            return Limit(None, (reasoning.opening_id,))
        limit = self._grammar_limit(self._grammar)
        if not reasoning.opening and not self._leaves_room(reasoning.close_ids, reasoning.tokens_to_open):
            self._reasoning = None
            return limit
        return Limit(limit.matcher, (*limit.added, reasoning.opening_id), limit.excluded)

    def _leaves_room(self, close_ids: Sequence[int], tokens: int) -> bool:
        """Whether, behind `tokens` more ones, there is room for the end of the reasoning and the grammar's shortest
        answer; also where it would not fit even now."""
        if self._closing is None or self._grammar is None or self._grammar.matcher is None:
            return True
        return self._closing.fits_behind(self._left - len(close_ids), tokens)

    def _grammar_limit(self, grammar: RowGrammar) -> Limit:
        if grammar.exhausted:
            return Limit(None, self._stops)
        if self._closing is not None and (token := self._closing.forced(self._left)) is not None:
            return Limit(None, (token,))
        limit = Limit(grammar.matcher, self._stops if grammar.accepting else (), self._foreign)
        if self._has_long_texts and not self._required and not limit.added:
            self._require(limit)
        if self._required:
            limit = self._only_next = Limit(None, (self._required[0],))
        return limit


def row_constraint(
    request: Submit, history: Sequence[int], vocabulary: int, grammars: GrammarCompiler
) -> RowConstraint | None:
    """Return the constraint of a request after the tokens of `history`; None if every token may come.

    Raises GrammarGone where its grammar is not READY, or lacks its ending, and ValueError where `history` does not
    follow it.
    """
    limits_reasoning = request.thinking is not None and request.thinking.budget is not None
    if request.constraint is None:
        return RowConstraint(request, history, vocabulary) if limits_reasoning else None
    beginning, ending = grammars.matcher(request.constraint), grammars.ending(request.constraint)
    if beginning is None or (ending is None and request.constraint.close_at_limit):
        raise GrammarGone(request.constraint.kind)
    gave_up = grammars.count_not_closed
    return RowConstraint(request, history, vocabulary, beginning, grammars.tokenizer, ending, gave_up)
