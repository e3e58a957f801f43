"""What recurrent layers know of a step's segments."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.runner.recurrent.passes import begun, segments
from treadle.runner.mlxlm import RecurrentState
from treadle.runner.recurrent.layer import TracedStates
from treadle.runner.recurrent.operations import RecurrentOperations
from treadle.runner.recurrent.step import RecurrentPass


def test_first_tokens_are_known_with_and_without_arrays() -> None:
    own = segments(1, 3, 1, fresh=[1, 2], padding=2)
    step = RecurrentPass()
    step.begin(own)
    assert step.begins.tolist() == begun(own).begins.tolist() == [False, True, False, False, True, False, False]


def test_slots_of_single_tokens_are_those_of_all_segments_or_none() -> None:
    step = RecurrentPass()
    step.begin(segments(1, 1, 1, fresh=[1]))
    assert step.singles == ([0, -1, 2], [15, 14, 13])
    step.begin(segments(1, 2))
    assert step.singles is None
    step.begin(segments(1))
    assert step.singles == ([0], [15])


def test_a_trace_does_not_know_which_sequences_begin() -> None:
    traced = TracedStates([RecurrentState((3, 4), mx.float32)], RecurrentOperations())
    with pytest.raises(NotImplementedError, match="begin"):
        traced.run(lambda layer: layer.step.begins, [mx.zeros((2, 3, 4))])
