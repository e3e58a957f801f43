"""Tickets of refused requests, and arrivals of new and returning ones."""

from __future__ import annotations

from dataclasses import dataclass

NEWCOMER = 2**62


@dataclass(slots=True, eq=False)
class Ticket:
    """Place in line of a refused request. Times are in seconds of the gate's clock.

    - `since`: its first refusal; `told`: its last one, at which its client got the time to return.
    - `due`: its place is expected to be free; `back`: the time its client got, at most as late; `turn`: that time plus
      outages since; `until`: the end of its grace.
    - `via`: the connection of its last attempt.
    """

    id: str
    order: int
    tenant: str
    fingerprint: int
    counts: bool  # the client says of each request whether it is a repeat
    rows: int = 1
    guessed: bool = True  # its body is not read yet, so that its rows are not known
    tokens: int = 0
    via: int = 0
    since: float = 0.0
    told: float = 0.0
    due: float = 0.0
    back: float = 0.0
    turn: float = 0.0
    until: float = 0.0
    in_line: bool = False
    looked_at: float | None = None  # when the line next looks at it
    door: float = float("-inf")


@dataclass(slots=True, eq=False)
class Arrival:
    """One attempt to be admitted.

    - `tenant`: the tenant whose share it counts against; `ticket_id`: the ticket that it names, if any.
    - `fingerprint`: a hash that repeats of the request share (0: none); `via`: a hash of its connection (0: unknown).
    - `repeat`: whether it is a client's second attempt or later; None if the client does not say.
    - `order`: its place in arrival order, once it has one; `since`: its first refusal, in seconds.
    """

    tenant: str = ""
    fingerprint: int = 0
    ticket_id: str = ""
    repeat: bool | None = None
    via: int = 0
    ticket: Ticket | None = None
    order: int = NEWCOMER
    since: float | None = None
