"""Connections as metrics, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ConnectionsSource(Protocol):
    """A front's connections; no limit is None."""

    @property
    def open(self) -> int: ...
    @property
    def limit(self) -> int | None: ...


class ConnectionsCollector(Collector):
    """`sources` by the name of their front."""

    def __init__(self) -> None:
        self.sources: dict[str, ConnectionsSource] = {}

    def describe(self) -> list[Metric]:
        return [GaugeMetricFamily("treadle_connections", ""), GaugeMetricFamily("treadle_connections_limit", "")]

    def collect(self) -> Iterator[Metric]:
        now = GaugeMetricFamily("treadle_connections", "Connections open now", labels=["front"])
        limit = GaugeMetricFamily("treadle_connections_limit", "Connections that may be open", labels=["front"])
        for front, source in self.sources.items():
            now.add_metric([front], float(source.open))
            limit.add_metric([front], float("inf") if source.limit is None else float(source.limit))
        yield now
        yield limit
