"""Statistics and reset of the prefix cache, for the fronts."""

from __future__ import annotations

from typing import Any

from ..core.statistics import PrefixStatistics
from ..engine.client import EngineClient

RESET_JOB = "reset_prefix_cache"


def hit_rate(prefix: PrefixStatistics) -> float:
    """Return the part of the looked-up tokens that was found; 0 before any look-up."""
    return prefix.reused / prefix.looked_up if prefix.looked_up else 0.0


def prefix_status(engine: EngineClient) -> dict[str, Any]:
    """Return the entry of `/v1/status`: the numbers of the engine's last report, in tokens and bytes."""
    report, capabilities = engine.report, engine.capabilities
    prefix = PrefixStatistics() if report is None else report.statistics.runner.prefix
    return {
        "enabled": capabilities is not None and capabilities.steps.prefix_cache,
        "looked_up_tokens": prefix.looked_up,
        "reused_tokens": prefix.reused,
        "hit_rate": round(hit_rate(prefix), 6),
        "copied_bytes": prefix.copied_bytes,
        "stored_tokens": prefix.stored,
        "evicted_tokens": prefix.evicted,
        "held_tokens": prefix.held,
        "held_bytes": prefix.held_bytes,
    }


async def reset_prefixes(engine: EngineClient) -> int:
    """Drop every cached prompt that no running request uses, between two steps; return the dropped tokens. Raises
    EngineUnavailable if there is no engine, EngineDied if it was lost meanwhile."""
    if engine.capabilities is not None and not engine.capabilities.steps.prefix_cache:
        return 0
    return int(await engine.jobs.run(RESET_JOB))
