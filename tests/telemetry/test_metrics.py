from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from treadle.core.messages import StepReport
from treadle.core.refusals import Refusal
from treadle.core.statistics import (
    DrafterStatistics,
    EngineStatistics,
    FeatureStatistics,
    PrefixStatistics,
    RunnerStatistics,
    ScorerStatistics,
    SpeculationStatistics,
    VisionStatistics,
)
from treadle.engine.supervisor import EngineState
from treadle.telemetry.exposition import format_family
from treadle.telemetry.metrics import STATES, Metrics


@dataclass
class Books:
    open: int
    limit: int | None
    parts: Mapping[str, Books] = field(default_factory=dict)


def report(**statistics: float) -> StepReport:
    return StepReport(step=1, statistics=EngineStatistics(**statistics))  # type: ignore[arg-type]


def test_two_servers_in_one_process_do_not_share_metrics() -> None:
    first, second = Metrics(), Metrics()
    first.refused("queue_full")
    assert first.value("treadle_refused_total", {"reason": "queue_full"}) == 1
    assert second.value("treadle_refused_total", {"reason": "queue_full"}) == 0


def test_every_reason_of_a_refusal_is_shown_from_the_start() -> None:
    """D3: a rate needs a first sample, and dashboards need to know the reasons."""
    metrics = Metrics()
    (family,) = (family for family in metrics.registry.collect() if family.name == "treadle_refused")
    assert {sample.labels["reason"]: sample.value for sample in family.samples} == dict.fromkeys(Refusal, 0.0)


def test_no_series_says_when_it_was_created() -> None:
    """prometheus_client adds a `_created` series to each counter and histogram."""
    metrics = Metrics()
    metrics.admitted("chat", 0.2)
    metrics.refused("queue_full")
    shown = metrics.render().decode()
    assert "treadle_queue_seconds_bucket" in shown
    assert "_created" not in shown


def test_requests_are_timed_by_kind() -> None:
    metrics = Metrics()
    metrics.admitted("chat", 0.2)
    metrics.first_token("chat", 90.0)
    metrics.tokens("chat", 4, 0.2)
    metrics.finished("chat", "stop", 100.0)
    chat = {"kind": "chat"}
    assert metrics.value("treadle_queue_seconds_sum", chat) == 0.2
    assert metrics.value("treadle_time_to_first_token_seconds_bucket", chat | {"le": "60.0"}) == 0
    assert metrics.value("treadle_time_to_first_token_seconds_bucket", chat | {"le": "120.0"}) == 1
    assert metrics.value("treadle_inter_token_seconds_sum", chat) == 0.05
    assert metrics.value("treadle_finished_total", chat | {"reason": "stop"}) == 1
    assert metrics.value("treadle_cancelled_total") == 0


def test_a_cancelled_request_is_counted_as_such() -> None:
    metrics = Metrics()
    metrics.finished("chat", "cancelled", 1.0)
    assert metrics.value("treadle_cancelled_total") == 1


def test_counters_of_the_owner_go_on_over_a_restart() -> None:
    metrics = Metrics()
    metrics.step(report(steps=10, prompt_tokens=100, completion_tokens=7, step_s=0.1))
    metrics.restarted()
    metrics.step(report(steps=2, prompt_tokens=30, completion_tokens=1, step_s=0.1))
    assert metrics.value("treadle_steps_total") == 12
    assert metrics.value("treadle_prompt_tokens_total") == 130
    assert metrics.value("treadle_completion_tokens_total") == 8
    assert metrics.value("treadle_engine_restarts_total") == 1


def test_a_report_without_a_new_step_is_no_step() -> None:
    metrics = Metrics()
    metrics.step(report(steps=1, step_s=0.1))
    metrics.step(report(steps=1, step_s=0.1, waiting=3))
    assert metrics.value("treadle_step_seconds_count") == 1
    assert metrics.value("treadle_waiting") == 3


def test_memory_is_shown_by_kind() -> None:
    metrics = Metrics()
    metrics.step(StepReport(step=1, statistics=EngineStatistics(runner=RunnerStatistics(peak_bytes=5))))
    assert metrics.value("treadle_memory_bytes", {"kind": "peak"}) == 5


def prefixes(**counts: int) -> StepReport:
    runner = RunnerStatistics(prefix=PrefixStatistics(**counts))
    return StepReport(step=1, statistics=EngineStatistics(cached_tokens=counts["reused"], preempted=2, runner=runner))


def test_the_prefix_cache_is_counted_over_a_restart() -> None:
    metrics = Metrics()
    counted = {"looked_up": 100, "reused": 60, "copied_bytes": 7, "stored": 40, "evicted": 3}
    metrics.step(prefixes(**counted, held=37, held_bytes=370))
    metrics.restarted()
    metrics.step(prefixes(**counted, held=1, held_bytes=10))
    for name, unit in (("looked_up", "_tokens"), ("reused", "_tokens"), ("stored", "_tokens"), ("evicted", "_tokens")):
        assert metrics.value(f"treadle_prefix_cache_{name}{unit}_total") == 2 * counted[name]
    assert metrics.value("treadle_prefix_cache_copied_bytes_total") == 14
    assert metrics.value("treadle_prefix_cache_held_tokens") == 1
    assert metrics.value("treadle_prefix_cache_held_bytes") == 10
    assert metrics.value("treadle_cached_tokens_total") == 120
    assert metrics.value("treadle_preempted_total") == 4


@dataclass
class Sick:
    live: bool = True
    ready: bool = False
    state: str = "restarting"

    def health(self) -> Sick:
        return self


def test_a_scrape_shows_the_engines_state_as_it_is_then() -> None:
    metrics, engine = Metrics(), Sick()
    metrics.watch(engine)
    assert metrics.value("treadle_ready") == 0
    assert metrics.value("treadle_engine_state", {"state": "restarting"}) == 1
    engine.state, engine.ready = "ready", True
    assert metrics.value("treadle_ready") == 1
    assert metrics.value("treadle_engine_state", {"state": "restarting"}) == 0
    assert b"treadle_engine_state" in metrics.render()


def test_every_state_of_the_server_is_shown_and_no_other() -> None:
    assert sorted(STATES) == sorted({*(state.value for state in EngineState), "draining", "blocked"})


def test_the_text_says_what_prometheus_own_writer_says() -> None:
    metrics = Metrics()
    metrics.http('/a"b\\c\nd', 200, 0.5)
    metrics.admitted("chat", 0.02)
    metrics.watch_connections("http", Books(3, 100))
    metrics.watch_connections("grpc", Books(0, None, {"calls": Books(7, 4160), "streams": Books(1, 256)}))
    own = list(text_string_to_metric_families(metrics.render().decode()))
    assert own == list(text_string_to_metric_families(generate_latest(metrics.registry).decode()))
    assert metrics.value("treadle_connections", {"front": "http"}) == 3
    assert metrics.value("treadle_connections_limit", {"front": "grpc"}) == math.inf
    assert metrics.value("treadle_grpc_calls", {"kind": "calls"}) == 7
    assert metrics.value("treadle_grpc_calls_limit", {"kind": "streams"}) == 256


@pytest.mark.parametrize(("value", "text"), [(math.nan, "NaN"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (3, "3.0")])
def test_every_number_has_prometheus_form(value: float, text: str) -> None:
    family = GaugeMetricFamily("a", "b\\c", value=value)
    assert format_family(family) == f"# HELP a b\\\\c\n# TYPE a gauge\na {text}\n"


def test_images_are_counted_across_restarts_of_the_engine() -> None:
    metrics = Metrics()
    runner = RunnerStatistics(features=FeatureStatistics(evicted=3, held_bytes=70))
    now = EngineStatistics(vision=VisionStatistics(encoded=2, reused=1, encode_s=0.5, awaited=4), runner=runner)
    metrics.step(StepReport(step=1, statistics=now))
    metrics.step(StepReport(step=2, statistics=now))
    metrics.restarted()
    metrics.step(StepReport(step=1, statistics=EngineStatistics(vision=VisionStatistics(encoded=1))))
    text = metrics.render().decode()
    for line in ("s_encoded_total 3.0", "s_reused_total 1.0", "s_encode_seconds_total 0.5", "s_awaited 0.0"):
        assert f"treadle_image{line}" in text
    for line in ("evicted_total 3.0", "bytes 70.0"):
        assert f"treadle_image_features_{line}" in text


def test_draft_tokens_are_counted_across_restarts_of_the_engine() -> None:
    metrics = Metrics()
    now = SpeculationStatistics(steps=2, rows=3, drafted=12, accepted=9, on=True)
    caches = RunnerStatistics(drafter=DrafterStatistics(kv_bytes=4096), scorer=ScorerStatistics(kv_bytes=512))
    metrics.step(StepReport(step=1, statistics=EngineStatistics(speculation=now, runner=caches)))
    assert metrics.value("treadle_memory_bytes", {"kind": "draft_kv"}) == 4096
    assert metrics.value("treadle_memory_bytes", {"kind": "scorer_kv"}) == 512
    metrics.step(StepReport(step=2, statistics=EngineStatistics(speculation=now)))
    metrics.restarted()
    later = SpeculationStatistics(steps=1, rows=1, drafted=4, reason="x")
    metrics.step(StepReport(step=1, statistics=EngineStatistics(speculation=later)))
    text = metrics.render().decode()
    for line in ("tokens_total 16.0", "accepted_tokens_total 9.0", "steps_total 3.0", "verifications_total 4.0"):
        assert f"treadle_draft_{line}" in text
    assert "treadle_speculating 0.0" in text
