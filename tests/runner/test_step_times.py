"""Where a step's seconds went: prompts, decoding, or a pass that computed both."""

from __future__ import annotations

import pytest

from tests.runner.backends import segment
from treadle.core.plan import DecodeRow
from treadle.runner.forward.segments import ForwardOutput, RowSegment
from treadle.runner.step import Step

PROMPT = segment("p", (1,) * 30, 0)
LAST = segment("l", (1,) * 30, 64, wants=1, picks=True)
ROWS = [segment(f"r{i}", (1,), 9, wants=1, picks=True) for i in range(2)]


def times(segments: list[RowSegment], prefill_s: float | None = None) -> dict[str, float]:
    decodes = [DecodeRow(piece.id, 0) for piece in segments if piece.picks]
    step = Step(began=0.0, segments=segments, rows={}, decodes=decodes, failed={})
    step.computed = ForwardOutput(prefill_s=prefill_s)
    return step.times(3.0)


@pytest.mark.parametrize("segments", [[PROMPT], [LAST], [PROMPT, LAST]], ids=["part", "last", "both"])
def test_a_step_of_prompts_is_all_prefill(segments: list[RowSegment]) -> None:
    """The token that a prompt's last segment picks costs nothing beside it."""
    assert times(segments) == {"prefill_s": 3.0}


def test_a_step_of_decoding_rows_is_all_decode() -> None:
    assert times(ROWS) == {"decode_s": 3.0}


def test_a_pass_of_both_is_not_split() -> None:
    assert times([PROMPT, *ROWS]) == {"mixed_s": 3.0}


def test_prompts_with_a_pass_of_their_own_are_measured() -> None:
    assert times([PROMPT, *ROWS], 2.0) == {"prefill_s": 2.0, "decode_s": 1.0}
    assert times([LAST], 2.0) == {"prefill_s": 2.0, "decode_s": 1.0}
    assert times([PROMPT], 2.0) == {"prefill_s": 2.0, "decode_s": 0.0}


def test_a_step_of_nothing_takes_nobodys_time() -> None:
    assert times([]) == {"decode_s": 0.0}
