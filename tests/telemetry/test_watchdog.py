"""The event-loop watchdog, and its messages to systemd."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from pathlib import Path

import pytest

from tests.support.aio import in_loop
from treadle.telemetry import Telemetry
from treadle.telemetry.watchdog import Notify, Watchdog

TICK_S = 0.01


class Bark:
    """Recorder of the watchdog's callback."""

    def __init__(self) -> None:
        self.dump_stacks = ""
        self.heard = threading.Event()

    def __call__(self, dump_stacks: str) -> None:
        self.dump_stacks = dump_stacks
        self.heard.set()


@in_loop
async def test_a_loop_that_stands_still_is_told_of_with_the_stacks() -> None:
    bark = Bark()
    task = asyncio.create_task(Watchdog(bark, stuck_s=3 * TICK_S, tick_s=TICK_S).run())
    await asyncio.sleep(0)

    def stands_still() -> bool:
        return bark.heard.wait(60)

    assert stands_still()
    assert "in stands_still" in bark.dump_stacks
    task.cancel()


@in_loop
async def test_a_loop_that_runs_is_not() -> None:
    bark = Bark()
    telemetry = Telemetry(watchdog=Watchdog(bark, stuck_s=1000.0, tick_s=TICK_S))
    task = asyncio.create_task(telemetry.run())
    await asyncio.sleep(10 * TICK_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not bark.heard.is_set()


def test_a_debugger_in_the_main_thread_counts_as_life() -> None:
    """The traced frame is below the loop's, where the watchdog finds it at each of its ticks."""
    bark = Bark()

    async def stand_still() -> bool:
        task = asyncio.create_task(Watchdog(bark, stuck_s=TICK_S, tick_s=TICK_S).run())
        await asyncio.sleep(0)
        heard = bark.heard.wait(20 * TICK_S)
        task.cancel()
        return heard

    frame = sys._getframe()
    before, frame.f_trace = frame.f_trace, lambda *_: None
    try:
        assert not asyncio.run(stand_still())
    finally:
        frame.f_trace = before


@in_loop
async def test_systemd_hears_of_the_start_of_life_and_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        watchdog = Watchdog(Bark(), tick_s=TICK_S)
        watchdog.ready()
        task = asyncio.create_task(watchdog.run())
        await asyncio.sleep(TICK_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        said = [systemd.recv(64)]
        while said[-1] != b"STOPPING=1":
            said.append(systemd.recv(64))
    assert (said[0], set(said[1:-1])) == (b"READY=1", {b"WATCHDOG=1"})


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_an_abstract_address_and_one_where_nobody_listens() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0treadle-test-notify")
        systemd.settimeout(60)
        Notify("@treadle-test-notify")("READY=1")
        assert systemd.recv(64) == b"READY=1"
    Notify("@treadle-test-notify")("READY=1")
    Notify("")("READY=1")
