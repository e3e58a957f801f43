"""The prefix cache, as the fronts show and empty it."""

from __future__ import annotations

from typing import Any

from ..core.messages import PrefixStatistics
from ..engine.client import EngineClient

RESET_JOB = "reset_prefix_cache"


def hit_rate(prefix: PrefixStatistics) -> float:
    """The part of the tokens looked up that was found; 0 before any was."""
    return prefix.reused / prefix.looked_up if prefix.looked_up else 0.0


def prefix_status(engine: EngineClient) -> dict[str, Any]:
    """What `/v1/status` shows of it: the numbers of the engine's last report, in tokens and bytes."""
    report, can = engine.report, engine.capabilities
    prefix = PrefixStatistics() if report is None else report.statistics.runner.prefix
    return {
        "enabled": can is not None and can.prefix_cache,
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
    """Drop every cached prompt that no running request uses, between two steps; how many tokens that were. Raises
    EngineUnavailable where there is no engine, EngineDied where it was lost meanwhile."""
    if engine.capabilities is not None and not engine.capabilities.prefix_cache:
        return 0
    return int(await engine.jobs.run(RESET_JOB))
