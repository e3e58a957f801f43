"""What `treadle serve` says to a person, and that it does not depend on being heard."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from treadle.cli.serve import Announcer
from treadle.config import Settings
from treadle.core.messages import Capabilities

CAN = Capabilities(
    model="m", architecture="a", vocabulary=1, context=1, device="cpu", dtype="float32", parameters=1, weight_bytes=1
)


class Broken(io.StringIO):
    """A standard error that can't be written to."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, "broken")


def say_everything(announcer: Announcer) -> None:
    announcer.listening("http://127.0.0.1:1")
    announcer.stage("reading")
    announcer.ready("http://127.0.0.1:1", "m", CAN, {}, 1.0)
    announcer.draining(1, 30.0)
    announcer.stopped()


def test_it_says_what_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    say_everything(Announcer(Settings()))
    shown = capsys.readouterr().err
    assert all(word in shown for word in ("listens on", "reading", "Ready", "curl", "Shutting down", "Stopped"))


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO])
def test_a_standard_error_that_nobody_reads_ends_nothing(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """B7, C3: neither an engine's restart nor a drain may fail because nobody can be told of it."""
    monkeypatch.setattr(sys, "stderr", Broken(number))
    say_everything(Announcer(Settings()))
