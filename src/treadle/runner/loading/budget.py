"""Check of the memory for caches."""

from __future__ import annotations

from ...errors import ConfigError
from ...units import size
from ..kv.backend import LeastMemory


def check_budget(name: str, budget: int, least: LeastMemory, param: str = "memory") -> None:
    """Raise ConfigError where `budget` bytes (0: no limit) do not hold the least that the model `name` starts with.
    `param` is the setting that asked for it."""
    if 0 < budget < least.nbytes:
        raise ConfigError(
            f"{name} needs {size(least.nbytes)} of cache for {least.holds}, and {size(budget)} are there: {least.fix}",
            param=param,
        )
