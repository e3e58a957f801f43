"""Collector of connection metrics, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ConnectionsSource(Protocol):
    """Connections of a front. `limit`: None if there is no limit. `parts`: the same by kind of call."""

    @property
    def open(self) -> int: ...
    @property
    def limit(self) -> int | None: ...
    @property
    def parts(self) -> Mapping[str, ConnectionsSource]: ...


class ConnectionsCollector(Collector):
    """Collector over `sources`, by the name of their front."""

    def __init__(self) -> None:
        self.sources: dict[str, ConnectionsSource] = {}

    def describe(self) -> list[Metric]:
        return [GaugeMetricFamily(name, "") for name in ("treadle_connections", "treadle_connections_limit")]

    def collect(self) -> Iterator[Metric]:
        yield from _gauges("treadle_connections", "Connections", "front", self.sources)
        for front, source in self.sources.items():
            if source.parts:
                yield from _gauges(f"treadle_{front}_calls", "Calls", "kind", source.parts)


def _gauges(name: str, noun: str, label: str, sources: Mapping[str, ConnectionsSource]) -> Iterator[Metric]:
    now = GaugeMetricFamily(name, f"{noun} open now", labels=[label])
    limit = GaugeMetricFamily(f"{name}_limit", f"{noun} that may be open", labels=[label])
    for value, source in sources.items():
        now.add_metric([value], float(source.open))
        limit.add_metric([value], float("inf") if source.limit is None else float(source.limit))
    yield now
    yield limit
