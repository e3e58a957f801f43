"""Prompt look-up decoding: the tokens that followed the row's last ones before are proposed as the next ones.

No model is asked. Known from Saxena, "Prompt Lookup Decoding" (2023), and vLLM's `ngram` drafter; that a longer common
context makes a better proposal, and that other requests' texts are sources, is known from Oliaro et al.,
"SuffixDecoding" (2024).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from ...core.plan import DraftTrial
from ...core.statistics import DrafterStatistics
from .drafter import DraftedRow
from .ngrams import FixedNgrams, GrowingNgrams, N, common_context, key_at
from .proposal import Proposal

Continuation = Callable[[str, Sequence[int], int], Sequence[int]]
"""Cached tokens of requests of this salt behind these tokens, at most so many."""

HORIZON = 128
"""Tokens of a proposal, which goes on over several trials and steps."""
CONTEXT = 32
"""Tokens of common context that count: with so many no other source is asked."""
BEGUN = 16
"""Tokens that a prediction counts for where an answer begins: a client sends one that is right as a rule."""
SHARE = 0.005
"""Seconds of look-ups a second of steps, for rows whose proposals no step verifies."""
MOST_CREDIT_S = 0.002
ASK_AGAIN = 16
"""Tokens after which cached prompts are asked again where nothing was found; then twice as many."""


class LookupDrafter:
    """Drafter that looks up the row's last tokens in what it generated, in its request's prediction and in its prompt,
    and its whole text in `continuation`, the cached prompts and answers of others. The longest common context counts,
    and between equal ones the earlier source and the latest place.

    Trials are of `draft_tokens` tokens, the most that a step verifies. The look-ups of rows that verify are worth their
    time, as the next step needs them. Those of others are paid from a credit, a share of the steps' seconds, in turns.
    """

    names = ("lookup",)

    def __init__(
        self,
        continuation: Continuation | None = None,
        draft_tokens: int = 8,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert draft_tokens > 0
        self._length = draft_tokens
        self._continuation = continuation
        self._clock = clock
        self._rows: dict[str, _Row] = {}
        self._credit_s = 0.0
        self._turn = 0
        self._over: list[DraftTrial] = []

    def propose(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> list[Sequence[int]]:
        """Return up to `most` draft tokens for each row, of what is ready or looked up now."""
        return [self._propose(row, count) if count else () for row, count in zip(rows, most, strict=True)]

    def follow(self, rows: Sequence[DraftedRow], seconds: float) -> list[DraftTrial]:
        """Return the trials that are over, and look up more within the allowance."""
        began = self._clock()
        self._credit_s = min(self._credit_s + SHARE * seconds, MOST_CREDIT_S)
        verified, waiting = [], []
        for row in rows:
            state = self._state(row)
            if state is None:
                continue
            if state.proposal is not None:
                self._compare(state, state.proposal)
            if state.verifies:
                verified.append(state)
            elif self._is_short(state):
                waiting.append(state)
        self._credit_s -= self._clock() - began
        self._look_up_verified(verified)
        self._look_up_in_turns(waiting)
        trials, self._over = self._over, []
        return trials

    def ready(self, row: DraftedRow) -> int:
        """Return how many proposed tokens are left behind the tokens of a row."""
        state = self._rows.get(row.id)
        if state is None or state.proposal is None or state.row is not row:
            return 0
        return state.proposal.left if state.proposal.start + state.proposal.used == len(row.tokens) else 0

    def match(self, row: DraftedRow) -> int:
        """Return the length of the common context behind which the tokens that are ready were found."""
        state = self._rows.get(row.id)
        return 0 if state is None or state.proposal is None else state.proposal.match

    def release(self, row_id: str) -> None:
        """Forget a row, with its indexes."""
        self._rows.pop(row_id, None)

    def warm_up(self) -> None:
        """Do nothing: there are no passes."""

    def reset(self) -> None:
        """Do nothing: the cached prompts are the runner's."""

    def statistics(self) -> DrafterStatistics:
        """Return zeros: it holds no keys and values."""
        return DrafterStatistics()

    def close(self) -> None:
        self._rows.clear()

    def _state(self, row: DraftedRow) -> _Row | None:
        """Return what is known of a row; None where nothing is to be drafted."""
        state = self._rows.get(row.id)
        if state is None or state.row is not row:
            if not row.request.speculate:
                return None
            state = self._rows[row.id] = _Row(row)
        return state

    def _propose(self, row: DraftedRow, most: int) -> Sequence[int]:
        state = self._state(row)
        if state is None:
            return ()
        if state.proposal is not None:
            self._compare(state, state.proposal)
        if state.proposal is None or not state.proposal.left:
            self._look_up(state)
        if state.proposal is None:
            return ()
        self._over += state.proposal.ended(row.id)
        state.verifies = True
        return state.proposal.tokens[state.proposal.used : state.proposal.used + most]

    def _compare(self, state: _Row, proposal: Proposal) -> None:
        """Compare a proposal with the row's tokens, and drop it where they differ. What a step verified is no trial."""
        holds = proposal.compare(state.row.tokens)
        if state.verifies:
            proposal.told = proposal.used
        else:
            self._over += proposal.trials(state.row.id, self._length, wrong=not holds)
        if not holds:
            state.proposal = None

    def _is_short(self, state: _Row) -> bool:
        """Whether a proposal is missing, used up, or about to be where there may be more of it."""
        proposal = state.proposal
        if proposal is None or not proposal.left:
            return True
        return proposal.left < self._length and len(proposal.tokens) == HORIZON

    def _look_up_verified(self, states: Sequence[_Row]) -> None:
        for state in states:
            state.verifies = False
            if self._is_short(state):
                self._look_up(state)

    def _look_up_in_turns(self, states: list[_Row]) -> None:
        """Look up while there is credit, first for the rows whose last turn is the longest ago."""
        if self._credit_s <= 0:
            return
        states.sort(key=_last_turn)
        before = self._clock()
        for state in states:
            self._look_up(state)
            self._turn += 1
            state.turn = self._turn
            now = self._clock()
            self._credit_s -= now - before
            if self._credit_s <= 0:
                return
            before = now

    def _look_up(self, state: _Row) -> None:
        """Make a new proposal. Where nothing is found the old one stays."""
        tokens, context = state.find(HORIZON, self._continuation)
        if tokens:
            if state.proposal is not None:
                self._over += state.proposal.ended(state.row.id)
            state.proposal = Proposal(tokens, len(state.row.tokens), context)


class _Row:
    """A row with its sources. Those that are searched by n-grams are indexed at the first look-up."""

    __slots__ = ("_ask_at", "_expected", "_generated", "_prediction", "_prompt", "proposal", "row", "turn", "verifies")

    def __init__(self, row: DraftedRow) -> None:
        self.row = row
        self.proposal: Proposal | None = None
        self.verifies = False
        self.turn = 0
        self._expected = row.request.prediction or ()
        self._generated: GrowingNgrams | None = None
        self._prediction: FixedNgrams | None = None
        self._prompt: FixedNgrams | None = None
        self._ask_at = 0

    def find(self, most: int, continuation: Continuation | None) -> tuple[Sequence[int], int]:
        """Return up to `most` tokens that are expected behind the row's, none where no source has any, and the length
        of the context in common."""
        tokens, request = self.row.tokens, self.row.request
        generated = len(tokens) - len(request.prompt)
        if expected := self._begun_prediction(generated, most):
            return expected, BEGUN
        text, end, context = self._longest(generated)
        if context < CONTEXT and continuation is not None and generated >= self._ask_at:
            cached = continuation(self.row.salt, tokens, most)
            if cached:
                return cached, CONTEXT
            self._ask_at = max(2 * generated, generated + ASK_AGAIN)
        return (_behind(text, end, most, endless=text is tokens), context) if context else ((), 0)

    def _begun_prediction(self, generated: int, most: int) -> Sequence[int]:
        """Return more of the prediction where the answer, too short for a look-up, begins like it."""
        if generated < N and self._expected[:generated] == tuple(self.row.tokens[len(self.row.request.prompt) :]):
            return self._expected[generated : generated + most]
        return ()

    def _longest(self, generated: int) -> tuple[Sequence[int], int, int]:
        """Return the place with the longest context in common with the row's end: a text, a position in it, and the
        length of the context, 0 where there is none."""
        tokens = self.row.tokens
        best: tuple[Sequence[int], int, int] = (tokens, 0, 0)
        if len(tokens) < N:
            return best
        for text, end in self._places(key_at(tokens, len(tokens)), generated):
            context = common_context(tokens, len(tokens), text, end, CONTEXT)
            if context > max(best[2], N - 1) and end < len(text):
                best = (text, end, context)
                if context == CONTEXT:
                    break
        return best

    def _places(self, key: int, generated: int) -> Iterator[tuple[Sequence[int], int]]:
        """Yield the places behind the n-grams with this key, which is the row's last one."""
        tokens, request = self.row.tokens, self.row.request
        if self._generated is None:
            self._generated = GrowingNgrams(len(request.prompt))
            self._prompt = FixedNgrams(request.prompt)
            self._prediction = FixedNgrams(self._expected) if self._expected else None
        assert self._prompt is not None
        self._generated.extend(tokens, len(tokens) - 1)
        for end in self._generated.ends(key):
            yield tokens, end
        if self._prediction is not None:
            for end in self._prediction.ends(key):
                yield self._expected, end
        for end in self._prompt.ends(key):
            yield tokens, end


_last_turn = attrgetter("turn")


def _behind(text: Sequence[int], end: int, most: int, *, endless: bool) -> Sequence[int]:
    """Return up to `most` tokens of `text` behind `end`. An `endless` text is expected to repeat these at its end."""
    found = text[end : end + most]
    if endless and len(found) < most:
        found = (list(found) * (most // len(found) + 1))[:most]
    return found
