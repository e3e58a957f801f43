"""Engine part of `/v1/status` (D3), from the client's own state: the engine itself may hang."""

from __future__ import annotations

from typing import Any

import msgspec

from ..core.capabilities import Capabilities, SpecPrefillCapabilities, SpeculationCapabilities
from ..core.draft_budget import NOTHING_READY
from ..core.messages import StepReport
from ..core.statistics import EngineStatistics
from .client import EngineClient
from .deaths import Cause
from .generation import Generation


def status_of(client: EngineClient, tenant: str | None = None) -> dict[str, Any]:
    """Return admission, live requests, the engine's last statistics and their age in seconds. With `tenant` the
    requests are those of this tenant alone: ids may be its clients' choice, and so another tenant's too."""
    now = client.clock()
    health = client.health()
    generations = client.dispatch.generations
    waits = [now - generation.submitted for generation in generations if generation.started is None]
    can = client.capabilities
    serialized = client.admission.limits.max_running == 1 or (can is not None and can.path == "serialized")
    path = "serialized" if serialized else "batched"
    return {
        "state": health.state,
        "ready": health.ready,
        "reason": health.reason,
        "path": path,
        "compute": None if can is None else {"summary": can.compute.summary(), **msgspec.to_builtins(can.compute)},
        "speculation": None if can is None else _speculation_status(can.steps.speculation, client.report),
        "spec_prefill": None if can is None else _spec_prefill_status(can.steps.spec_prefill, client.report),
        "admission": {
            **client.gate.statistics(now),
            "running": len(generations) - len(waits),
            "waiting": len(waits),
            "oldest_wait_s": round(max(waits, default=0.0), 6),
        },
        "requests": [
            _request_status(generation, path, now)
            for generation in generations
            if tenant in (None, generation.request.tenant)
        ],
        "engine": _engine_status(client, now),
        "capabilities": None if can is None else _flat(can),
    }


def _flat(can: Capabilities) -> dict[str, Any]:
    """Return all fields side by side; those of `kv` with `kv_` before their names. The compute path, speculation and
    SpecPrefill, which the status shows beside the capabilities, are left out."""
    fields: dict[str, Any] = msgspec.to_builtins(can)
    kv, steps, _ = fields.pop("kv", {}), fields.pop("steps", {}), fields.pop("compute", None)  # defaults are omitted
    steps.pop("speculation", None)
    steps.pop("spec_prefill", None)
    return {**fields, **{f"kv_{name}": value for name, value in kv.items()}, **steps}


def _speculation_status(can: SpeculationCapabilities, report: StepReport | None) -> dict[str, Any]:
    """Return what drafts tokens, whether they are verified and why not, and what became of them."""
    statistics = EngineStatistics() if report is None else report.statistics
    found, drafter = statistics.speculation, statistics.runner.drafter
    reason = can.reason or (NOTHING_READY if report is None else found.reason)
    if reason == NOTHING_READY and drafter.backlog:
        reason += f": the draft model has yet to compute {drafter.backlog} tokens of its sequences"
    return {
        "drafters": list(can.drafters),
        "draft_tokens": can.draft_tokens,
        "on": found.on,
        "reason": reason,
        "steps": found.steps,
        "drafted": found.drafted,
        "accepted": found.accepted,
        "acceptance": round(found.accepted / max(1, found.drafted), 4),
        "tokens_per_step": round(1 + found.gained / max(1, found.rows), 3),
        "chances": list(found.chances),
        "kv_bytes": drafter.kv_bytes,
        "backlog": drafter.backlog,
        "reused_tokens": drafter.prefix.reused,
        "match_chances": {str(match): chance for match, chance in found.match_chances},
    }


def _spec_prefill_status(can: SpecPrefillCapabilities, report: StepReport | None) -> dict[str, Any]:
    """Return what scores prompts and which, and what became of them."""
    statistics = EngineStatistics() if report is None else report.statistics
    found, scorer = statistics.spec_prefill, statistics.runner.scorer
    if not can.scorer:
        return {"scorer": None}
    return {
        "scorer": can.scorer,
        "keep": can.keep,
        "min_tokens": can.min_tokens,
        "longest": can.longest,
        "scoring": found.scoring,
        "prompts": found.prompts,
        "scored_tokens": found.scored_tokens,
        "kept_tokens": found.kept_tokens,
        "scoring_s": round(found.scoring_s, 3),
        "kv_bytes": scorer.kv_bytes,
        "reused_tokens": scorer.prefix.reused,
        "failed": found.failed,
        "reason": found.reason,
    }


def _engine_status(client: EngineClient, now: float) -> dict[str, Any]:
    supervisor, report = client.supervisor, client.report
    beat = supervisor.last_beat
    return {
        "state": supervisor.state.value,
        "pid": supervisor.pid,
        "restarts": supervisor.restarts,
        "deaths": {cause.value: supervisor.deaths.by_cause[cause] for cause in Cause},
        "deaths_explained": supervisor.deaths.explained,
        "replayed": client.dispatch.replay.replayed,
        "held": client.dispatch.replay.held,
        "quarantined": client.dispatch.quarantine.condemned,
        "quarantine_size": len(client.dispatch.quarantine),
        "load_s": round(supervisor.load_s, 3),
        "last_step": None if report is None else report.step,
        "last_heard_s": None if beat is None else round(now - beat, 6),
        "statistics": None if report is None else msgspec.to_builtins(report.statistics),
    }


def _request_status(generation: Generation, path: str, now: float) -> dict[str, Any]:
    return {
        "id": generation.tag,
        "kind": generation.kind,
        "phase": generation.phase,
        "waits_for": generation.waits_for.value if generation.phase == "waiting" else None,
        "path": path,
        "age_s": round(now - generation.submitted, 6),
        "prompt_tokens": len(generation.request.prompt),
        "prompt_tokens_done": generation.prompt_tokens_done,
        "completion_tokens": generation.completion_tokens,
        "cached_tokens": generation.cached_tokens,
        "kept_tokens": generation.kept_tokens if generation.scored_tokens else None,
        "max_tokens": generation.request.max_tokens,
        "replays": max(0, generation.times_sent - 1),
    }
