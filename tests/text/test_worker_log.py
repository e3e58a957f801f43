"""Lines that text processes log: they reach the server's log, a bounded number of them."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from tests.text import builders
from tests.text.test_worker_pool import pool_of
from treadle.errors import ContextLengthExceeded
from treadle.telemetry.logs import JsonFormatter
from treadle.text.work.fault_log import LOG_EVERY_S
from treadle.text.work.messages import LogLine, LogLines
from treadle.text.work.worker_log import MAX_CHARS, MAX_LINES, MAX_REMEMBERED, LineCollector, WorkerLog


class Clock:
    """Seconds that only a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(*messages: str, dropped: int = 0) -> LogLines:
    return LogLines(tuple(LogLine("treadle.made_up", logging.WARNING, message) for message in messages), dropped)


def test_lines_of_a_load_and_of_jobs_are_logged_in_the_servers_format(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = builders.write_folder(tmp_path / "m", builders.byte_level())
    (folder / "generation_config.json").write_text('{"temperature": -3}')
    clock = Clock()

    async def main() -> None:
        async with pool_of(folder, clock=clock) as pool:
            assert "temperature is -3" in caplog.messages[0]
            for _ in range(3):
                assert await pool.run("warn", b"socks") == b"warned"
                clock.now += LOG_EVERY_S

    asyncio.run(main())
    assert len(caplog.records) == 3, "each once"
    job, warning = caplog.records[1:]
    written = json.loads(JsonFormatter().format(job))
    assert (written["logger"], written["level"], written["message"], written["request"]) == (
        "treadle.made_up",
        "warning",
        "socks were left out",
        7,
    )
    assert warning.name == "py.warnings"
    assert "UserWarning: socks are odd" in warning.getMessage()
    assert "\n" not in warning.getMessage()


def test_lines_of_a_refused_request_are_logged_and_a_flood_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = builders.write_folder(tmp_path / "m", builders.byte_level())

    async def main() -> None:
        async with pool_of(folder, clock=Clock()) as pool:
            with pytest.raises(ContextLengthExceeded):
                await pool.run("warn_often", b"10000")

    asyncio.run(main())
    assert caplog.messages == [f"line {i}" for i in range(MAX_LINES)]


def test_each_line_is_logged_once_and_one_jobs_lines_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = WorkerLog(clock)
    log.write(lines("a", "b", "a", dropped=5))
    assert caplog.messages == ["a", "b"]
    log.write(lines("a", "c"))
    clock.now += LOG_EVERY_S
    log.write(lines("a", "c"))
    assert caplog.messages == ["a", "b", "c"]
    assert caplog.records[2].__dict__["fields"] == {"dropped": 6}
    clock.now += LOG_EVERY_S
    log.write(lines("a", "b"))
    log.write(lines("d"))
    assert caplog.messages == ["a", "b", "c", "d"], "lines of old held nothing up"


def test_the_lines_that_are_remembered_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = WorkerLog(clock)
    for i in range(MAX_REMEMBERED + 1):
        clock.now += LOG_EVERY_S
        log.write(lines(f"line {i}"))
    caplog.clear()
    for message in (f"line {MAX_REMEMBERED}", "line 0"):
        clock.now += LOG_EVERY_S
        log.write(lines(message))
    assert caplog.messages == ["line 0"], "the oldest was forgotten"


def test_a_level_that_the_server_does_not_log_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="treadle.made_up"):
        WorkerLog(Clock()).write(lines("a"))
    assert caplog.messages == []


def test_collected_lines_are_plain_short_and_few() -> None:
    collector = LineCollector()
    logger = logging.Logger("treadle.made_up")
    logger.addHandler(collector)
    assert collector.take() is None
    logger.info("nothing for the log")
    assert collector.take() is None
    try:
        raise ValueError("a\nb")
    except ValueError:
        logger.exception("it\nfailed", extra={"fields": {"n": 1, "what": ["x"]}})
    for _ in range(MAX_LINES + 2):
        logger.warning("x" * 10 * MAX_CHARS)
    taken = collector.take()
    assert taken is not None
    assert taken.lines[0] == LogLine(
        "treadle.made_up", logging.ERROR, "it failed (ValueError: a b)", (("n", 1), ("what", "['x']"))
    )
    assert (len(taken.lines), taken.dropped) == (MAX_LINES, 3)
    assert all(len(line.message) <= MAX_CHARS for line in taken.lines)
    assert collector.take() is None
