"""How much memory there is, on the device and here, and what a sequence's cache takes of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import ConfigError
from ..units import size
from .stock.buffer import STEP

_log = logging.getLogger(__name__)

BUDGET_SHARE = 0.5
"""Of what the weights leave: a row that joins a batch makes a second copy of it for a moment, and rows are padded."""
PAGES_SHARE = 0.9
"""The same where rows are in pages, of which there are no copies, if steps need no more than the rest."""
_SPARE = 1.1
"""Of what steps were measured to take: pieces of memory are not always found where one is free."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Device:
    """Where MLX computes: `kind` is cpu, metal or cuda."""

    kind: str
    name: str


@dataclass(frozen=True)
class KvCost:
    """What the cache of one running sequence takes: `row_bytes` whatever its length, and `token_bytes` a token."""

    token_bytes: int
    row_bytes: int


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


def host_total_bytes(cgroup: Path = _CGROUP) -> int:
    """Bytes of this machine's memory, its container's limit respected."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def host_available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes this process can still take on this machine without swapping, its container's limit respected."""
    found = [_meminfo_available(meminfo), _cgroup_available(cgroup)]
    known = [value for value in found if value is not None]
    return min(known) if known else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _meminfo_available(path: Path) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_available(folder: Path) -> int | None:
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used + _idle_file_cache(folder))


def _idle_file_cache(folder: Path) -> int:
    """Bytes of files that the container's count includes and the kernel drops on demand, such as weights read once."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


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
    """Bytes that are left when `steps` bytes are there for steps."""
    return max(0, usable_bytes(kind) - mx.get_active_memory() - int(steps * _SPARE))


def blocks(cost: KvCost, budget: int, rows: int) -> int:
    """How many blocks of STEP tokens `rows` rows may hold within `budget` bytes; 0 where nothing limits them."""
    if not budget or not cost.token_bytes:
        return 0
    return max(1, (budget - rows * cost.row_bytes) // (STEP * cost.token_bytes))


def limit_free_pool(kind: str) -> None:
    """Bound what MLX keeps of freed buffers: enough to reuse a step's, not enough to crowd out the rest."""
    total = usable_bytes(kind)
    if total:
        mx.set_cache_limit(min(4 << 30, max(256 << 20, total // 16)))


def kv_cost(leaves: list[Any], tokens: int, context: int) -> KvCost:
    """Measure the caches of one row that holds `tokens` tokens (`leaves` holds no lists of caches).

    A sliding window counts as the whole window a row, unless the context is no longer than the window. Buffers grow
    in steps: half a step more is counted for each row.
    """
    token_bytes = row_bytes = 0
    for cache in leaves:
        each = _token_bytes(cache, tokens)
        window = getattr(cache, "max_size", 0)
        if window and window < context:
            row_bytes += each * window
        elif each:
            token_bytes += each
            row_bytes += each * getattr(cache, "step", 0) // 2
        else:
            row_bytes += int(cache.nbytes)
    return KvCost(token_bytes, row_bytes)


def _token_bytes(cache: Any, tokens: int) -> int:
    """Bytes a token takes; 0 for a cache whose size does not depend on the length."""
    if (keys := getattr(cache, "keys", None)) is not None:
        return int(cache.nbytes) // int(keys.shape[-2])
    if hasattr(cache, "lengths") or hasattr(cache, "keys"):  # recurrent state, or a layer that never ran
        return 0
    return -(-int(cache.nbytes) // max(1, tokens))


def statistics_of() -> dict[str, int]:
    """MLX's own counters."""
    return {
        "active_bytes": mx.get_active_memory(),
        "peak_bytes": mx.get_peak_memory(),
        "cache_bytes": mx.get_cache_memory(),
    }


def give_back(clear: Callable[[], None] = mx.clear_cache) -> int:
    """Return freed buffers to the system; how many bytes that were."""
    before = mx.get_cache_memory()
    clear()
    return max(0, before - mx.get_cache_memory())
