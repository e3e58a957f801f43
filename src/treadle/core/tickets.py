"""Refused requests and those that come: what the line knows of each."""

from __future__ import annotations

from dataclasses import dataclass

NEWCOMER = 2**62


@dataclass(slots=True, eq=False)
class Ticket:
    """A refused request's place in line. `due` is when its place is expected, `back` when its client was told to come,
    at most as late, `turn` that time and the outage since, `told` when it was told that, `since` when it was first
    refused; all in seconds of the gate's clock. `via` is the connection that it came on last."""

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
    """One attempt to get in. `tenant` is whose share it counts against, `ticket_id` the ticket that it names, if any,
    and `fingerprint` a hash that the same request has again (0: none). `repeat`: whether it is a client's second
    attempt or later, None where the client does not say. `via` is a hash of its connection (0: unknown). `order` is its
    place in arrival order once it has one, `since` when it was first refused, in seconds."""

    tenant: str = ""
    fingerprint: int = 0
    ticket_id: str = ""
    repeat: bool | None = None
    via: int = 0
    ticket: Ticket | None = None
    order: int = NEWCOMER
    since: float | None = None
