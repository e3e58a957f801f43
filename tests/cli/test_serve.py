"""What `treadle serve` says to a person, and that it does not depend on being heard."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from treadle.cli.json_reporter import LogReporter, run_logged
from treadle.cli.serve import TerminalReporter
from treadle.config import Settings
from treadle.core.capabilities import Capabilities
from treadle.core.compute_path import (
    Backend,
    ComputePath,
    KernelName,
    KernelPrograms,
    KernelState,
    KernelStatus,
)
from treadle.errors import ConfigError, StartFailed
from treadle.models.transfer import Transfer
from treadle.network_exposure import Access, Reach

CAN = Capabilities(
    model="m",
    architecture="a",
    vocabulary=1,
    context=1,
    device="cpu",
    dtype="float32",
    parameters=1,
    weight_bytes=1,
    compute=ComputePath(
        Backend.CONTIGUOUS,
        kernels=(KernelStatus(KernelName.BLAS, KernelState.ACTIVE),),
        programs=KernelPrograms(cached=20),
    ),
)


REACH = Reach(("http://127.0.0.1:1",), (), (Access("HTTP", "anyone on this machine"),))


class Broken(io.StringIO):
    """A standard error that can't be written to."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, "broken")


def say_everything(reporter: TerminalReporter | LogReporter, reach: Reach = REACH) -> None:
    reporter.listening(reach)
    reporter.transfer(Transfer("o/m", 1, 2))
    reporter.stage("reading")
    reporter.ready(reach, "m", CAN, {}, 1.0)
    reporter.draining(1, 30.0)
    reporter.transfer(Transfer("late", 1, 2))
    reporter.stopped()
    reporter.close()


def test_it_says_what_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    say_everything(TerminalReporter(Settings()))
    shown = capsys.readouterr().err
    assert "late" not in shown  # a download that was given up is no longer shown
    assert all(
        word in shown
        for word in (
            "path     contiguous, blas",
            "kernels  20 from the cache",
            "listens on",
            "downloading o/m: 50 %",
            "reading",
            "Ready",
            "curl",
            "Shutting down",
            "Stopped",
        )
    )


def test_it_says_where_it_is_reached_and_by_whom(capsys: pytest.CaptureFixture[str]) -> None:
    say_everything(TerminalReporter(Settings()))
    shown = capsys.readouterr().err.splitlines()
    assert "  access   HTTP: anyone on this machine" in shown
    assert not [line for line in shown if line.startswith(("  HTTP", "  gRPC"))]
    reach = Reach(
        ("http://127.0.0.1:1", "http://[fd00::5]:1"),
        ("grpc://127.0.0.1:2", "grpc://[fd00::5]:2"),
        (Access("HTTP", "anyone [bold]", open=True), Access("gRPC", "nobody")),
    )
    say_everything(TerminalReporter(Settings()), reach)
    shown = capsys.readouterr().err.splitlines()
    assert "Treadle listens on http://127.0.0.1:1 and grpc://127.0.0.1:2 and loads demo" in shown
    at = shown.index("  HTTP     http://127.0.0.1:1, http://[fd00::5]:1")
    assert shown[at + 1 : at + 4] == [
        "  gRPC     grpc://127.0.0.1:2, grpc://[fd00::5]:2",
        "  access   HTTP: anyone [bold]",
        "           gRPC: nobody",
    ]


def test_it_says_that_chats_are_refused_and_proposes_another_call(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = TerminalReporter(Settings())
    reporter.ready(REACH, "m", CAN, {}, 1.0, "this model has no chat template")
    shown = capsys.readouterr().err
    assert "  chats    refused: this model has no chat template; give one with --chat-template\n" in shown
    assert "/v1/completions -H" in shown
    assert "/v1/chat/completions" not in shown
    reporter.ready(REACH, "m", CAN, {}, 1.0, "")
    shown = capsys.readouterr().err
    assert "  chats " not in shown
    assert "/v1/chat/completions -H" in shown


def test_a_log_has_the_same_events_as_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="treadle.serve")
    reach = Reach(("http://127.0.0.1:1",), ("grpc://127.0.0.1:2",), (Access("HTTP", "anyone", open=True),))
    say_everything(LogReporter(Settings(max_running=3)), reach)
    told = {record.getMessage(): record.__dict__["fields"] for record in caplog.records}
    assert list(told) == ["listening", "downloading", "loading", "ready", "access", "draining", "stopped"]
    assert told["listening"] == {"http": ("http://127.0.0.1:1",), "grpc": ("grpc://127.0.0.1:2",), "model": "demo"}
    downloading = {"model": "o/m", "done_bytes": 1, "total_bytes": 2, "bytes_per_s": 0, "note": ""}
    assert told["downloading"] == downloading
    assert told["ready"].items() >= {"url": "http://127.0.0.1:1", "model": "m", "max_running": 3}.items()
    assert told["ready"]["no_chats"] == ""
    path = {
        "path": "contiguous, blas",
        "backend": "contiguous",
        "fused": False,
        "kernels": {"blas": "active"},
        "programs": {"compiled": 0, "cached": 20, "by_mlx": 0, "compile_s": 0.0, "reasons": ()},
        "why": [],
    }
    assert told["ready"].items() >= path.items()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == ["access"]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("`port` is taken"), 2, "--port is taken"),
        (StartFailed("no"), 1, "no"),
        (KeyError("x"), 1, "the server failed"),
    ],
)
def test_the_error_that_ends_a_server_is_a_line_of_its_log(
    error: Exception, code: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> int:
        raise error

    assert run_logged(run) == code
    (record,) = caplog.records
    assert (record.getMessage(), record.levelname) == (said, "ERROR")
    assert run_logged(lambda: 0) == 0


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO])
def test_a_standard_error_that_nobody_reads_ends_nothing(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """B7, C3: neither an engine's restart nor a drain may fail because nobody can be told of it."""
    monkeypatch.setattr(sys, "stderr", Broken(number))
    say_everything(TerminalReporter(Settings()))
