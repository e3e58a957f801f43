"""One sequence: what is to be prefilled, when it ends, what a rewind keeps."""

from __future__ import annotations

import pytest

from treadle.core.messages import Finish, FinishReason, Submit
from treadle.core.sequence import Sequence
from treadle.core.states import Event, IllegalTransition, State


def row(prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 8, **options: object) -> Sequence:
    return Sequence(Submit(id="a", prompt=prompt, max_tokens=max_tokens, **options), order=1, arrived=0.0)  # type: ignore[arg-type]


def test_the_last_token_is_left_for_the_decode_row() -> None:
    assert row().prefill_left == 2
    assert row(prompt=(7,)).prefill_left == 0


def test_reserves_prompt_and_completion() -> None:
    assert row(max_tokens=5).max_num_tokens == 8


def test_a_stop_token_ends_and_counts() -> None:
    it = row(stop_token_ids=(5,))
    assert it.append(4) is None
    assert it.append(5) == Finish(reason=FinishReason.STOP, stop_token_id=5)
    assert it.tokens == [4, 5]


def test_a_stop_token_does_not_end_before_min_tokens() -> None:
    it = row(stop_token_ids=(5,), min_tokens=2)
    assert it.append(5) is None
    assert it.append(5) is None
    assert it.append(5) == Finish(reason=FinishReason.STOP, stop_token_id=5)


def test_max_tokens_end_with_length_and_a_stop_token_there_is_a_stop() -> None:
    it = row(max_tokens=1)
    assert it.append(4) == Finish(reason=FinishReason.LENGTH)
    it = row(max_tokens=1, stop_token_ids=(4,))
    assert it.append(4) == Finish(reason=FinishReason.STOP, stop_token_id=4)


def test_rewind_keeps_the_tokens_and_forgets_the_cache() -> None:
    it = row()
    it.on(Event.ADMIT)
    it.joined, it.num_computed_tokens, it.committed_tokens = True, 2, 2
    it.on(Event.PROMPT_DONE)
    it.append(9)
    it.num_computed_tokens += 1
    assert it.prefill_left == 0
    it.rewind()
    assert (it.state, it.tokens, it.joined) == (State.PREFILL, [9], False)
    assert (it.prefill_left, it.committed_tokens) == (3, 0)


def test_a_row_that_waits_or_is_done_can_not_be_rewound() -> None:
    it = row()
    with pytest.raises(IllegalTransition):
        it.rewind()
    it.on(Event.END)
    assert not it.live
    with pytest.raises(IllegalTransition):
        it.rewind()
