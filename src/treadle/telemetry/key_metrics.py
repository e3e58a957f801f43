"""Prometheus metrics of each API key's use of the server, read at every scrape: no request pays for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class KeyUsage(Protocol):
    """What one API key has used since the start, and has running."""

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
    """Anything that knows the API keys' use of the server. Their names are the labels: as many as there are keys."""

    def usage(self) -> Sequence[KeyUsage]: ...


class KeyCollector(Collector):
    """The families of one server's keys."""

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
