"""Two drafters for a row: which one is asked, and how outcomes change that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.runner.drafting.rows import Row
from treadle.core.plan import DraftTrial
from treadle.core.statistics import DrafterStatistics
from treadle.runner.drafting.drafter import DraftedRow
from treadle.runner.drafting.either import Either


class Fake:
    """Drafter of one token over and over for the rows in `has`."""

    def __init__(self, name: str, token: int, *has: str) -> None:
        self.names = (name,)
        self.token = token
        self.has = set(has)
        self.asked: list[list[str]] = []
        self.trials: list[DraftTrial] = []
        self.calls: list[Any] = []

    def propose(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> list[Sequence[int]]:
        self.asked.append([row.id for row in rows])
        return [[self.token] * n if row.id in self.has else () for row, n in zip(rows, most, strict=True)]

    def follow(self, rows: Sequence[DraftedRow], seconds: float) -> list[DraftTrial]:
        return self.trials

    def ready(self, row: DraftedRow) -> int:
        return 8 if row.id in self.has else 0

    def match(self, row: DraftedRow) -> int:
        return self.token

    def release(self, row_id: str) -> None:
        self.calls.append(row_id)

    def warm_up(self) -> None:
        self.calls.append("warm_up")

    def reset(self) -> None:
        self.calls.append("reset")

    def statistics(self) -> DrafterStatistics:
        return DrafterStatistics(kv_bytes=self.token)

    def close(self) -> None:
        self.calls.append("close")


def trial(accepted: int, id_: str = "a") -> DraftTrial:
    return DraftTrial(id_, 8, accepted)


def test_a_row_gets_the_drafts_of_whichever_has_some() -> None:
    free, costly = Fake("lookup", 5, "a", "c"), Fake("draft", 6, "b", "c")
    both, rows = Either(free, costly), [Row("a"), Row("b"), Row("c"), Row("d")]
    assert both.names == ("lookup", "draft")
    assert both.statistics().kv_bytes == 6, "those of the costly one"
    assert [both.ready(row) for row in rows] == [8, 8, 8, 0]
    assert [both.match(row) for row in rows[:3]] == [5, 6, 6]
    assert both.propose(rows, [2, 2, 2, 2]) == [[5, 5], [6, 6], [6, 6], ()]
    assert free.asked == [["a"], ["d"]], "nobody is asked twice"
    assert costly.asked == [["b", "c", "d"]]
    assert both.propose([Row("a"), Row("b")], [0, 3]) == [(), [6, 6, 6]]


def test_free_drafts_are_taken_once_they_were_right_more_often() -> None:
    """Their trials cost nothing; that of a row for which they would not be asked is not told."""
    free, costly, row = Fake("lookup", 5, "a"), Fake("draft", 6, "a"), Row()
    both = Either(free, costly)
    assert both.propose([row], [1]) == [[6]]
    free.trials = [trial(0)]
    assert both.follow([row], 0.1) == []
    free.trials = [trial(8)] * 3
    assert both.follow([row], 0.1) == free.trials
    assert both.propose([row], [1]) == [[5]]
    free.trials = [trial(0)] * 3
    assert both.follow([row], 0.1) == []
    assert both.propose([row], [1]) == [[6]]


def test_trials_are_told_of_rows_that_have_no_other_drafts() -> None:
    free, row = Fake("lookup", 5), Row()
    both = Either(free, Fake("draft", 6))
    free.trials = [trial(0)]
    assert both.follow([row], 0.1) == free.trials


def test_verified_drafts_count_for_their_source() -> None:
    free, costly, row = Fake("lookup", 5, "a"), Fake("draft", 6, "a"), Row()
    both = Either(free, costly)
    for _ in range(2):
        both.propose([row], [3])
        row.tokens += [7]
        both.follow([row], 0.1)
    assert both.propose([row], [3]) == [[5, 5, 5]], "the other was wrong twice"
    assert both.propose([row], [3]) == [[5, 5, 5]], "a row that gained nothing proves nothing"
    row.tokens += [5, 5, 9]
    assert both.propose([row], [3]) == [[5, 5, 5]], "two of three were right"
    row.tokens += [9]
    assert both.propose([row], [3]) == [[6, 6, 6]]


def test_a_row_that_is_released_begins_anew_and_everything_reaches_both() -> None:
    free, costly, row = Fake("lookup", 5, "a"), Fake("draft", 6, "a"), Row()
    both = Either(free, costly)
    free.trials = [trial(8)] * 3
    both.follow([row], 0.1)
    both.release("a")
    assert both.propose([row], [1]) == [[6]]
    both.warm_up()
    both.reset()
    both.close()
    assert free.calls == costly.calls == ["a", "warm_up", "reset", "close"]


def test_a_trial_of_one_that_has_left_leaves_nothing() -> None:
    free, costly = Fake("free", 1), Fake("costly", 2)
    either = Either(free, costly)
    free.trials = [DraftTrial("gone", 2, 1, 3)]
    either.follow([], 0.1)
    assert either._records == {}
