"""A step in flight, from its plan to its result."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import StepPlan
from .sequence import Sequence
from .step_times import Charge


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A plan in flight, the sequences that its ids stand for, and its charge to the prefill budget."""

    plan: StepPlan
    sequences: dict[str, Sequence]
    charge: Charge
