"""Prometheus metrics of the engine client and the fronts, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..core.messages import StepReport
from ..core.refusals import Refusal
from ..core.statistics import EngineStatistics, GrammarStatistics, PrefixStatistics
from .compute_metrics import ComputeCollector, ComputeSource
from .connections import ConnectionsCollector, ConnectionsSource
from .counters import StatisticsCounters, increase
from .exposition import format_family
from .image_metrics import ImageMetrics
from .key_metrics import KeyCollector, KeySource
from .logs import log_statistics
from .response_metrics import ResponsesCollector, ResponsesSource
from .spec_prefill_metrics import SpecPrefillMetrics
from .speculation_metrics import SpeculationMetrics

# Seconds. A model on a laptop may take minutes to its first token and a step of a large batch is milliseconds.
LONG_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
SHORT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LAG_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

DEATHS = ("crash", "hang", "killed")
STATES = ("starting", "ready", "restarting", "draining", "stopping", "stopped", "failed", "blocked")


class HealthLike(Protocol):
    """The server's health as shown by a scrape."""

    @property
    def live(self) -> bool: ...
    @property
    def ready(self) -> bool: ...
    @property
    def state(self) -> str: ...


class HealthSource(Protocol):
    """Source of the server's health; cheap to query."""

    def health(self) -> HealthLike: ...


class Metrics:
    """Metrics of one server: an observer of the engine client; the fronts call `http`, `rpc` and `loop_lag`.

    Every instance has its own registry, so that a process can hold several servers.
    """

    def __init__(self) -> None:
        self.registry = _Registry()
        self._last = EngineStatistics()
        self._connections: ConnectionsCollector | None = None
        self._responses: ResponsesCollector | None = None
        self._requests()
        self._engine()
        self._prefixes = _Prefixes(self.registry)
        self._grammars = _Grammars(self.registry)
        self._speculation = SpeculationMetrics(self.registry)
        self._images = ImageMetrics(self.registry)
        self._spec_prefill = SpecPrefillMetrics(self.registry)
        self._front()
        self.registry.register(_LogCollector())

    def _requests(self) -> None:
        registry = self.registry
        self._wait = Histogram(
            "treadle_queue_seconds",
            "From arrival to admission by the scheduler",
            ["kind"],
            buckets=LONG_BUCKETS,
            registry=registry,
        )
        self._ttft = Histogram(
            "treadle_time_to_first_token_seconds",
            "From arrival to the first generated token",
            ["kind"],
            buckets=LONG_BUCKETS,
            registry=registry,
        )
        self._gap = Histogram(
            "treadle_inter_token_seconds",
            "Time per token between two deliveries of one sequence",
            ["kind"],
            buckets=SHORT_BUCKETS,
            registry=registry,
        )
        self._total = Histogram(
            "treadle_request_seconds",
            "From arrival to the end of a sequence",
            ["kind"],
            buckets=LONG_BUCKETS,
            registry=registry,
        )
        self._finished = Counter(
            "treadle_finished", "Sequences that ended, by reason", ["kind", "reason"], registry=registry
        )
        self._cancelled = Counter("treadle_cancelled", "Sequences cancelled before their end", registry=registry)
        self._refused = Counter(
            "treadle_refused", "Requests refused admission, by reason", ["reason"], registry=registry
        )
        for reason in Refusal:
            self._refused.labels(reason.value)  # creates the series at 0, from which rates can be computed

    def _engine(self) -> None:
        registry = self.registry
        self._step = Histogram(
            "treadle_step_seconds", "Duration of one engine step", buckets=SHORT_BUCKETS, registry=registry
        )
        self._steps = Counter("treadle_steps", "Engine steps", registry=registry)
        self._prompt = Counter("treadle_prompt_tokens", "Prompt tokens computed", registry=registry)
        self._completion = Counter("treadle_completion_tokens", "Tokens generated", registry=registry)
        self._forced = Counter(
            "treadle_forced_tokens", "Generated tokens that a grammar left no choice about", registry=registry
        )
        self._cached = Counter("treadle_cached_tokens", "Prompt tokens reused instead of computed", registry=registry)
        self._preempted = Counter(
            "treadle_preempted", "Times a sequence gave its cache memory to others", registry=registry
        )
        self._restarts = Counter("treadle_engine_restarts", "Times the engine was replaced", registry=registry)
        self._deaths = Counter("treadle_engine_deaths", "Deaths of the engine, by cause", ["cause"], registry=registry)
        self._replayed = Counter(
            "treadle_replayed", "Sequences of a lost engine that went on with the next one", registry=registry
        )
        self._quarantined = Counter(
            "treadle_quarantined", "Requests that were found to take the engine down", registry=registry
        )
        for cause in DEATHS:
            self._deaths.labels(cause)
        self._running = Gauge("treadle_running", "Sequences running, prefill included", registry=registry)
        self._prefilling = Gauge("treadle_prefilling", "Sequences whose prompt is being read", registry=registry)
        self._waiting = Gauge("treadle_waiting", "Sequences waiting for a slot", registry=registry)
        self._awaiting_grammar = Gauge(
            "treadle_awaiting_grammar", "Sequences waiting for their grammars", registry=registry
        )
        self._memory = Gauge("treadle_memory_bytes", "The runner's memory", ["kind"], registry=registry)

    def _front(self) -> None:
        self._http = Counter(
            "treadle_http_requests", "HTTP requests, by route and status", ["route", "status"], registry=self.registry
        )
        self._http_time = Histogram(
            "treadle_http_request_seconds",
            "From the first header to the last byte",
            ["route"],
            buckets=LONG_BUCKETS,
            registry=self.registry,
        )
        self._rpc = Counter(
            "treadle_grpc_requests", "gRPC Generate calls, by wire and status", ["wire", "code"], registry=self.registry
        )
        self._rpc_time = Histogram(
            "treadle_grpc_request_seconds",
            "From the call to its last message",
            ["wire"],
            buckets=LONG_BUCKETS,
            registry=self.registry,
        )
        self._text_killed = Counter(
            "treadle_text_killed",
            "Text workers ended by a request that broke its limits, by stage, and fork servers that hung",
            ["stage"],
            registry=self.registry,
        )
        self._text_restarts = Counter(
            "treadle_text_restarts", "Times all text processes were started again", registry=self.registry
        )
        self._image_killed = Counter(
            "treadle_image_killed", "Image processes ended by an image that broke its limits", registry=self.registry
        )
        self._lag = Histogram(
            "treadle_event_loop_lag_seconds",
            "How late the event loop runs what is due",
            buckets=LAG_BUCKETS,
            registry=self.registry,
        )

    # The engine client's observer ---------------------------------------------------------------------------------

    def admitted(self, kind: str, wait_s: float) -> None:
        self._wait.labels(kind).observe(wait_s)

    def first_token(self, kind: str, ttft_s: float) -> None:
        self._ttft.labels(kind).observe(ttft_s)

    def tokens(self, kind: str, count: int, gap_s: float) -> None:
        self._gap.labels(kind).observe(gap_s / count)

    def finished(self, kind: str, reason: str, total_s: float) -> None:
        self._finished.labels(kind, reason).inc()
        self._total.labels(kind).observe(total_s)
        if reason == "cancelled":
            self._cancelled.inc()

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def step(self, report: StepReport) -> None:
        now = report.statistics
        steps = increase(self._last.steps, now.steps)
        self._steps.inc(steps)
        self._prompt.inc(increase(self._last.prompt_tokens, now.prompt_tokens))
        self._completion.inc(increase(self._last.completion_tokens, now.completion_tokens))
        self._forced.inc(increase(self._last.forced_tokens, now.forced_tokens))
        self._cached.inc(increase(self._last.cached_tokens, now.cached_tokens))
        self._preempted.inc(increase(self._last.preempted, now.preempted))
        self._prefixes.step(self._last.runner.prefix, now.runner.prefix)
        self._grammars.step(self._last.runner.grammars, now.runner.grammars)
        self._speculation.step(self._last.speculation, now.speculation)
        self._memory.labels("draft_kv").set(now.runner.drafter.kv_bytes)
        self._memory.labels("scorer_kv").set(now.runner.scorer.kv_bytes)
        self._images.step(self._last, now)
        self._spec_prefill.step(self._last.spec_prefill, now.spec_prefill)
        self._last = now
        if steps:
            self._step.observe(now.step_s)
        self._running.set(now.running)
        self._prefilling.set(now.prefilling)
        self._waiting.set(now.waiting)
        self._awaiting_grammar.set(now.awaiting_grammar)
        for kind in ("active", "peak", "cache", "kv"):
            self._memory.labels(kind).set(getattr(now.runner, f"{kind}_bytes"))

    def restarted(self) -> None:
        self._restarts.inc()
        self._last = EngineStatistics()

    def died(self, cause: str) -> None:
        self._deaths.labels(cause).inc()

    def replayed(self) -> None:
        self._replayed.inc()

    def quarantined(self) -> None:
        self._quarantined.inc()

    # The front ----------------------------------------------------------------------------------------------------

    def http(self, route: str, status: int, total_s: float) -> None:
        self._http.labels(route, str(status)).inc()
        self._http_time.labels(route).observe(total_s)

    def rpc(self, wire: str, code: str, total_s: float) -> None:
        self._rpc.labels(wire, code).inc()
        self._rpc_time.labels(wire).observe(total_s)

    def text_killed(self, stage: str) -> None:
        """Count a text worker killed by the limits of a job in `stage`, or a hung fork server."""
        self._text_killed.labels(stage).inc()

    def text_restarted(self) -> None:
        self._text_restarts.inc()

    def image_killed(self) -> None:
        """Count an image process that an image has ended."""
        self._image_killed.inc()

    def loop_lag(self, lag_s: float) -> None:
        self._lag.observe(lag_s)

    def watch(self, source: HealthSource) -> None:
        """Report the server's live, ready and state at every scrape."""
        self.registry.register(_HealthCollector(source))

    def watch_compute(self, source: ComputeSource) -> None:
        """Show the engine's KV backend and kernels at every scrape."""
        self.registry.register(ComputeCollector(source))

    def watch_keys(self, source: KeySource) -> None:
        """Report each API key's usage at every scrape."""
        self.registry.register(KeyCollector(source))

    def watch_responses(self, source: ResponsesSource) -> None:
        """Report the stored responses at every scrape."""
        if self._responses is None:
            self._responses = ResponsesCollector(source)
            self.registry.register(self._responses)
        self._responses.source = source

    def watch_connections(self, front: str, source: ConnectionsSource) -> None:
        """Report the connections of `front` at every scrape."""
        if self._connections is None:
            self._connections = ConnectionsCollector()
            self.registry.register(self._connections)
        self._connections.sources[front] = source

    def render(self) -> bytes:
        """Return the exposition text, UTF-8, format 0.0.4."""
        return b"".join(self.parts())

    def parts(self) -> Iterator[bytes]:
        """Yield the text of `render()` one metric family at a time, each read when it is yielded."""
        for family in self.registry.collect():
            yield format_family(family).encode()

    def value(self, name: str, labels: Mapping[str, str] | None = None) -> float | None:
        """Return one sample's value; None if it does not exist (yet)."""
        return self.registry.get_sample_value(name, dict(labels or {}))


class _Registry(CollectorRegistry):
    """Registry without the `_created` samples that prometheus_client adds to counters and histograms: they double the
    series, and Prometheus treats them as gauges."""

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class _Prefixes:
    """Metrics of the prefix cache."""

    def __init__(self, registry: CollectorRegistry) -> None:
        fields = (
            ("looked_up", "looked_up_tokens", "prompt tokens that were looked up"),
            ("reused", "reused_tokens", "prompt tokens found and reused"),
            ("copied_bytes", "copied_bytes", "bytes copied to reuse them"),
            ("stored", "stored_tokens", "tokens put in"),
            ("evicted", "evicted_tokens", "tokens that gave way to others"),
        )
        self._counters = StatisticsCounters(registry, "treadle_prefix_cache", "Prefix cache", fields)
        self._held = Gauge("treadle_prefix_cache_held_tokens", "Prefix cache: tokens held", registry=registry)
        self._bytes = Gauge("treadle_prefix_cache_held_bytes", "Prefix cache: bytes held", registry=registry)

    def step(self, before: PrefixStatistics, now: PrefixStatistics) -> None:
        self._counters.step(before, now)
        self._held.set(now.held)
        self._bytes.set(now.held_bytes)


class _Grammars:
    """Metrics of the compiler of grammars."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._compiled = Counter("treadle_grammars_compiled", "Grammars compiled", registry=registry)
        self._failed = Counter("treadle_grammars_failed", "Grammars that could not be compiled", registry=registry)
        self._not_closed = Counter(
            "treadle_close_at_limit_failures",
            "Sequences with close_at_limit for which no completion was found",
            registry=registry,
        )
        self._seconds = Counter("treadle_grammar_compile_seconds", "Time spent compiling grammars", registry=registry)
        self._cached = Gauge("treadle_grammars_cached", "Compiled grammars in the cache", registry=registry)

    def step(self, before: GrammarStatistics, now: GrammarStatistics) -> None:
        if now == before:
            return
        self._compiled.inc(increase(before.compiled, now.compiled))
        self._failed.inc(increase(before.failed, now.failed))
        self._not_closed.inc(increase(before.not_closed, now.not_closed))
        self._seconds.inc(increase(before.compile_s, now.compile_s))
        self._cached.set(now.cached)


class _HealthCollector(Collector):
    def __init__(self, source: HealthSource) -> None:
        self._source = source

    def describe(self) -> list[Metric]:
        return [GaugeMetricFamily("treadle_live", ""), GaugeMetricFamily("treadle_ready", "")]

    def collect(self) -> Iterator[Metric]:
        health = self._source.health()
        yield GaugeMetricFamily("treadle_live", "1 while the process can serve", value=float(health.live))
        yield GaugeMetricFamily("treadle_ready", "1 while new requests are taken", value=float(health.ready))
        state = GaugeMetricFamily("treadle_engine_state", "1 for the state the server is in", labels=["state"])
        for name in dict.fromkeys((*STATES, health.state)):
            state.add_metric([name], float(name == health.state))
        yield state


class _LogCollector(Collector):
    def collect(self) -> Iterator[Metric]:
        about = "Lines of the log that were dropped, as nobody read them"
        yield CounterMetricFamily("treadle_log_dropped_lines", about, value=log_statistics().dropped_lines)
