"""Draft tokens of one row, and its sampling state along them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.messages import Submit
from .sampler import SamplingRow


@dataclass(slots=True, eq=False)
class RowDrafts:
    """The draft `tokens` that a row verifies. `states` are its sampling states before the first of them and behind
    each: the first is the row's own, and so are all of a row whose sampling remembers no tokens."""

    tokens: list[int]
    states: list[SamplingRow]


def stops(request: Submit, token: int, position: int) -> bool:
    """Whether the sequence ends by `token` at `position` among its generated tokens."""
    return token in request.stop_token_ids and position >= request.min_tokens


def fitting(row: SamplingRow, request: Submit, drafts: Sequence[int], position: int, least: int) -> RowDrafts:
    """Return those of `drafts`, from `position` on, that the row could sample one after the other. They end before a
    token that its constraint does not take, and behind one that ends the sequence, or after which `least` tokens or
    more are forced (0: none are)."""
    found = RowDrafts([], [row])
    for place, token in enumerate(drafts, position):
        state = _behind(found.states[-1], token)
        if state is None:
            break
        found.tokens.append(token)
        found.states.append(state)
        if state.ended or stops(request, token, place) or _waits(state, least):
            break
    return found


def _behind(state: SamplingRow, token: int) -> SamplingRow | None:
    """Return the state behind `token`; None where the constraint does not take it."""
    if not state.remembers:
        return state
    if state.constraint is not None and not state.constraint.allows(token):
        return None
    state = state.fork()
    if state.constraint is not None and state.constraint.settle(token) != token:
        return None
    return None if state.accept(token) else state


def _waits(state: SamplingRow, least: int) -> bool:
    """Whether the constraint takes one token a step here, or forces the next ones."""
    constraint = state.constraint
    if constraint is None:
        return False
    forces = least and state.limited and state.logprobs is None and len(constraint.forced()) >= least
    return constraint.searching or bool(forces)
