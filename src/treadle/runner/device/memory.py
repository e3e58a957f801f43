"""Memory of the device and the host: sizes, budgets, and the bound of MLX's pool of freed buffers."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ...errors import ConfigError
from ...units import size
from .cgroups import Group, limited_groups

_log = logging.getLogger(__name__)

BUDGET_SHARE = 0.5
"""Share of the memory that the weights leave, where sequences are padded and a join copies the batch for a moment."""
PAGES_SHARE = 0.9
"""The same for pages, which are never copied, where steps need no more than the rest."""
_SPARE = 1.1
"""Margin over the measured memory of steps, for fragmentation."""

LEAST_POOL = 64 << 20
_LOGITS_COPIES = 8
"""The most arrays as large as a step's logits that sampling makes."""

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Device:
    """The device that MLX computes on: `kind` is cpu, metal or cuda."""

    kind: str
    name: str


def device() -> Device:
    """MLX's default device."""
    name = str(mx.device_info().get("device_name", "unknown"))
    if mx.default_device() == mx.cpu:
        return Device("cpu", name)
    return Device("metal" if mx.metal.is_available() else "cuda", name)


def usable_bytes(kind: str) -> int:
    """Bytes that this process may come to hold on the device in all; 0 when nothing says so."""
    held = mx.get_active_memory() + mx.get_cache_memory()
    if kind == "cpu":
        return held + host_available_bytes()
    info = mx.device_info()
    if kind == "cuda" and "free_memory" in info:  # other processes may hold some of it
        return held + int(info["free_memory"])
    return int(info.get("max_recommended_working_set_size") or info.get("total_memory") or 0)


def most_bytes(kind: str) -> int:
    """Bytes of the device, also those that other processes hold; 0 when nothing says so."""
    if kind == "cpu":
        return host_total_bytes()
    info = mx.device_info()
    return int(info.get("max_recommended_working_set_size") or info.get("total_memory") or 0)


def host_total_bytes(groups: Sequence[Group] | None = None) -> int:
    """Bytes of this machine's memory, or of the smallest control group that this process is in."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(group.limit for group in (limited_groups() if groups is None else groups))])


def host_available_bytes(meminfo: Path = _MEMINFO, groups: Sequence[Group] | None = None) -> int:
    """Bytes that this process can still take without swapping, the limits of its control groups respected."""
    free = _meminfo_available(meminfo)
    known = [] if free is None else [free]
    known += [group.left for group in (limited_groups() if groups is None else groups)]
    return min(known) if known else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _meminfo_available(path: Path) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def kv_budget(asked: int | None, kind: str, share: float = BUDGET_SHARE) -> int:
    """Bytes that all running sequences together may hold: what was asked for, or a share of what is left (0: unknown).

    Call it when the weights are in memory. Raises ConfigError when more was asked for than the device has beside them,
    whoever holds it: what other programs hold now must not keep an engine that died from its restart, and is a warning.
    """
    total = usable_bytes(kind)
    left = total - mx.get_active_memory()
    if asked is not None:
        most = most_bytes(kind)
        check_budget(asked, most - mx.get_active_memory() if most else None)
        if total and asked > left:
            _log.warning(
                "the KV cache may take %s and only %s are free now: requests may fail for lack of memory; end other "
                "programs, or give less --memory",
                size(asked),
                size(max(0, left)),
            )
        return asked
    return max(1, int(left * share)) if total else 0


def check_budget(asked: int, left: int | None) -> None:
    """Raise ConfigError when a KV cache of `asked` bytes exceeds the bytes `left` by the weights (None: unknown)."""
    if left is not None and asked > left:
        raise ConfigError(
            f"`memory` is {size(asked)}, and {size(max(0, left))} are left beside the weights: give at most that, "
            "or leave `memory` out",
            param="memory",
        )


def left_by(steps: int, kind: str) -> int:
    """Bytes left beside `steps` bytes for steps."""
    return max(0, usable_bytes(kind) - mx.get_active_memory() - int(steps * _SPARE))


def limit_free_pool(kind: str) -> int:
    """Bound MLX's pool of freed buffers: enough to reuse a step's, not enough to crowd out the rest. The bound in
    bytes; 0 where the device does not report its memory."""
    total = usable_bytes(kind)
    most = min(4 << 30, max(256 << 20, total // 16)) if total else 0
    if most:
        mx.set_cache_limit(most)
    return most


class FreePool:
    """Bound of MLX's pool of freed buffers, so that it and the memory in use stay within `ceiling` bytes: `most` bytes
    while much is free, `least` in any case, so that a decode step finds its buffers again."""

    def __init__(self, ceiling: int, most: int, least: int) -> None:
        self._ceiling = ceiling
        self._most = most
        self._least = min(least, most)
        self._limit = most

    def follow(self, active: int) -> None:
        """Adjust the bound to `active` bytes in use. Call between steps."""
        wanted = min(self._most, max(self._least, self._ceiling - active))
        if abs(wanted - self._limit) > self._limit >> 3:
            self._limit = wanted
            mx.set_cache_limit(wanted)


def free_pool(kind: str, budget: int, logits: int) -> FreePool | None:
    """The pool beside the weights, which are in memory now, and a KV cache of `budget` bytes, where a full batch has
    `logits` logits a step. None where its bound stays as it is: on a GPU, where buffers cost much to make anew."""
    most = limit_free_pool(kind)
    if kind != "cpu" or not budget or not most:
        return None
    return FreePool(mx.get_active_memory() + budget, most, max(LEAST_POOL, _LOGITS_COPIES * 4 * logits))


def statistics_of() -> dict[str, int]:
    """MLX's own counters."""
    return {
        "active_bytes": mx.get_active_memory(),
        "peak_bytes": mx.get_peak_memory(),
        "cache_bytes": mx.get_cache_memory(),
    }


def give_back(clear: Callable[[], None] = mx.clear_cache) -> int:
    """Return freed buffers to the system; their bytes."""
    before = mx.get_cache_memory()
    clear()
    return max(0, before - mx.get_cache_memory())


def trim() -> bool:
    """Return the pages that malloc keeps of what was freed, where it does (glibc); whether there were any. Takes
    milliseconds."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return release is not None and bool(release(ctypes.c_size_t(0)))
