"""Jobs as their callers see them: released by the job's terminal event alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.aio import in_loop
from tests.support.owners import WAIT_S, settle
from treadle.core.messages import CancelJob, JobDone, RunJob
from treadle.engine.jobs import Jobs
from treadle.errors import EngineDied, EngineUnavailable, InvalidRequest, JobFailed


class Wire:
    def __init__(self) -> None:
        self.sent: list[RunJob | CancelJob] = []
        self.jobs = Jobs(self.sent.append)

    async def begin(self, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(self.jobs.run("save", **options))
        await settle()
        return task

    def done(self, **fields: Any) -> None:
        self.jobs.done(JobDone(id=self.sent[0].id, **fields))


@in_loop
async def test_a_job_gives_its_result():
    wire = Wire()
    task = await wire.begin(path="/x", n=3)
    assert wire.sent == [RunJob(id="job-1", name="save", args={"path": "/x", "n": 3})]
    assert wire.jobs.pending == 1
    wire.done(result={"bytes": 7})
    assert await asyncio.wait_for(task, WAIT_S) == {"bytes": 7}
    assert wire.jobs.pending == 0
    wire.done(result="again")


@pytest.mark.parametrize(
    ("code", "error"), [("engine_job_failed", JobFailed), ("invalid_request", InvalidRequest), ("new", Exception)]
)
@in_loop
async def test_a_job_that_failed_raises_its_error(code, error):
    wire = Wire()
    task = await wire.begin()
    wire.done(code=code, message="why")
    with pytest.raises(error, match="why"):
        await asyncio.wait_for(task, WAIT_S)


@in_loop
async def test_a_caller_cancelled_again_and_again_is_released_by_the_terminal_event_alone():
    """A3, A5: the owner is not free before the work has unwound."""
    wire = Wire()
    hooks: list[str] = []
    task = await wire.begin(on_cancel=lambda: hooks.append("hook"))
    for _ in range(3):
        task.cancel()
        await settle()
        assert not task.done()
    assert (hooks, wire.sent[1:]) == (["hook"], [CancelJob(id="job-1")])
    assert wire.jobs.pending == 1
    wire.done(code="request_cancelled", message="stopped")
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, WAIT_S)
    assert task.cancelled()


@in_loop
async def test_a_hook_that_raises_is_logged_and_changes_nothing_else(caplog):
    """A5."""
    wire = Wire()

    def hook() -> None:
        raise ValueError("the hook's fault")

    task = await wire.begin(on_cancel=hook)
    task.cancel()
    await settle()
    assert not task.done()
    assert wire.sent[1:] == [CancelJob(id="job-1")]
    assert "on_cancel of job job-1 failed" in caplog.text
    wire.done(result="finished all the same")
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, WAIT_S)


@in_loop
async def test_a_cancellation_after_the_end_asks_nobody_to_stop():
    """A5: the hook is called where it can still stop the work, and nowhere else."""
    wire = Wire()
    hooks: list[str] = []
    task = await wire.begin(on_cancel=lambda: hooks.append("hook"))
    wire.done(result=1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, WAIT_S)
    assert (hooks, len(wire.sent)) == ([], 1)


@in_loop
async def test_a_time_limit_around_a_job_waits_for_its_end():
    """A3."""
    wire = Wire()

    async def limited() -> None:
        async with asyncio.timeout(0):
            await wire.jobs.run("save")

    task = asyncio.create_task(limited())
    while len(wire.sent) < 2:
        await asyncio.sleep(0)
    assert not task.done()
    wire.done(result=1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(task, WAIT_S)


@in_loop
async def test_jobs_are_lost_with_the_engine_each_with_an_error_of_its_own():
    """B7: also one whose caller was cancelled."""
    wire = Wire()
    tasks = [await wire.begin() for _ in range(3)]
    tasks[2].cancel()
    await settle()
    wire.jobs.fail_all(EngineDied("gone"))
    await asyncio.wait(tasks, timeout=WAIT_S)
    errors = [tasks[0].exception(), tasks[1].exception()]
    assert [type(error) for error in errors] == [EngineDied] * 2
    assert errors[0] is not errors[1]
    assert tasks[2].cancelled()
    assert wire.jobs.pending == 0


@pytest.mark.parametrize("error", [EngineUnavailable("loading"), TypeError("not a plain value")])
@in_loop
async def test_a_job_that_cannot_be_sent_is_not_waited_for(error):
    """B7: else the engine would seem to owe it for ever."""

    def send(message: object) -> None:
        raise error

    jobs = Jobs(send)
    with pytest.raises(type(error)):
        await jobs.run("save")
    assert jobs.pending == 0
