"""When requests are sent, when clients leave, and what is measured, against a scripted server and a clock of ours."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.support.fake_time import in_fake_time
from treadle.bench.drive import Drive, in_background, undisturbed, watch_own_lag
from treadle.bench.measures import figures, workload_figures
from treadle.bench.plan import Moment, PromptMessage, Request, Workload
from treadle.bench.samples import Round, Sample
from treadle.bench.workloads import build

HELLO = (PromptMessage("user", "hello"),)


@dataclass
class Server:
    """First piece after `ttft_s`, then one every `gap_s`; `slots` at a time, others wait in line."""

    ttft_s: float = 1.0
    gap_s: float = 0.1
    slots: int = 100
    log: list[tuple[float, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.slots)

    async def send(
        self, request: Request, sample: Sample, leave: asyncio.Event, on_pieces: Callable[[int], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.log.append((loop.time(), "sent", request.id))
        began = loop.time()
        answer = asyncio.ensure_future(self._answer(request, sample, began, on_pieces))
        left = asyncio.ensure_future(leave.wait())
        await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
        sample.outcome = "ok" if answer.done() else "left"
        answer.cancel()
        left.cancel()
        sample.end_s = loop.time() - began

    async def _answer(self, request: Request, sample: Sample, began: float, on_pieces: Callable[[int], None]) -> None:
        async with self._free:
            for i in range(request.max_tokens):
                await asyncio.sleep(self.gap_s if i else self.ttft_s)
                sample.piece_s.append(asyncio.get_running_loop().time() - began)
                on_pieces(1)


def workload(*requests: Request, concurrency: int = 0) -> Workload:
    return Workload("test", 0, {}, requests, concurrency)


async def drive(load: Workload, server: Server) -> dict[str, Sample]:
    return {sample.id: sample for sample in await Drive(load, server.send).run()}


@in_fake_time
async def test_requests_are_sent_at_their_time() -> None:
    requests = [Request(f"{i}", HELLO, 3, at_s=0.5 * i) for i in range(4)]
    samples = await drive(workload(*requests), Server())
    assert [samples[f"{i}"].sent_s for i in range(4)] == pytest.approx([0.0, 0.5, 1.0, 1.5])
    assert samples["3"].piece_s == pytest.approx([1.0, 1.1, 1.2])


@in_fake_time
async def test_time_spent_waiting_for_the_client_s_own_concurrency_is_not_the_server_s() -> None:
    requests = [Request(f"{i}", HELLO, 1) for i in range(3)]
    samples = await drive(workload(*requests, concurrency=1), Server(ttft_s=2.0))
    assert [samples[f"{i}"].due_s for i in range(3)] == [0.0, 0.0, 0.0]
    assert [samples[f"{i}"].sent_s for i in range(3)] == pytest.approx([0.0, 2.0, 4.0])
    assert [samples[f"{i}"].ttft_s for i in range(3)] == pytest.approx([2.0, 2.0, 2.0])


@in_fake_time
async def test_a_request_may_wait_for_another_one_s_start_piece_or_end() -> None:
    first = Request("first", HELLO, 5)
    moments = {
        "sent": Moment("first", "sent", delay_s=0.25),
        "token": Moment("first", "token", 3),
        "end": Moment("first", "end", delay_s=1.0),
        "never": Moment("first", "token", 99),
    }
    others = [Request(name, HELLO, 1, after=moment) for name, moment in moments.items()]
    samples = await drive(workload(first, *others), Server())
    assert {name: samples[name].sent_s for name in moments} == pytest.approx(
        {"sent": 0.25, "token": 1.2, "end": 2.4, "never": 1.4}
    )


@in_fake_time
async def test_a_client_leaves_at_its_moment_and_one_that_would_leave_first_is_never_sent() -> None:
    server = Server()
    requests = [
        Request("early", HELLO, 9, leave=Moment("early", "sent", delay_s=0.3)),
        Request("later", HELLO, 9, leave=Moment("later", "token", 2)),
        Request("with it", HELLO, 9, leave=Moment("early")),
        Request("never", HELLO, 9, at_s=5.0, leave=Moment("early")),
    ]
    samples = await drive(workload(*requests), server)
    assert (samples["early"].outcome, samples["early"].end_s) == ("left", pytest.approx(0.3))
    assert len(samples["later"].piece_s) == 2
    assert samples["with it"].end_s == pytest.approx(0.3)
    assert "never" not in samples
    assert "never" not in [name for _, _, name in server.log]


@in_fake_time
async def test_when_its_time_to_leave_has_come_a_request_waits_for_nothing_more() -> None:
    """A chain of pauses does not go on without its client."""
    over = Moment("0", "sent", delay_s=2.0)
    chain = [
        Request(f"{i}", HELLO, 1, after=Moment(f"{i - 1}", delay_s=10.0) if i else None, leave=over) for i in range(5)
    ]
    samples = await drive(workload(*chain), Server(ttft_s=0.1))
    assert set(samples) == {"0"}
    assert asyncio.get_running_loop().time() == pytest.approx(2.0, abs=0.01)


@in_fake_time
async def test_whoever_waits_for_one_that_was_never_sent_goes_on() -> None:
    requests = [
        Request("short", HELLO, 1),
        Request("never", HELLO, 1, at_s=9.0, leave=Moment("short")),
        Request("next", HELLO, 1, after=Moment("never")),
    ]
    samples = await drive(workload(*requests), Server())
    assert set(samples) == {"short", "next"}


async def run(name: str, server: Server, **options: float) -> Round:
    (load,) = build(name, 0, options)
    samples = await Drive(load, server.send).run()
    return Round(target="t", number=1, wall_s=0.0, samples=samples)


@in_fake_time
async def test_a_burst_on_a_server_of_few_slots_is_seen_to_be_uneven() -> None:
    """P1: concurrency beyond the server's is waiting in the server, and counts."""
    even = figures(await run("burst", Server(ttft_s=0.2, gap_s=0.01), c=4), (2.0, 0.2))
    uneven = figures(await run("burst", Server(ttft_s=0.2, gap_s=0.01, slots=1), c=4), (2.0, 0.2))
    assert even.flatness == pytest.approx(1.0)
    assert even.answers == {"ok": 16}
    assert even.ttft is not None
    assert even.ttft.p50 == pytest.approx(0.2)
    assert even.gap is not None
    assert even.gap.p99 == pytest.approx(0.01)
    assert uneven.ttft is not None
    assert uneven.ttft.max > 2.0
    assert uneven.good < even.good == 1.0


@in_fake_time
async def test_a_stall_compares_gaps_before_and_during_the_long_prefill() -> None:
    """P3"""

    class Stalls(Server):
        async def _answer(
            self, request: Request, sample: Sample, began: float, on_pieces: Callable[[int], None]
        ) -> None:
            if request.id == "long":
                self.gap_s = 0.3
                await asyncio.sleep(6.0)
                self.gap_s = 0.1
                sample.piece_s.append(asyncio.get_running_loop().time() - began)
                on_pieces(1)
                return
            for _ in range(request.max_tokens):
                await asyncio.sleep(self.gap_s)
                sample.piece_s.append(asyncio.get_running_loop().time() - began)
                on_pieces(1)

    round_ = await run("stall", Stalls())
    assert {s.id: s.outcome for s in round_.samples} == {"long": "ok"} | {f"decoder {i}": "left" for i in range(4)}
    found = workload_figures("stall", round_)
    assert found["gap p99 / idle gap p99"] == pytest.approx(3.0)
    assert found["rate kept"] == pytest.approx(1 / 3, rel=0.1)
    assert found["long TTFT s"] == pytest.approx(6.0)


@in_fake_time
async def test_short_requests_beside_a_long_prefill_are_compared_with_those_alone() -> None:
    """P4"""

    class Slow(Server):
        async def _answer(
            self, request: Request, sample: Sample, began: float, on_pieces: Callable[[int], None]
        ) -> None:
            if request.id == "long":
                self.ttft_s = 0.5
                await asyncio.sleep(10.0)
                return
            await super()._answer(request, sample, began, on_pieces)

    found = workload_figures("interactive", await run("interactive", Slow(ttft_s=0.1)))
    assert found["short TTFT / unloaded"] == pytest.approx(5.0)


@in_fake_time
async def test_a_follow_up_is_compared_with_one_alone_and_work_for_the_gone_is_counted() -> None:
    """B6, R1"""
    round_ = await run("cancel", Server(ttft_s=0.2), times=10)
    assert sum(s.outcome == "left" for s in round_.samples) == 10
    seen = sum(s.tokens for s in round_.samples)
    round_.status = {"completion_tokens": float(seen + 30)}
    found = workload_figures("cancel", round_)
    assert found["follow-up TTFT / idle"] == pytest.approx(1.0)
    assert found["wasted tokens a cancel"] == pytest.approx(3.0)


@in_fake_time
async def test_a_loop_that_is_late_is_seen_to_be_late() -> None:
    lags: list[float] = []
    async with in_background(watch_own_lag(lags)):
        await asyncio.sleep(1.0)
        asyncio.get_running_loop().pass_time(0.5)  # type: ignore[attr-defined]
        await asyncio.sleep(1.0)
    assert max(lags) == pytest.approx(0.49, abs=0.02)
    assert sorted(lags)[len(lags) // 2] == pytest.approx(0.0)


@pytest.mark.parametrize("may", [True, False])
def test_the_client_goes_ahead_where_it_may_and_as_before_afterwards(
    may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nice = [3]

    def set_priority(_which: int, _who: int, value: int) -> None:
        if value < nice[0] and not may:
            raise PermissionError
        nice[0] = value

    monkeypatch.setattr(os, "getpriority", lambda _which, _who: nice[0])
    monkeypatch.setattr(os, "setpriority", set_priority)
    with undisturbed():
        assert nice[0] == (-7 if may else 3)
        assert not gc.isenabled()
    assert nice[0] == 3
    assert gc.isenabled()
