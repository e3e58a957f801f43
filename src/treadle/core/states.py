"""The life of a sequence in the engine, as one table.

A sequence is WAITING for a slot, then in PREFILL while its prompt enters the cache, then in DECODE while it gains
tokens, then DONE. Three rules hold whatever happens:

1. Only the arrows in TRANSITIONS exist; any other is a bug of ours and raises.
2. DONE is reached once, by END, and END is the one terminal event that the client hears of.
3. REWIND keeps the tokens a sequence has gained and puts it back to PREFILL, to recompute its cache from them.
   PREEMPT keeps them too and puts it back to WAITING: it gives its slot and its cache memory to others.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


class Event(Enum):
    ADMIT = "admit"
    PROMPT_DONE = "prompt_done"
    REWIND = "rewind"
    PREEMPT = "preempt"
    END = "end"


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.WAITING: {Event.ADMIT: State.PREFILL, Event.END: State.DONE},
    State.PREFILL: {
        Event.PROMPT_DONE: State.DECODE,
        Event.REWIND: State.PREFILL,
        Event.PREEMPT: State.WAITING,
        Event.END: State.DONE,
    },
    State.DECODE: {Event.REWIND: State.PREFILL, Event.PREEMPT: State.WAITING, Event.END: State.DONE},
    State.DONE: {},
}


class IllegalTransition(RuntimeError):
    """An event met a state that has no arrow for it: a bug of ours, never a client's."""


def advance(state: State, event: Event) -> State:
    """The state after `event`. Raises IllegalTransition where the table has no arrow."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(f"{event.value} in state {state.value}") from None
