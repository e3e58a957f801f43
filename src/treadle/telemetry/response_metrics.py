"""Collector of the metrics of stored responses, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ResponsesSource(Protocol):
    """Store of responses: their number, their size and its limit in bytes, and the number of evicted ones."""

    def __len__(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def limit(self) -> int: ...
    @property
    def evicted(self) -> int: ...


class ResponsesCollector(Collector):
    """Collector over one store, `source`."""

    def __init__(self, source: ResponsesSource) -> None:
        self.source = source

    def describe(self) -> list[Metric]:
        return list(self.collect())

    def collect(self) -> Iterator[Metric]:
        source = self.source
        yield GaugeMetricFamily("treadle_stored_responses", "Responses in the store", len(source))
        yield GaugeMetricFamily("treadle_stored_responses_bytes", "Their size", source.size)
        yield GaugeMetricFamily("treadle_stored_responses_limit_bytes", "The most that it may be", source.limit)
        yield CounterMetricFamily(
            "treadle_evicted_responses", "Responses that were evicted from a full store", source.evicted
        )
