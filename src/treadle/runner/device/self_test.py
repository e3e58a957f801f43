"""Self-tests of custom kernels: each is compared with a reference at every start, on this device, before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...core.compute_path import KernelName, KernelState, KernelStatus
from ..base import RunnerBroken
from .owner_thread import mlx_runtime

_log = logging.getLogger(__name__)
T = TypeVar("T")

FAULTS = (
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    AssertionError,
    RuntimeError,
    RunnerBroken,
)
"""What a model's code raises that is called in another way than its author expected, and what a kernel's compiler
raises."""


@dataclass(frozen=True)
class SelfTested(Generic[T]):
    """A kernel with the outcome of its self-test; None where it may not be used."""

    kernel: T | None
    status: KernelStatus

    def required(self) -> T:
        """The kernel. Raises RunnerBroken where it failed its self-test."""
        if self.kernel is None:
            raise RunnerBroken(f"the kernel {self.status.name} failed its self-test: {self.status.reason}")
        return self.kernel


def self_tested(name: KernelName, make: Callable[[], T], why_not: Callable[[T], str], *, instead: str) -> SelfTested[T]:
    """Make a kernel and test it. `why_not` returns what is wrong with it, or an empty text. Where the kernel fails, or
    MLX can't make or run it, one warning says what is used `instead`."""
    try:
        made = make()
        with mlx_runtime(f"testing {name}"):
            reason = why_not(made)
    except (ValueError, RuntimeError, RunnerBroken) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        _log.warning("the kernel %s failed its self-test (%s): %s", name, reason, instead)
        return SelfTested(None, KernelStatus(name, KernelState.FAILED, reason))
    return SelfTested(made, KernelStatus(name, KernelState.ACTIVE))


def not_applicable(name: KernelName, reason: str) -> KernelStatus:
    """The status of a kernel that has nothing to do."""
    return KernelStatus(name, KernelState.NOT_APPLICABLE, reason)
