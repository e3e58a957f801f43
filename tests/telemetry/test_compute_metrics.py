"""The compute path in a scrape: one backend, and one state for each kernel."""

from __future__ import annotations

from treadle.core.capabilities import Capabilities
from treadle.core.compute_path import Backend, ComputePath, KernelName, KernelState, KernelStatus
from treadle.telemetry.metrics import Metrics


class Engine:
    capabilities: Capabilities | None = None


def test_nothing_is_shown_before_the_first_start_and_then_one_of_each() -> None:
    engine, metrics = Engine(), Metrics()
    metrics.watch_compute(engine)
    assert "treadle_compute_info{" not in metrics.render().decode()
    kernels = (
        KernelStatus(KernelName.READBACK, KernelState.FAILED, "numbers do not arrive"),
        KernelStatus(KernelName.SAMPLING, KernelState.ACTIVE),
    )
    path = ComputePath(Backend.PAGED, Backend.PAGED, True, 1, True, kernels)
    engine.capabilities = Capabilities("m", "llama", 10, 10, "cuda", "bfloat16", compute=path)
    labels = {"backend": "paged", "fused": "true", "lookahead": "1"}
    assert metrics.value("treadle_compute_info", labels) == 1
    assert metrics.value("treadle_kernel_info", {"kernel": "readback", "state": "failed"}) == 1
    assert metrics.value("treadle_kernel_info", {"kernel": "sampling", "state": "active"}) == 1
    assert metrics.render().decode().count("treadle_kernel_info{") == 2
