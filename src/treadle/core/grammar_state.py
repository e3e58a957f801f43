"""State of a grammar that constrained sequences wait for."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import msgspec

from .messages import Constraint


class GrammarState(Enum):
    """State of a grammar in the runner."""

    PENDING = "pending"  # being compiled
    READY = "ready"
    FAILED = "failed"


class GrammarStatus(msgspec.Struct, frozen=True):
    """State of a grammar; `message` says, for the client, why it failed."""

    state: GrammarState
    message: str = ""


READY = GrammarStatus(GrammarState.READY)
PENDING = GrammarStatus(GrammarState.PENDING)

NO_GRAMMARS = "structured output is off on this server: send the request without it"

GrammarLookup = Callable[[Constraint], GrammarStatus]


def no_grammars(constraint: Constraint) -> GrammarStatus:
    """Return FAILED: the runner compiles no grammars."""
    return GrammarStatus(GrammarState.FAILED, NO_GRAMMARS)
