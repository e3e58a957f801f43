"""The table of states is what the file says it is."""

from __future__ import annotations

import itertools

import pytest

from treadle.core.states import TRANSITIONS, Event, IllegalTransition, State, advance

ARROWS = {
    (State.WAITING, Event.ADMIT): State.PREFILL,
    (State.WAITING, Event.END): State.DONE,
    (State.PREFILL, Event.PROMPT_DONE): State.DECODE,
    (State.PREFILL, Event.REWIND): State.PREFILL,
    (State.PREFILL, Event.PREEMPT): State.WAITING,
    (State.PREFILL, Event.END): State.DONE,
    (State.DECODE, Event.REWIND): State.PREFILL,
    (State.DECODE, Event.PREEMPT): State.WAITING,
    (State.DECODE, Event.END): State.DONE,
}


@pytest.mark.parametrize(("state", "event"), [*itertools.product(State, Event)])
def test_only_the_arrows_of_the_table_exist(state: State, event: Event) -> None:
    if (state, event) in ARROWS:
        assert advance(state, event) is ARROWS[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"{event.value} in state {state.value}"):
            advance(state, event)


def test_every_state_has_its_line_and_done_is_the_end() -> None:
    assert TRANSITIONS.keys() == set(State)
    assert TRANSITIONS[State.DONE] == {}


def test_every_living_state_can_end() -> None:
    assert all(Event.END in TRANSITIONS[state] for state in State if state is not State.DONE)
