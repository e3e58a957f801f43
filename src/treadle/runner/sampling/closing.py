"""Ends of constrained sequences within `max_tokens`: tokens that leave no space for a completion are replaced."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

from llguidance import LLMatcher

from ...grammar.completions import STEP_S, WORK_A_STEP, Ending, Search, completes

_LONGEST = 1024
"""Most tokens of a completion that a search finds, but for forced ones: a required text that is longer may not fit."""
_ROOM = 32
"""Tokens that the steps of a slow search may take, and what it finds may be longer than the known completion."""


class Closing:
    """Keeps space for a completion of one row's grammar, so that it ends within `max_tokens`.

    The invariant: behind every token that is taken, a known completion fits into what is left. A token after which none
    is found, within the masks of one step, is replaced by the first one of the completion that was known before. So a
    sequence may close a little earlier than it must. Three exceptions keep the drawn tokens without a completion. While
    so much is left that no token can break the invariant, nothing is searched. Where no completion of the present state
    is known, or a whole one fits however long the search makes it, that goes on in the next steps. So does one whose
    masks take too long for a step, where `_ROOM` more tokens are left than the known completion takes. Only completions
    of finished searches are taken. Where two searches find nothing, it calls `gave_up` and searches no more.
    """

    def __init__(self, ending: Ending, vocabulary: int, gave_up: Callable[[], None]) -> None:
        self._ending = ending
        self._gave_up = gave_up
        self._vocabulary = vocabulary
        self.restart(at_beginning=True)

    def restart(self, *, at_beginning: bool) -> None:
        """Begin anew: at the beginning of the grammar, or behind tokens of it that were not settled."""
        first = self._ending.first
        self._known = None if first is None else list(first)
        self._exact = (
            at_beginning and first is not None
        )  # `_known` completes the present state, not only an earlier one
        self._bound = len(first) if self._exact and first is not None else self._ending.growth
        self._search: Search | None = None  # from an earlier state
        self._ended = False  # with the last token that was settled
        self._again = False  # a search has found nothing
        self._off = False
        self._keep_state()

    def fork(self) -> Closing:
        """Return one that goes on from here by itself, and counts nothing. No search may be under way."""
        assert self._search is None
        made = copy(self)
        made._gave_up = lambda: None
        return made

    def unsettle(self) -> None:
        """Forget the last token that was settled: it is not taken."""
        self._known, self._exact, self._bound, self._search, self._again, self._off = self._before

    def _keep_state(self) -> None:
        self._before = (self._known, self._exact, self._bound, self._search, self._again, self._off)

    def fits_behind(self, left: int, tokens: int) -> bool:
        """Whether the grammar, from its beginning, can be completed behind `tokens` more tokens with `left` left now;
        also where that would not fit even without them."""
        first = self._ending.first
        return first is None or not left - tokens < len(first) <= left

    def forced(self, left: int) -> int | None:
        """Return the only token that may come where `left` tokens are left; None where there are others."""
        if self._off or not self._exact or not self._known or len(self._known) != left:
            return None
        return self._known[0]

    def settle(self, matcher: LLMatcher, token: int, left: int) -> int | None:
        """Return the token to take in place of `token`, with `left` left before it: the same if a completion fits
        behind it. None where the grammar is complete and a stop token must come."""
        self._keep_state()
        self._ended = False
        if self._off:
            return token
        if self._exact and self._known is not None and len(self._known) > left:
            self._known, self._exact = None, False  # it never fitted
        if self._search is not None:
            return self._go_on(self._search, matcher, token, left)
        if self._bound + self._ending.growth < left:
            self._bound, self._exact = self._bound + self._ending.growth, False
            return token
        after = matcher.deep_copy()
        if not after.consume_token(token):
            return token
        if (rest := self._known_rest(after, token, left - 1)) is not None:
            self._keep(rest)
            return token
        return self._searched(after, token, left)

    def _known_rest(self, after: LLMatcher, token: int, most: int) -> list[int] | None:
        """Return up to `most` tokens that complete the grammar from `after`, of those that are known already."""
        if self._exact and self._known and self._known[0] == token:
            return self._known[1:]
        if self._known is not None:
            for rest in (self._known[2:], self._known[1:], self._known):
                if len(rest) <= most and completes(after, rest):
                    return rest
        return None

    def _searched(self, after: LLMatcher, token: int, left: int) -> int | None:
        """Search a completion behind `token`. A search that takes longer than this step goes on in the next ones where
        there is room for what it finds, or where nothing else is known."""
        search = Search(self._vocabulary, self._ending.candidates, after, left - 1, self._known or ())
        whole = search.work
        if (found := search.run(WORK_A_STEP, STEP_S)) is not None:
            self._keep(found)
            return token
        slow = whole - search.work < WORK_A_STEP and left > len(self._known or ()) + _ROOM
        if self._exact and (search.over or not (slow or left > _LONGEST)):
            return self._next_known()
        if search.over:
            return self._failed(token, left)
        self._search, self._exact = search, False
        return token

    def _go_on(self, search: Search, matcher: LLMatcher, token: int, left: int) -> int:
        """Continue the search from an earlier state; take the token."""
        self._bound += self._ending.growth
        found = search.run(WORK_A_STEP, STEP_S)
        self._known = found or self._known
        if search.over:
            self._search, self._ended = None, True
            if found is None and (self._ending.first is None or left <= _LONGEST):
                return self._failed(token, left)
        elif left == 1 and not completes(matcher, [token]):
            self._give_up()
        return token

    def _failed(self, token: int, left: int) -> int:
        """Search once more, from a later state; give up the second time, or with the last token. Return `token`."""
        if self._again or left == 1:
            self._give_up()
        self._search, self._again, self._ended = None, True, not self._off
        return token

    def _give_up(self) -> None:
        """Search no more: the sequence ends by its length, unless it ends by itself."""
        self._search, self._off = None, True
        self._gave_up()

    @property
    def searching(self) -> bool:
        """Whether a search is not over, or ended with the last token and the present state needs another one."""
        return self._search is not None or self._ended

    def _next_known(self) -> int | None:
        """Return the next token of the known completion; None at its end."""
        if not self._known:
            return None
        token = self._known[0]
        self._keep(self._known[1:])
        return token

    def _keep(self, completion: list[int]) -> None:
        self._known, self._exact, self._bound, self._again = completion, True, len(completion), False
