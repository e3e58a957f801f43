"""Device properties that kernels depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_LEAST_SHARED = 99


@dataclass(frozen=True)
class DeviceProperties:
    """Multiprocessors, and the most bytes of shared memory of a block. The default is an H200."""

    processors: int = 132
    shared: int = 227 * 1024

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> DeviceProperties:
        """Properties by the compute capability in `info` (`mx.device_info`); an H200's where there is none."""
        if "compute_capability_major" not in info:
            return cls()
        capability = int(info["compute_capability_major"]), int(info["compute_capability_minor"])
        return cls(shared=_SHARED.get(capability, _LEAST_SHARED) * 1024)
