"""Service tiers of OpenAI's API, served as priorities of the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UnsupportedParameter

if TYPE_CHECKING:
    from .authentication import Caller

DEFAULT, FLEX, PRIORITY = "default", "flex", "priority"
TIERS = ("auto", DEFAULT, FLEX, PRIORITY)


def check_tier(tier: str | None) -> str | None:
    """Return the tier. Raises UnsupportedParameter for one that is not in TIERS."""
    if tier is not None and tier not in TIERS:
        raise UnsupportedParameter(
            f"service_tier is '{tier[:40]}', which is not supported here: use one of {', '.join(TIERS)}",
            param="service_tier",
        )
    return tier


def priority_of(tier: str, caller: Caller) -> int:
    """Return the priority of a tier: "flex" goes behind all others; "priority" goes before them, where `caller` may
    raise its priority, and is served as the default elsewhere."""
    if tier == PRIORITY:
        return -1 if caller.may_raise_priority else 0
    return 1 if tier == FLEX else 0


def tier_of(priority: int) -> str:
    """Return the tier that a request of this priority is served with."""
    if priority == 0:
        return DEFAULT
    return FLEX if priority > 0 else PRIORITY
