from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from treadle.telemetry.lag import LoopLag
from treadle.telemetry.logs import RequestRecord, configure, log_access


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    saved = {
        n: (lg.handlers[:], lg.propagate, lg.level)
        for n in ("treadle", "uvicorn.error")
        if (lg := logging.getLogger(n))
    }
    configure("info", stream)
    yield stream
    for name, (handlers, propagate, level) in saved.items():
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def record(**fields: object) -> RequestRecord:
    return RequestRecord(id="r1", method="POST", path="/v1/completions", started=10.0, status=200, **fields)  # type: ignore[arg-type]


def test_a_request_is_one_line_of_pairs(out: io.StringIO) -> None:
    log_access(record(public_id="cmpl-1", rows=1, prompt_tokens=3, completion_tokens=4, wait_s=0.5, ttft_s=0.75), 12.0)
    (line,) = out.getvalue().splitlines()
    assert line.endswith(
        "info treadle.access request request=r1 method=POST path=/v1/completions status=200 id=cmpl-1 rows=1 "
        "prompt_tokens=3 completion_tokens=4 wait_s=0.5 ttft_s=0.75 total_s=2.0"
    )


def test_what_a_client_sends_can_not_forge_a_line(out: io.StringIO) -> None:
    forged = record()
    forged.path = '/x" status=500\nerror'
    log_access(forged, 11.0)
    (line,) = out.getvalue().splitlines()
    assert 'path="/x\' status=500\\nerror"' in line


def test_probes_are_not_logged_at_info(out: io.StringIO) -> None:
    log_access(RequestRecord(id="r", method="GET", path="/health", started=0.0, status=200), 1.0)
    assert out.getvalue() == ""


def test_a_traceback_follows_its_line(out: io.StringIO) -> None:
    try:
        raise KeyError("x")
    except KeyError:
        logging.getLogger("treadle.fronts").exception("it broke")
    assert "error treadle.fronts it broke\nTraceback" in out.getvalue()


def test_lag_is_summed_up_in_percentiles() -> None:
    seen: list[float] = []
    lag = LoopLag(seen.append)
    assert lag.summary()["samples"] == 0
    for i in range(100):
        lag.note(i / 1000)
    assert lag.summary() == {"samples": 100.0, "p50_ms": 49.0, "p99_ms": 98.0, "max_ms": 99.0}
    assert len(seen) == 100
