"""Image processes: pixels cross as shared memory, and an image that ends its process fails alone."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.media.pictures import picture, png
from tests.media.record_pixels import settings_of
from tests.media.test_pixels import pixels_of
from tests.support.aio import in_loop
from tests.support.shared_pixels import left_over
from treadle import shared_memory
from treadle.errors import Busy, EngineUnavailable, InvalidRequest, ServerStopping
from treadle.media import workers as module
from treadle.media.messages import Prepare, Prepared, Refused, Start
from treadle.media.pixels_memory import NoRoom, Pixels
from treadle.media.process import ImageProcess
from treadle.media.workers import ImageWorkers
from treadle.runner.mlxvlm.levels import TABLE, values_of
from treadle.text.images import Layout

SETTINGS = settings_of("QwenImages", {"min_pixels": 900})


class FaultyProcess(ImageProcess):
    module = "tests.media.faulty_child"


@asynccontextmanager
async def workers(**options: Any) -> AsyncIterator[ImageWorkers]:
    pool = ImageWorkers(SETTINGS, **{"make": FaultyProcess} | options)
    try:
        yield pool
    finally:
        await pool.close()


def read(pixels: Pixels) -> np.ndarray:
    with shared_memory.attach(pixels.name, pixels.size_bytes) as view:
        count = math.prod(pixels.shape)
        levels = mx.array(np.frombuffer(view, np.uint8, count).reshape(pixels.shape))
        table = mx.array(np.frombuffer(bytes(view[count:]), np.float32).reshape(TABLE))
    shared_memory.unlink(pixels.name)
    return np.array(values_of(levels, table, pixels.layout.grid))


async def refusal(pool: ImageWorkers, data: bytes) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await pool.prepare(data)
    assert not left_over()
    return caught.value.message


@in_loop
async def test_no_process_runs_before_the_first_image_and_pixels_are_in_shared_memory() -> None:
    async with workers(make=ImageProcess) as pool:
        assert pool.statistics()["processes"] == 0
        found = await pool.prepare(png(40, 30), "image/png")
        plan, expected = pixels_of(SETTINGS, 40, 30)
        assert (found.shape, found.layout) == (plan.shape, plan.layout)
        assert np.array_equal(read(found), expected)
        first = pool.statistics()["pids"]
        assert np.array_equal(read(await pool.prepare(png(40, 30))), expected)
        status = pool.statistics()
        assert (status["pids"], status["done"], status["pending"], status["refused"]) == (first, 2, 0, 0)
    with pytest.raises(ServerStopping):
        await pool.prepare(png())


@in_loop
async def test_images_that_can_not_be_used_leave_the_process_as_it_is() -> None:
    async with workers() as pool:
        assert "not an image" in await refusal(pool, b"hello")
        assert "more memory" in await refusal(pool, b"memory")
        pids = pool.statistics()["pids"]
        read(await pool.prepare(png()))
        with pytest.raises(InvalidRequest, match="too large for this server's shared memory"):
            await pool.prepare(png(), most_bytes=100)
        assert pool.statistics()["pids"] == pids
        assert pool.statistics()["killed"] == {}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"crash ", "crashed on this image"),
        (b"fault ", "crashed on this image"),
        (b"hang  ", "took more than 2 s on this image"),
        (b"spin  ", "took more than 0.5 s of processor time on this image"),
        (b"killed", "crashed on this image"),
    ],
)
@in_loop
async def test_an_image_that_ends_its_process_fails_alone(
    data: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    killed: list[int] = []
    limit_s, cpu_s = 2.0 if data == b"hang  " else 60.0, 0.5 if data == b"spin  " else 60.0
    async with workers(limit_s=limit_s, cpu_s=cpu_s, on_killed=lambda: killed.append(1)) as pool:
        read(await pool.prepare(png()))
        first = pool.statistics()["pids"]
        doomed = asyncio.create_task(refusal(pool, data))
        await asyncio.sleep(0)
        other = asyncio.create_task(pool.prepare(png(9, 9), tenant="other"))
        assert words in await doomed
        read(await other)
        assert pool.statistics()["pids"] != first
        assert sum(pool.statistics()["killed"].values()) == 1
    assert killed == [1]
    assert "which got 400" in caplog.text


@in_loop
async def test_a_process_that_was_killed_from_outside_costs_no_request() -> None:
    async with workers() as pool:
        read(await pool.prepare(png()))
        (pid,) = pool.statistics()["pids"]
        slow = asyncio.create_task(pool.prepare(b"slow  000.50" + png(20, 20)))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        assert read(await slow).shape
        assert pool.statistics()["killed"] == {}


@in_loop
async def test_processes_that_were_killed_while_idle_are_not_asked_and_not_shown() -> None:
    async with workers(most=3) as pool:
        slow = [asyncio.create_task(pool.prepare(b"slow  000.50" + png(20 + i, 20))) for i in range(3)]
        for pixels in await asyncio.gather(*slow):
            read(pixels)
        pids = pool.statistics()["pids"]
        assert len(pids) == 3
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while pool.statistics()["pids"]:
                await asyncio.sleep(0.01)
        assert pool.statistics()["processes"] == 0
        assert read(await pool.prepare(png())).shape
        assert (pool.statistics()["processes"], pool.statistics()["killed"]) == (1, {})


@in_loop
async def test_full_shared_memory_is_not_a_bad_image() -> None:
    async with workers() as pool:
        with pytest.raises(NoRoom, match=r"shared memory of this machine has no room for an image \(.+\)") as caught:
            await pool.prepare(b"full  ")
        assert caught.value.retry_after_s


@in_loop
async def test_a_machine_without_shared_memory_refuses_images(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(shared_memory, "Owner", none)
    async with workers() as pool:
        with pytest.raises(NoRoom, match=r"no room for an image \(Read-only file system\)"):
            await pool.prepare(png())


@in_loop
async def test_a_process_that_does_not_start_is_503() -> None:
    class Missing(ImageProcess):
        module = "tests.media.no_such_module"

    async with workers(make=Missing) as pool:
        with pytest.raises(EngineUnavailable, match="no image process could be started"):
            await pool.prepare(png())
        assert pool.statistics()["processes"] == 0


@in_loop
async def test_what_a_caller_left_behind_is_removed() -> None:
    async with workers() as pool:
        read(await pool.prepare(png()))
        leaving = asyncio.create_task(pool.prepare(b"slow  000.30" + png(20, 20)))
        await asyncio.sleep(0.1)
        leaving.cancel()
        read(await pool.prepare(png()))
        assert not left_over()


@in_loop
async def test_closing_fails_what_is_queued_and_what_runs() -> None:
    async with workers() as pool:
        running = asyncio.create_task(pool.prepare(b"hang  "))
        queued = asyncio.create_task(pool.prepare(png()))
        await asyncio.sleep(0.1)
        await pool.close()
        for task in (running, queued):
            with pytest.raises(ServerStopping):
                await task
    assert not left_over()


# The queue, with processes that take as long as a test says


class ScriptedProcess:
    """A process whose images end when the test lets them."""

    made = 0
    ended = False

    def __init__(self, start: Start, limit_s: float) -> None:
        type(self).made += 1
        self.pid = type(self).made

    async def start(self) -> None: ...

    async def prepare(self, order: Prepare, data: bytes) -> Prepared | Refused:
        await asyncio.sleep(len(data) / 1e6)
        served.append(data[:1])
        return Prepared((1,), Layout())

    async def close(self) -> None: ...


served: list[bytes] = []


def scripted(**options: Any) -> ImageWorkers:
    served.clear()
    return ImageWorkers(SETTINGS, **{"make": ScriptedProcess} | options)


@in_loop
async def test_tenants_take_turns_and_small_images_pass_large_ones() -> None:
    pool = scripted()
    calls = [pool.prepare(b"A" + bytes(20_000), tenant="many") for _ in range(8)]
    calls.append(pool.prepare(b"B" + bytes(20_000), tenant="one"))
    calls.append(pool.prepare(b"C" + bytes(100), tenant="many"))
    await asyncio.gather(*calls)
    assert served.index(b"B") <= 2
    assert served.index(b"C") < 8
    assert len(served) == 10


@in_loop
async def test_each_image_ends_and_each_refusal_is_counted() -> None:
    """Bursts of many tenants: an image is prepared, or refused as busy with a time to come back, and none waits for
    longer than it may and no tenant gets nothing while another is served."""
    random = np.random.default_rng(3)
    refusals: list[Busy] = []
    pool = scripted(max_wait_s=1.0, most=2)

    async def one(tenant: int) -> tuple[int, bool]:
        size = int(10 ** random.uniform(2, 5.3))
        try:
            await asyncio.wait_for(pool.prepare(b"x" + bytes(size), tenant=str(tenant)), 10)
        except Busy as error:
            refusals.append(error)
            return tenant, False
        return tenant, True

    tenants = [0] * 300 + [int(tenant) for tenant in random.integers(1, 6, 60)]
    results = await asyncio.gather(*(one(tenant) for tenant in tenants))
    served_tenants = {tenant for tenant, good in results if good}
    refused = sum(not good for _, good in results)
    assert served_tenants == set(range(6))
    assert refused == len(refusals) == pool.statistics()["refused"] > 0
    assert all(error.retry_after_s and "try again in about" in error.message for error in refusals)
    assert pool.statistics()["pending"] == 0
    assert len(served) + refused == len(tenants)
    small = [good for tenant, good in results if tenant]
    assert sum(small) > len(small) / 2


class HeldProcess(ScriptedProcess):
    """A process whose images wait for the test."""

    held: asyncio.Event

    async def prepare(self, order: Prepare, data: bytes) -> Prepared | Refused:
        await self.held.wait()
        return await super().prepare(order, data)


@in_loop
async def test_the_next_image_of_each_tenant_outlasts_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long these take: a tenant whose images take long costs the others their wait, and itself the rest."""
    monkeypatch.setattr(module, "MIN_WAIT_S", 0.0)
    HeldProcess.held, now = asyncio.Event(), [0.0]
    pool = scripted(max_wait_s=0.0, make=HeldProcess, clock=lambda: now[0])
    slow = asyncio.create_task(pool.prepare(b"A", tenant="slow"))
    await asyncio.sleep(0)
    now[0] = 4.0
    calls = [
        pool.prepare(data, tenant=tenant) for data, tenant in ((b"B", "slow"), (b"C", "x"), (b"D", "x"), (b"E", "y"))
    ]
    others = [asyncio.create_task(call) for call in calls]
    refused = [others[0], others[2]]
    done, _ = await asyncio.wait(refused, timeout=60)
    assert done == set(refused)
    for task in refused:
        with pytest.raises(Busy, match="no image process came free") as caught:
            task.result()
        assert caught.value.retry_after_s == 4.0
    assert pool.statistics()["pending"] == 3
    HeldProcess.held.set()
    await asyncio.gather(slow, others[1], others[3])
    assert served == [b"A", b"C", b"E"]
    await pool.close()


@in_loop
async def test_no_tenant_is_served_twice_while_another_waits() -> None:
    HeldProcess.held = asyncio.Event()
    pool = scripted(make=HeldProcess)
    calls = [pool.prepare(data, tenant=tenant) for data, tenant in ((b"A", "x"), (b"B", "x"), (b"C", "x"), (b"D", "y"))]
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0)
    HeldProcess.held.set()
    await asyncio.gather(*tasks)
    assert served == [b"A", b"D", b"B", b"C"]
    await pool.close()


@in_loop
async def test_no_image_waits_for_longer_than_another_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_WAIT_S", 0.0)
    HeldProcess.held, now = asyncio.Event(), [0.0]
    pool = scripted(max_wait_s=0.0, limit_s=0.0, make=HeldProcess, clock=lambda: now[0])
    slow = asyncio.create_task(pool.prepare(b"A", tenant="slow"))
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="no image process came free") as caught:
        await pool.prepare(b"B", tenant="x")
    assert caught.value.retry_after_s == 1.0
    HeldProcess.held.set()
    await slow
    await pool.close()


@pytest.mark.parametrize(("took_s", "retry_after_s"), [(0.5, 1.0), (9.0, 9.0), (28.0, 2.0), (31.0, 1.0)])
@in_loop
async def test_the_time_to_return_is_when_a_process_is_expected_to_come_free(
    took_s: float, retry_after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_WAIT_S", 0.0)
    HeldProcess.held, now = asyncio.Event(), [0.0]
    pool = scripted(max_wait_s=0.0, make=HeldProcess, clock=lambda: now[0])
    slow = asyncio.create_task(pool.prepare(b"A", tenant="slow"))
    await asyncio.sleep(0)
    now[0] = took_s
    with pytest.raises(Busy) as caught:
        await pool.prepare(b"B", tenant="slow")
    assert caught.value.retry_after_s == retry_after_s
    HeldProcess.held.set()
    await slow
    await pool.close()


def test_there_are_few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 1), (2, 1), (8, 2), (64, 4), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert module.image_workers() == expected


def test_a_picture_is_the_same_everywhere() -> None:
    assert np.array_equal(np.asarray(picture(5, 4)), np.asarray(picture(5, 4)))
