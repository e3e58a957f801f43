"""C3: one signal asks, a second hurries, a third ends; a hangup that is ignored stays so."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.aio import in_loop
from treadle.cli import signals
from treadle.cli.signals import ShutdownSignals


class Process:
    """What the signals did, in place of a process that really ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str | int] = []
        self._changed = asyncio.Event()
        monkeypatch.setattr(os, "_exit", self.note)

    def note(self, what: str | int) -> None:
        self.done.append(what)
        self._changed.set()

    def signals(self) -> ShutdownSignals:
        return ShutdownSignals(hurry=lambda: self.note("hurry"), kill=lambda: self.note("kill"))

    async def has_done(self, count: int) -> list[str | int]:
        while len(self.done) < count:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 5)
        return self.done


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP's disposition is as it was afterwards."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@in_loop
async def test_the_first_asks_the_second_hurries_and_the_third_ends(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(monkeypatch)
    with process.signals() as stop:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.requested.wait(), 5)
        assert (process.done, stop.exit_code(0), stop.exit_code(1)) == ([], 0, 1)
        os.kill(os.getpid(), number)
        assert await process.has_done(1) == ["hurry"]
        assert stop.exit_code(0) == 128 + number
        os.kill(os.getpid(), signal.SIGINT)
        assert await process.has_done(3) == ["hurry", "kill", 130]


@in_loop
async def test_an_end_that_was_hurried_takes_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "END_S", 0.01)
    process = Process(monkeypatch)
    with process.signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.requested.wait(), 5)
        os.kill(os.getpid(), signal.SIGHUP)
        assert await process.has_done(3) == ["hurry", "kill", 129]


@in_loop
async def test_a_hangup_that_is_ignored_stays_ignored(hangup: None, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    process = Process(monkeypatch)
    with process.signals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.requested.wait(), 5)
        assert process.done == []
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
