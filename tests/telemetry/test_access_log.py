"""The access log: a line for each request, and one for a storm of refusals."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from treadle.telemetry.access_log import ACCESS, MAX_WINDOWS, WINDOW_S, AccessLogWriter, RequestRecord, address

Lines = list[tuple[str, dict[str, Any]]]
BUSY = "text_generation_busy"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=ACCESS)
    return caplog


def told(log: pytest.LogCaptureFixture) -> Lines:
    """Return the message and fields of each line so far."""
    return [(record.getMessage(), record.fields) for record in log.records]  # type: ignore[attr-defined]


def record(**fields: Any) -> RequestRecord:
    given = {"id": "r1", "method": "POST", "path": "/v1/completions", "started": 10.0, "status": 200, **fields}
    return RequestRecord(**given)


def refused(client: str = "10.0.0.1:5000", error: str = BUSY, **fields: Any) -> RequestRecord:
    return record(status=503, error=error, client=client, **fields)


def test_a_request_is_one_line_of_what_is_known(log: pytest.LogCaptureFixture) -> None:
    counts = {"rows": 1, "prompt_tokens": 3, "completion_tokens": 4, "wait_s": 0.5, "ttft_s": 0.75}
    AccessLogWriter().write(record(public_id="cmpl-1", client="127.0.0.1:4000", **counts), 12.0)
    line = {"request": "r1", "method": "POST", "path": "/v1/completions", "status": 200, "id": "cmpl-1"}
    assert told(log) == [("request", line | counts | {"total_s": 2.0})]


def test_the_clients_address_is_shown_where_it_is_asked_for(log: pytest.LogCaptureFixture) -> None:
    lines = AccessLogWriter(show_client=True)
    lines.write(record(client="127.0.0.1:4000"), 12.0)
    lines.write(record(), 12.0)
    assert [fields.get("client") for _, fields in told(log)] == ["127.0.0.1:4000", None]


def test_probes_and_scrapes_are_told_at_debug(log: pytest.LogCaptureFixture) -> None:
    lines = AccessLogWriter()
    for _ in range(3):
        lines.write(record(method="GET", path="/health/ready", status=503), 11.0)
        lines.write(record(method="GET", path="/metrics"), 11.0)
    lines.flush(30.0)
    assert told(log) == []
    log.set_level(logging.DEBUG, logger=ACCESS)
    lines.write(record(method="GET", path="/metrics"), 11.0)
    assert len(told(log)) == 1


def test_other_failures_have_a_line_each(log: pytest.LogCaptureFixture) -> None:
    lines = AccessLogWriter()
    for _ in range(3):
        lines.write(record(method="GET", status=404), 11.0)
    assert len(told(log)) == 3


def test_a_clients_storm_of_refusals_is_two_lines(log: pytest.LogCaptureFixture) -> None:
    """The ports of its connections differ."""
    lines = AccessLogWriter()
    for i in range(813):
        lines.write(refused(f"10.0.0.1:{i}"), 11.0 + i / 1000)
    lines.sweep(11.0 + WINDOW_S - 0.1)
    assert [message for message, _ in told(log)] == ["request"]
    lines.sweep(11.0 + WINDOW_S)
    assert told(log)[1:] == [("refused", {"status": 503, "error": BUSY, "refused": 812, "in_s": 10.0})]


def test_each_request_that_had_run_has_its_line(log: pytest.LogCaptureFixture) -> None:
    """Those that a shutdown ends with a 503 are no refusals."""
    lines = AccessLogWriter()
    for _ in range(3):
        lines.write(refused(error="server_stopping", public_id="cmpl-1", rows=1, completion_tokens=7, wait_s=0.0), 12.0)
    assert [fields["completion_tokens"] for _, fields in told(log)] == [7, 7, 7]


def test_a_storm_that_lasts_is_a_line_each_window_and_one_that_is_over_is_forgotten(
    log: pytest.LogCaptureFixture,
) -> None:
    lines = AccessLogWriter(show_client=True)
    lines.write(refused(), 0.0)
    for end in (10.0, 21.0):
        lines.write(refused(), end - 1)
        lines.sweep(end)
    lines.sweep(31.0)
    lines.sweep(40.0)
    lines.write(refused(), 41.0)
    assert [message for message, _ in told(log)] == ["request", "refused", "refused", "request"]
    assert told(log)[2][1] == {"status": 503, "error": BUSY, "refused": 1, "in_s": 11.0, "client": "10.0.0.1"}


def test_clients_and_codes_have_their_own_lines(log: pytest.LogCaptureFixture) -> None:
    lines = AccessLogWriter()
    for client in ("10.0.0.1:1", "10.0.0.2:1", "[::1]:1"):
        for error in (BUSY, "server_stopping"):
            lines.write(refused(client, error), 0.0)
            lines.write(refused(client, error), 0.0)
    lines.flush(1.0)
    assert [message for message, _ in told(log)] == ["request"] * 6 + ["refused"] * 6


def test_a_crowd_of_clients_is_counted_by_code_and_nothing_is_lost(log: pytest.LogCaptureFixture) -> None:
    lines, crowd = AccessLogWriter(show_client=True), 1000
    for i in range(crowd):
        for _ in range(2):
            lines.write(refused(f"10.0.{i // 256}.{i % 256}:1"), 0.0)
    lines.flush(1.0)
    written = told(log)
    assert len(written) <= 2 * (MAX_WINDOWS + 1)
    assert sum(fields.get("refused", 1) for _, fields in written) == 2 * crowd
    others = [fields for message, fields in written if message == "refused" and "client" not in fields]
    assert [fields["refused"] for fields in others] == [2 * (crowd - MAX_WINDOWS) - 1]


def test_at_debug_every_refusal_has_its_line(log: pytest.LogCaptureFixture) -> None:
    log.set_level(logging.DEBUG, logger=ACCESS)
    lines = AccessLogWriter()
    for _ in range(3):
        lines.write(refused(), 0.0)
    assert [record.levelno for record in log.records] == [logging.INFO, logging.DEBUG, logging.DEBUG]


def test_flush_tells_what_is_counted_once(log: pytest.LogCaptureFixture) -> None:
    lines = AccessLogWriter()
    for _ in range(3):
        lines.write(refused(), 0.0)
    lines.flush(2.0)
    lines.flush(2.0)
    assert [fields.get("refused") for _, fields in told(log)] == [None, 2]


def test_an_address_of_ipv6_has_brackets() -> None:
    assert (address("127.0.0.1", 80), address("::1", 80)) == ("127.0.0.1:80", "[::1]:80")
    assert RequestRecord("r", "GET", "/", 0.0, client="[::1]:80").host == "[::1]"
