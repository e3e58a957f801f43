"""Look-up of drafts: what is proposed, how proposals are tried, and what time look-ups take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runner.drafting.rows import Row, row
from treadle.core.plan import DraftTrial
from treadle.runner.drafting import lookup
from treadle.runner.drafting.lookup import SHARE, LookupDrafter
from treadle.runner.drafting.ngrams import N

LONG_S = 1000.0
PERIODIC = [1, 2, 3, 4, 5]


class Time:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def drafter(**options: object) -> LookupDrafter:
    return LookupDrafter(draft_tokens=4, clock=Time(), **options)  # type: ignore[arg-type]


def proposed(asked: Row, most: int = 8) -> list[int]:
    return list(drafter().propose([asked], [most])[0])


# Sources


def context_of(text: Sequence[int], end: int, tokens: Sequence[int]) -> int:
    return next(
        (n for n in range(min(end, len(tokens))) if text[end - 1 - n] != tokens[len(tokens) - 1 - n]),
        min(end, len(tokens)),
    )


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.lists(st.integers(0, 2), min_size=N, max_size=12),
    st.lists(st.integers(0, 2), max_size=8),
)
def test_a_proposal_stands_behind_the_longest_common_context(
    prompt: list[int], generated: list[int], prediction: list[int]
) -> None:
    """A search through all places agrees: the longest context, then the earlier source, then the latest place."""
    tokens, first = [*prompt, *generated], len(prompt)
    places = [
        *((tokens, end) for end in range(len(tokens) - 1, first, -1)),
        *((prediction, end) for end in range(len(prediction) - 1, 0, -1)),
        *((tokens, end) for end in range(first, 0, -1)),
    ]
    text, end = max(places, key=lambda place: context_of(place[0], place[1], tokens))
    expected = text[end : end + 8] if text is prediction else (text[end:] * 8)[:8]
    if context_of(text, end, tokens) < N:
        expected = []
    assert proposed(row(prompt, generated, prediction=prediction)) == expected


def test_an_answer_begins_like_its_prediction() -> None:
    expected = range(50, 70)
    assert proposed(row(range(10), prediction=expected)) == list(range(50, 58))
    assert proposed(row(range(10), [50, 51], prediction=expected)) == list(range(52, 60))


def test_a_prediction_is_found_again_behind_a_difference() -> None:
    asked = row(range(10), [50, 51, 99, 53, 54, 55], prediction=range(50, 70))
    assert proposed(asked) == list(range(56, 64))
    assert proposed(row(range(10), [99], prediction=range(50, 70))) == []


def test_cached_text_goes_before_a_shorter_context_in_the_prompt() -> None:
    asked: list[tuple[str, list[int], int]] = []

    def continuation(salt: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        asked.append((salt, list(tokens), most))
        return [70, 71, 72]

    cached = drafter(continuation=continuation)
    one = row([*PERIODIC, *PERIODIC])
    one.salt = "tenant"
    assert list(cached.propose([one], [2])[0]) == [70, 71]
    assert asked == [("tenant", one.tokens, lookup.HORIZON)]
    assert list(cached.propose([row(PERIODIC * 10, id_="long")], [2])[0]) == [1, 2]
    assert len(asked) == 1


def test_cached_text_that_has_nothing_is_asked_ever_less_often() -> None:
    asked = []
    cached = drafter(continuation=lambda salt, tokens, most: asked.append(len(tokens)) or ())
    one = row([1])
    for token in range(1000, 1200):
        cached.propose([one], [1])
        one.tokens.append(token)
    assert asked == [1, 17, 33, 65, 129]


def test_a_request_can_opt_out() -> None:
    silent, drafts = row(PERIODIC * 2, speculate=False), drafter()
    assert drafts.propose([silent], [4]) == [()]
    assert drafts.follow([silent], LONG_S) == []
    assert drafts.ready(silent) == 0


def test_a_row_that_may_verify_nothing_is_not_looked_up() -> None:
    drafts, asked = drafter(), row(PERIODIC * 2)
    assert drafts.propose([asked], [0]) == [()]
    assert drafts.ready(asked) == 0


# Trials


def plain(drafts: LookupDrafter, asked: Row, *gained: int) -> list[DraftTrial]:
    """Follow a plain step."""
    asked.tokens += gained
    return drafts.follow([asked], LONG_S)


def test_proposals_are_tried_against_plain_steps() -> None:
    drafts, asked = drafter(), row([*PERIODIC, 9, *PERIODIC])
    assert plain(drafts, asked) == []
    assert drafts.ready(asked) > 4
    assert plain(drafts, asked, 9) == plain(drafts, asked, 1, 2) == []
    assert drafts.match(asked) == 5 + 3
    assert plain(drafts, asked, 3) == [DraftTrial("row", 4, 4, 5)]
    assert plain(drafts, asked, 4) == []
    assert plain(drafts, asked, 77) == [DraftTrial("row", 4, 1, 9)]
    assert drafts.ready(asked) == 0


def test_a_proposal_that_is_used_up_ends_its_trial() -> None:
    drafts, asked = drafter(), row([1], prediction=[50, 51, 52, 53, 54, 55])
    plain(drafts, asked)
    assert plain(drafts, asked, 50, 51, 52, 53, 54) == [DraftTrial("row", 4, 4, lookup.BEGUN)]
    assert drafts.ready(asked) == 1
    assert plain(drafts, asked, 55, 99) == [DraftTrial("row", 2, 2, lookup.BEGUN + 4)]
    assert drafts.ready(asked) == 0


def test_what_a_step_verified_is_no_trial() -> None:
    drafts, asked = drafter(), row([*PERIODIC, 9, *PERIODIC])
    plain(drafts, asked)
    plain(drafts, asked, 9)
    assert drafts.propose([asked], [3]) == [[1, 2, 3]]
    asked.tokens += [1, 2, 88]
    assert drafts.follow([asked], 0.0) == [DraftTrial("row", 1, 1, 5)], "the plain step before"
    assert drafts.ready(asked) == 0


def test_a_longer_proposal_takes_the_place_of_the_rest_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "HORIZON", 6)
    drafts, asked = drafter(), row([*PERIODIC, 9, *PERIODIC])
    plain(drafts, asked)
    assert drafts.ready(asked) == 6
    plain(drafts, asked, 9)
    assert plain(drafts, asked, 1, 2) == [DraftTrial("row", 3, 3, 5)]
    assert drafts.ready(asked) == 6
    assert drafts.match(asked) == 2 + 6, "it is found again where it was, and one more of the context is known"


def test_a_proposal_is_ready_only_behind_the_tokens_it_was_made_for() -> None:
    drafts, asked = drafter(), row([*PERIODIC, 9, *PERIODIC])
    plain(drafts, asked)
    asked.tokens.append(9)
    assert drafts.ready(asked) == 0
    assert drafts.ready(row(asked.tokens)) == 0, "another row of this id"


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=3), st.booleans()), max_size=30))
def test_trials_and_proposals_tell_the_truth(steps: list[tuple[list[int], bool]]) -> None:
    """What is proposed behind a row's tokens is compared with the tokens that it gains, each at most once."""
    drafts, asked = drafter(), row([0, 1, 1])
    counted = gained = 0
    for tokens, verifies in steps:
        ready = drafts.ready(asked)
        if verifies:
            [found] = drafts.propose([asked], [3])
            assert not ready or len(found) == min(ready, 3)
        asked.tokens += tokens
        gained += len(tokens)
        for trial in drafts.follow([asked], LONG_S):
            assert 0 <= trial.accepted <= trial.drafted <= 4
            counted += trial.accepted
    assert counted <= gained


# Time and memory


def searches(rows: Sequence[Row], drafts: LookupDrafter, seconds: float) -> list[str]:
    """The rows that are looked up in a step."""
    before = [drafts.ready(one) for one in rows]
    drafts.follow(rows, seconds)
    return [one.id for one, ready in zip(rows, before, strict=True) if drafts.ready(one) > ready]


def test_look_ups_are_paid_from_a_share_of_the_steps_and_rows_take_turns() -> None:
    clock, seen = Time(), []

    def slow(salt: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        seen.append(tokens[0])
        clock.now_s += 0.010 * SHARE
        return ()

    drafts = LookupDrafter(slow, clock=clock)
    rows = [row([number], id_=str(number)) for number in range(4)]
    drafts.follow(rows, 0.0)
    assert seen == []
    drafts.follow(rows, 0.015)
    assert seen == [0, 1], "two are begun, and half of the second is owed"
    drafts.follow(rows, 0.004)
    assert seen == [0, 1]
    drafts.follow(rows, 0.002)
    assert seen == [0, 1, 2]
    drafts.follow(rows[:3], 0.010)
    drafts.follow(rows, 0.010)
    assert seen == [0, 1, 2, 3]


def test_credit_does_not_pile_up() -> None:
    clock, seen = Time(), []

    def slow(salt: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        seen.append(tokens[0])
        clock.now_s += lookup.MOST_CREDIT_S / 2
        return ()

    drafts = LookupDrafter(slow, clock=clock)
    drafts.follow([row([number], id_=str(number)) for number in range(10)], 1e6)
    assert len(seen) == 2


def test_rows_that_verified_are_looked_up_at_once() -> None:
    drafts, asked = drafter(), row([1, 2, 3, 4, 7, 8, 9, 6, 1, 2, 3])
    assert drafts.propose([asked], [3]) == [[4, 7, 8]]
    asked.tokens += [7, 8, 9]
    assert drafts.follow([asked], 0.0) == []
    assert drafts.ready(asked)
    assert drafts.propose([asked], [2]) == [[6, 1]]


def test_a_released_row_is_forgotten() -> None:
    drafts = drafter()
    for number in range(10):
        asked = row([*PERIODIC, *PERIODIC], id_=str(number))
        plain(drafts, asked)
        assert drafts.ready(asked)
        drafts.release(asked.id)
        assert drafts.ready(asked) == 0
    drafts.release("unknown")
    assert not drafts._rows


def test_a_row_that_is_admitted_again_begins_anew() -> None:
    drafts, asked = drafter(), row([*PERIODIC, *PERIODIC])
    plain(drafts, asked)
    again = row(PERIODIC * 3)
    assert plain(drafts, again) == []
    assert drafts.ready(again)
