"""Lines of the log: one form for everybody, in text and in JSON."""

from __future__ import annotations

import io
import json
import logging
import math
import time
import warnings
from collections.abc import Iterator

import pytest

from treadle.config import LOG_FORMATS
from treadle.telemetry.logs import FORMATTERS, adopt_library_loggers, configure, stamp
from treadle.telemetry.loop_lag import LoopLag

LOGGERS = ("", "treadle", "uvicorn.error")
MOMENT = 1_795_334_753.1239  # 2026-11-22T08:05:53.123Z


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A stream for this process's log; the logging configuration is restored afterwards."""
    saved = {name: (logging.getLogger(name).handlers[:], logging.getLogger(name).level) for name in LOGGERS}
    yield io.StringIO()
    logging.captureWarnings(False)
    for name, (handlers, level) in saved.items():
        logging.getLogger(name).handlers[:] = handlers
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Restore the time zone after a test that sets `TZ` and calls `time.tzset`."""
    yield monkeypatch
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("UTC", "2026-11-22T08:05:53.123Z"),
        ("Europe/Berlin", "2026-11-22T09:05:53.123+01:00"),
        ("Asia/Kolkata", "2026-11-22T13:35:53.123+05:30"),
        ("America/St_Johns", "2026-11-22T04:35:53.123-03:30"),
    ],
)
def test_times_are_local_with_their_offset(zone: pytest.MonkeyPatch, name: str, text: str) -> None:
    zone.setenv("TZ", name)
    time.tzset()
    assert stamp(MOMENT) == text


def test_the_hour_that_comes_twice_is_told_apart(zone: pytest.MonkeyPatch) -> None:
    zone.setenv("TZ", "Europe/Berlin")
    time.tzset()
    assert (stamp(1_792_886_400.0), stamp(1_792_890_000.0)) == (
        "2026-10-25T02:00:00.000+02:00",
        "2026-10-25T02:00:00.000+01:00",
    )


def test_every_format_that_can_be_set_has_a_formatter() -> None:
    assert tuple(FORMATTERS) == LOG_FORMATS


def test_what_a_client_sends_can_not_forge_a_line(stream: io.StringIO) -> None:
    configure("info", stream)
    logging.getLogger("treadle.access").info("request", extra={"fields": {"path": '/x" status=500\nerror'}})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(' info treadle.access request path="/x\' status=500\\nerror"')


def test_a_traceback_follows_its_line(stream: io.StringIO) -> None:
    configure("info", stream)
    try:
        raise KeyError("x")
    except KeyError:
        logging.getLogger("treadle.fronts").exception("it broke")
    assert "error treadle.fronts it broke\nTraceback" in stream.getvalue()


def test_json_is_one_object_a_line_with_the_fields_types(stream: io.StringIO) -> None:
    configure("info", stream, "json")
    fields = {
        "path": '/ü"\n\udcff',
        "status": 200,
        "total_s": 0.5,
        "gone": None,
        "urls": ["a", 1],
        "odd": math.inf,
        "why": ValueError("x"),
    }
    logging.getLogger("treadle.access").info("request", extra={"fields": fields})
    (text,) = stream.getvalue().splitlines()
    line = json.loads(text)
    assert list(line)[:4] == ["time", "level", "logger", "message"]
    assert (line.pop("level"), line.pop("logger"), line.pop("message")) == ("info", "treadle.access", "request")
    assert line.pop("time")[10] == "T"
    assert line == fields | {"odd": "inf", "why": "x"}


def test_a_field_can_not_take_the_place_of_a_key_that_every_line_has(stream: io.StringIO) -> None:
    configure("info", stream, "json")
    logging.getLogger("treadle").info("said", extra={"fields": {"message": "else", "level": "none"}})
    line = json.loads(stream.getvalue())
    assert (line["message"], line["level"]) == ("said", "info")


def test_a_traceback_in_json_is_a_field(stream: io.StringIO) -> None:
    configure("info", stream, "json")
    try:
        raise KeyError("x")
    except KeyError:
        logging.getLogger("treadle").exception("it broke", stack_info=True)
    (text,) = stream.getvalue().splitlines()
    exception = json.loads(text)["exception"]
    assert exception.startswith("Traceback")
    assert "KeyError: 'x'\nStack (most recent call last)" in exception


@pytest.mark.parametrize("form", LOG_FORMATS)
def test_other_libraries_and_pythons_warnings_write_lines_like_ours(stream: io.StringIO, form: str) -> None:
    configure("debug", stream, form)
    logging.getLogger("treadle.engine").debug("ours")
    logging.getLogger("uvicorn.error").warning("uvicorn's")
    logging.getLogger("grpc.aio").error("grpc's")
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).info("nobody needs this")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    lines = stream.getvalue().splitlines()
    named = [json.loads(line)["logger"] if form == "json" else line.split()[2] for line in lines]
    assert named == ["treadle.engine", "uvicorn.error", "grpc.aio", "py.warnings"]


def test_a_level_above_warning_holds_for_other_libraries_too(stream: io.StringIO) -> None:
    configure("critical", stream)
    logging.getLogger("uvicorn.error").warning("what the checks do to the engine")
    logging.getLogger("asyncio").error("is in the report")
    assert stream.getvalue() == ""


def test_the_second_configuration_replaces_the_first(stream: io.StringIO) -> None:
    configure("info", io.StringIO())
    configure("info", stream, "json")
    logging.getLogger("treadle").info("once")
    assert len(stream.getvalue().splitlines()) == 1


def test_a_library_that_brought_its_own_handler_writes_as_all_do(stream: io.StringIO) -> None:
    """As transformers does, which also keeps its lines to itself."""
    configure("info", stream)
    library, raw = logging.getLogger("some_library_of_models"), io.StringIO()
    library.addHandler(logging.StreamHandler(raw))
    library.propagate = False
    adopt_library_loggers()
    logging.getLogger("some_library_of_models.loading").warning("slow")
    assert raw.getvalue() == ""
    assert stream.getvalue().endswith(" warning some_library_of_models.loading slow\n")


def test_lag_is_summed_up_in_percentiles() -> None:
    seen: list[float] = []
    lag = LoopLag(seen.append)
    assert lag.summary()["samples"] == 0
    for i in range(100):
        lag.note(i / 1000)
    assert lag.summary() == {"samples": 100.0, "p50_ms": 49.0, "p99_ms": 98.0, "max_ms": 99.0}
    assert len(seen) == 100
