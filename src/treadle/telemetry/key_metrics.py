"""Collector of usage metrics by API key, read at each scrape at no cost to requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class KeyUsage(Protocol):
    """Usage of one API key: totals since the start, and running sequences."""

    @property
    def key(self) -> str: ...
    @property
    def running(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def refused(self) -> int: ...


class KeySource(Protocol):
    """Source of the usage by API key. Key names become label values, one series a key."""

    def usage(self) -> Sequence[KeyUsage]: ...


class KeyCollector(Collector):
    """Collector of one server's API keys."""

    def __init__(self, source: KeySource) -> None:
        self._source = source

    def describe(self) -> list[Metric]:
        return [*self._families()]

    def collect(self) -> Iterator[Metric]:
        families = self._families()
        for usage in self._source.usage():
            values = (usage.requests, usage.tokens, usage.refused, usage.running)
            for family, value in zip(families, values, strict=True):
                family.add_metric([usage.key], value)
        yield from families

    def _families(self) -> list[CounterMetricFamily | GaugeMetricFamily]:
        label = ["key"]
        return [
            CounterMetricFamily("treadle_key_requests", "Requests served, by API key", labels=label),
            CounterMetricFamily("treadle_key_tokens", "Prompt and completion tokens, by API key", labels=label),
            CounterMetricFamily("treadle_key_refused", "Requests over a limit of their API key", labels=label),
            GaugeMetricFamily("treadle_key_running", "Sequences that run or wait, by API key", labels=label),
        ]
