"""Grammar of one row: its matcher, the search for its triggers, and its end."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy

from llguidance import LLMatcher, LLTokenizer

from ...core.messages import Constraint
from ...grammar.faults import fault_of_matcher
from .triggers import Trigger, TriggerSearch


class RowGrammar:
    """Follows a row's tokens through a constraint. `beginning` is a matcher at the beginning of its grammar, and stays
    there. `stops` are the tokens that end the sequence.

    `matcher` is the state of the grammar, None while tokens are free. `ended` is true once the sequence is over: a stop
    token came where the grammar is complete, or it is complete and there is no stop token. `failure` says why the row
    can't go on, empty where it can.
    """

    def __init__(
        self, constraint: Constraint, beginning: LLMatcher, tokenizer: LLTokenizer, stops: Collection[int]
    ) -> None:
        self.beginning = beginning
        self._tokenizer = tokenizer
        self._stops = stops
        self._then_free = constraint.then_free
        self._search = (
            TriggerSearch(constraint.triggers, lambda token: tokenizer.decode_bytes([token]))
            if constraint.triggers
            else None
        )
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.failure = ""
        self.ended = False
        self.matcher: LLMatcher | None = None
        self._next: tuple[int, LLMatcher | None] | None = None
        if self._search is None:
            self.matcher = self.beginning.deep_copy()
        else:
            self._search.reset()

    def fork(self) -> RowGrammar:
        """Return a grammar that goes on from here by itself. No token may be settled that is not accepted."""
        made = copy(self)
        made._next = None
        made.matcher = None if self.matcher is None else self.matcher.deep_copy()
        made._search = None if self._search is None else self._search.fork()
        return made

    @property
    def awaits_trigger(self) -> bool:
        """Whether tokens are free until a trigger is generated."""
        return self.matcher is None

    @property
    def accepting(self) -> bool:
        """Whether the grammar is complete; more may follow."""
        return self.matcher is not None and self.matcher.is_accepting()

    @property
    def exhausted(self) -> bool:
        """Whether the grammar is complete, and nothing can follow."""
        return self.matcher is not None and self.matcher.is_stopped()

    def corrected(self, token: int) -> int:
        """Return the token to take in place of a drawn one: an ordinary one where that is a special token which the
        grammar only allows as text, or where it goes on behind a trigger as the grammar does not."""
        if self.matcher is None:
            return self._up_to_trigger(token)
        if not self._tokenizer.is_special_token(token):
            return token
        if (token in self._stops and self.accepting) or self.matcher.validate_tokens([token]):
            return token
        ordinary = self.ordinary_token()
        return token if ordinary is None else ordinary

    def ordinary_token(self) -> int | None:
        """Return the longest ordinary token that begins the text which has to follow; None if there is none.

        llguidance tokenizes that text for its bitmask, and offers a special token where the text has the name of one.
        """
        assert self.matcher is not None
        text = self.matcher.compute_ff_bytes().decode("utf-8", "ignore")
        tokens = self._tokenizer.greedy_tokenize(text)[:1]
        return tokens[0] if self.matcher.validate_tokens(tokens) else None

    def accept(self, token: int) -> None:
        """Take over a generated token."""
        if self.matcher is None:
            self._find(token)
        elif token in self._stops and self.matcher.is_accepting():
            self.ended = True
        elif not self.matcher.consume_token(token):
            self.failure = f"token {token} does not follow the grammar: {fault_of_matcher(self.matcher)}"
        if self.matcher is not None and not self.failure:
            self._end(self.matcher)

    def _find(self, token: int) -> None:
        """Begin the grammar where `token` completes a trigger. Where the grammar does not begin like that, tokens stay
        free until the next trigger."""
        assert self._search is not None
        if self._next is not None and self._next[0] == token:
            self.matcher = self._next[1]
        else:
            self.matcher = self._begun(self._search.push(token))
        self._next = None

    def _up_to_trigger(self, token: int) -> int:
        """Return `token`, or its beginning up to the end of a trigger where the grammar does not take the rest."""
        assert self._search is not None
        found = self._search.push(token)
        matcher = self._begun(found)
        if found is not None and matcher is None and found.rest:
            shorter = self._tokenizer.greedy_tokenize(_text(self._tokenizer.decode_bytes([token])[: -found.rest]))
            if shorter:
                token = shorter[0]
                self._search.push_back(found)
                matcher = self._begun(self._search.push(token))
        self._next = token, matcher
        return token

    def _begun(self, trigger: Trigger | None) -> LLMatcher | None:
        """Return a matcher behind a trigger; None where the grammar does not begin with its tokens."""
        if trigger is None:
            return None
        matcher, tokens = self.beginning.deep_copy(), self._tokens_of(trigger)
        return matcher if matcher.try_consume_tokens(tokens) == len(tokens) else None

    def _tokens_of(self, trigger: Trigger) -> list[int]:
        """Return the tokens from the beginning of the trigger on; the first one is cut where it begins inside of it."""
        first, *others = trigger.tokens
        if trigger.offset:
            text = self._tokenizer.decode_bytes([first])[trigger.offset :]
            return [*self._tokenizer.tokenize_bytes(text), *others]
        return [first, *others]

    def _end(self, matcher: LLMatcher) -> None:
        """Settle what follows where nothing more of the grammar can."""
        if matcher.is_error():
            self.failure = f"the grammar can't be followed any further: {fault_of_matcher(matcher)}"
        elif matcher.is_stopped() and self._then_free and self._search is not None:
            self.reset()
        elif matcher.is_stopped() and not self._stops:
            self.ended = True


def _text(data: bytes) -> str:
    """Return UTF-8 as text; empty where it is none, as in a token that begins within a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return ""
