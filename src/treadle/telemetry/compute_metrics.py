"""Info metrics of the compute path: the KV backend, and the state of each custom kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..core.capabilities import Capabilities


class ComputeSource(Protocol):
    """Anything that knows the engine's capabilities, once there are any."""

    @property
    def capabilities(self) -> Capabilities | None: ...


class ComputeCollector(Collector):
    """Shows the compute path of the engine that started last; nothing before the first start."""

    def __init__(self, source: ComputeSource) -> None:
        self._source = source

    def describe(self) -> list[Metric]:
        return list(_families())

    def collect(self) -> Iterator[Metric]:
        backend, kernels = _families()
        if (can := self._source.capabilities) is not None:
            path = can.compute
            backend.add_metric([path.backend, str(path.fused).lower(), str(path.lookahead)], 1)
            for kernel in path.kernels:
                kernels.add_metric([kernel.name, kernel.state], 1)
        yield from (backend, kernels)


def _families() -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
    return (
        GaugeMetricFamily(
            "treadle_compute_info",
            "1 for the KV backend, whether layers are fused, and the steps of look-ahead",
            labels=["backend", "fused", "lookahead"],
        ),
        GaugeMetricFamily("treadle_kernel_info", "1 for the state of each custom kernel", labels=["kernel", "state"]),
    )
