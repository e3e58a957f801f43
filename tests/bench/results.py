"""Results that are made up, for what reads, compares and shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.bench.samples import Control, Machine, Result, Round, Sample, TargetInfo, WorkloadInfo


def sample(ttft_s: float = 0.4, gap_s: float = 0.1, pieces: int = 4, **given: Any) -> Sample:
    """A whole answer."""
    times = [ttft_s + i * gap_s for i in range(pieces)]
    whole: dict[str, Any] = {"id": "1", "role": "all", "due_s": 0.0, "sent_s": 0.0, "outcome": "ok", "status": 200}
    return Sample(**(whole | {"piece_s": times, "end_s": times[-1] if times else ttft_s} | given))


def refused(**given: Any) -> Sample:
    return sample(pieces=0, outcome="refused", reason="503 busy", status=503, **given)


def round_of(target: str, number: int, *samples: Sample, **given: Any) -> Round:
    return Round(target=target, number=number, wall_s=1.0, samples=list(samples), **given)


def info(**given: Any) -> WorkloadInfo:
    whole: dict[str, Any] = {"seed": 0, "options": {"c": 4.0}, "requests": 16, "concurrency": 4, "digest": "d16e57"}
    return WorkloadInfo(**(whole | given))


def result(*targets: str, rounds: dict[str, list[Round]] | None = None, **given: Any) -> Result:
    """Every target named here, and the workloads that `rounds` has."""
    rounds = rounds or {}
    machine = Machine("Linux 6", "AMD EPYC", 2, 25 * 2**30, "3.11.7", "0.1.0")
    whole: dict[str, Any] = {
        "format": 1,
        "started": "2026-01-02T03:04:05+00:00",
        "machine": machine,
        "targets": [TargetInfo(name, "http://127.0.0.1:8000", "demo", "serve --port 8000") for name in targets],
        "endpoint": "chat",
        "workloads": {name: info() for name in rounds},
        "rounds": rounds,
    }
    return Result(**(whole | given))


def burst(**ttft_s: float | Sequence[float]) -> Result:
    """One workload; per target the TTFT of each round."""
    rounds = [
        round_of(
            name,
            number,
            sample(seconds, sent_s=0.0),
            sample(seconds, sent_s=0.1),
            control=[Control("/health", 0.0, 0.002, 200)],
            lag_s=[0.0001],
        )
        for name, each in ttft_s.items()
        for number, seconds in enumerate([each] if isinstance(each, int | float) else each, 1)
    ]
    return result(*ttft_s, rounds={"burst": rounds})
