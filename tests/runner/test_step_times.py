"""Prompts' seconds and decoding's, of passes that compute both."""

from __future__ import annotations

import pytest

from tests.runner.backends import segment
from treadle.runner.forward.segments import RowSegment
from treadle.runner.forward.step_times import StepTimes

PROMPT = segment("p", (1,) * 30, 0)
LAST = segment("l", (1,) * 30, 64, wants=1, picks=True)
ROWS = [segment(f"r{i}", (1,), 9, wants=1, picks=True) for i in range(2)]


@pytest.mark.parametrize("pieces", [[PROMPT], [LAST], [PROMPT, LAST]], ids=["part", "last", "both"])
def test_a_step_of_prompts_is_all_prefill(pieces: list[RowSegment]) -> None:
    """The token that a prompt's last piece picks costs nothing beside it."""
    assert StepTimes().split(pieces, 3.0) == {"prefill_s": 3.0, "decode_s": 0.0}


def test_a_step_of_decoding_rows_is_all_decode() -> None:
    assert StepTimes().split(ROWS, 3.0) == {"prefill_s": 0.0, "decode_s": 3.0}


def test_rows_beside_a_prompt_cost_what_they_did_without() -> None:
    times = StepTimes()
    times.split(ROWS, 1.0)
    assert times.split([PROMPT, *ROWS], 3.0) == {"prefill_s": 2.0, "decode_s": 1.0}
    assert times.split([PROMPT, *ROWS], 0.5) == {"prefill_s": 0.0, "decode_s": 0.5}


def test_before_that_is_known_they_cost_what_their_tokens_do() -> None:
    found = StepTimes().split([PROMPT, *ROWS], 3.2)
    assert found == pytest.approx({"prefill_s": 3.0, "decode_s": 0.2})


def test_a_step_of_nothing_takes_nobodys_time() -> None:
    assert StepTimes().split([], 1.0) == {"prefill_s": 0.0, "decode_s": 0.0}


def test_a_step_that_was_held_up_by_prompts_after_it_is_not_what_rows_cost() -> None:
    """P3: the host prepares them in its time. It counts where another such step follows, as half as much again at most,
    or if it was none the longer for it."""
    times = StepTimes()
    for seconds in (1.0, 1.0, 2.0):
        times.split(ROWS, seconds)
    assert times.split([PROMPT, *ROWS], 3.0)["decode_s"] == 1.0
    for seconds in (2.0, 1.0):
        times.split(ROWS, seconds)
    assert times.split([PROMPT, *ROWS], 3.0)["decode_s"] == pytest.approx(0.7 + 0.3 * 1.5)
    times.split(ROWS, 0.5)
    assert times.split([PROMPT, *ROWS], 3.0)["decode_s"] == pytest.approx(0.7 * 1.15 + 0.3 * 0.5)
