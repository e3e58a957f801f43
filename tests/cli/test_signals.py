"""C3: one signal asks, a second hurries, a third ends; a hangup that is ignored stays so."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
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
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(os, "_exit", self.note)

    def note(self, what: str | int) -> None:
        """Called on any thread."""
        self.done.append(what)
        self._loop.call_soon_threadsafe(self._changed.set)

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
        assert sorted(map(str, await process.has_done(3))) == ["129", "hurry", "kill"]


@in_loop
async def test_a_second_signal_is_taken_while_the_loop_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hurry` needs the loop; the end does not."""
    monkeypatch.setattr(signals, "END_S", 0.01)
    process = Process(monkeypatch)
    over = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: (process.note(code), over.set()))
    with process.signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert over.wait(60)  # on the loop's own thread
        assert process.done == ["kill", 130]
        assert not stop.requested.is_set()


def wait(event: threading.Event) -> None:
    event.wait(60)


@in_loop
async def test_a_kill_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "KILL_S", 0.01)
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    hang = threading.Event()
    signals.exit_now(70, lambda: wait(hang))
    assert codes == [70]
    hang.set()


@in_loop
async def test_everything_is_as_it_was_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = [signal.getsignal(number) for number in signals.SIGNALS]
    with Process(monkeypatch).signals():
        assert [signal.getsignal(number) for number in signals.SIGNALS] != handlers
    assert [signal.getsignal(number) for number in signals.SIGNALS] == handlers
    assert signal.set_wakeup_fd(-1) == -1


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
