"""Text workers in real processes: an item that breaks a limit costs its own request and nothing else."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.text import builders
from treadle.errors import Busy, ContextLengthExceeded, EngineUnavailable, InvalidRequest, ModelError, ServerStopping
from treadle.text import TextModel
from treadle.text.work import fork_server_process as process_module
from treadle.text.work import item_queue as queue_module
from treadle.text.work import work_item as item_module
from treadle.text.work import worker_pool as pool_module
from treadle.text.work.fork_server_process import ForkServerProcess
from treadle.text.work.messages import Forked, FromServer, Load
from treadle.text.work.worker_pool import WorkerPool

BUSY = "no text worker came free"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builders.write_folder(
        tmp_path_factory.mktemp("models") / "m", builders.byte_level(), chat_template=builders.CHATML
    )


def order(folder: Path, **given: Any) -> Load:
    fields: dict[str, Any] = {
        "chat_template": None,
        "context": None,
        "check": "",
        "jobs": "tests.text.jobs:JOBS",
        "memory_bytes": 2 << 30,
        "worker_bytes": 1 << 30,
    }
    return Load(folder=str(folder), **{**fields, **given})


@asynccontextmanager
async def pool_of(
    folder: Path, *, workers: int = 1, max_wait_s: float = 30.0, jobs: str = "tests.text.jobs:JOBS", **callbacks: Any
) -> AsyncIterator[WorkerPool]:
    made = WorkerPool(workers=workers, max_wait_s=max_wait_s, **callbacks)
    try:
        await made.load(order(folder, jobs=jobs))
        yield made
    finally:
        await made.close()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 100))


async def until(found: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_work_is_done_elsewhere_with_large_inputs_and_results(folder: Path) -> None:
    async def main() -> None:
        async with pool_of(folder) as pool:
            assert int(await pool.run("pid", b"")) not in (os.getpid(), pool.statistics()["pid"])
            large = os.urandom(3_000_000)
            assert await pool.run("echo", b"params", large) == b"params" + large
            statistics = pool.statistics()
            assert (statistics["done"], statistics["workers"], statistics["pending"]) == (2, 1, 0)

    run(main)


@pytest.mark.parametrize("kind", [*builders.KINDS, *builders.OTHER_KINDS])
def test_the_server_spells_every_token_as_the_tokenizer_does(tmp_path: Path, kind: str) -> None:
    tokenizer = {**builders.KINDS, **builders.OTHER_KINDS}[kind]()
    made = builders.write_folder(tmp_path / kind, tokenizer)
    model = TextModel.load(made)

    async def main() -> None:
        async with pool_of(made) as pool:
            view = pool.view()
            ids = [*range(-1, view.vocabulary + 2)]
            assert [view.token_bytes(i) for i in ids] == [model.token_bytes(i) for i in ids]
            assert view.decode(ids[1:]) == model.decode(ids[1:])
            for text in builders.CORPUS:
                encoded = model.encode(text)
                assert view.decode(encoded) == model.decode(encoded)
            names = ("context", "eos_token_ids", "special_ids", "prefix", "named_ids", "longest_token", "no_chats")
            assert [getattr(view, name) for name in names] == [getattr(model, name) for name in names]

    run(main)


def test_an_error_of_the_jobs_own_reaches_its_caller_with_its_field(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with pool_of(folder) as pool:
            before = await pool.run("pid", b"")
            with pytest.raises(ContextLengthExceeded, match="too long") as caught:
                await pool.run("refuse", b"")
            assert caught.value.param == "messages"
            assert await pool.run("pid", b"") == before

    run(main)
    assert not caplog.messages, "it is the client's business"


@pytest.mark.parametrize(
    ("job", "params", "named"),
    [
        ("spin", b"", "chat template took more than 0.3 s"),
        ("compile_for_ever", b"", "compiling the request's grammar took more than 0.3 s"),
        ("eat", b"", "tokenizer needs more memory"),
        ("panic", b"", "tokenizer crashed on this request"),
        ("die", str(int(signal.SIGSEGV)).encode(), "tokenizer crashed on this request"),
        ("die", str(int(signal.SIGABRT)).encode(), "tokenizer crashed on this request"),
        ("die", str(int(signal.SIGKILL)).encode(), "tokenizer crashed on this request"),
    ],
)
def test_what_breaks_a_bound_is_its_own_callers_fault_and_costs_the_worker_alone(
    folder: Path,
    job: str,
    params: bytes,
    named: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(item_module, "MIN_CPU_S", 0.3 if "0.3 s" in named else 30.0)

    async def main() -> None:
        async with pool_of(folder) as pool:
            before = await pool.run("pid", b"")
            guilty = asyncio.create_task(pool.run(job, params))
            innocents = [asyncio.create_task(pool.run("echo", b"%d" % i)) for i in range(4)]
            with pytest.raises(InvalidRequest, match=named):
                await guilty
            assert await asyncio.gather(*innocents) == [b"0", b"1", b"2", b"3"]
            assert await pool.run("pid", b"") != before
            assert pool.unavailable_reason == ""

    run(main)
    (line,) = [text for text in caplog.messages if named in text]
    assert "on this request, which got 400; " in line or "a request may take, which got 400; " in line


def test_a_broken_limit_is_refused_with_advice_for_its_stage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_module, "MIN_CPU_S", 0.3)

    async def main() -> None:
        async with pool_of(folder) as pool:
            with pytest.raises(InvalidRequest, match=r"of processor time on this request: use a smaller schema"):
                await pool.run("compile_for_ever", b"")
            with pytest.raises(InvalidRequest, match=r"on this request: send fewer or shorter messages"):
                await pool.run("spin", b"")

    run(main)


def test_a_grammar_that_broke_a_limit_is_refused_without_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_module, "MIN_CPU_S", 0.3)

    async def main() -> None:
        async with pool_of(folder) as pool:
            for _ in range(3):
                with pytest.raises(InvalidRequest, match=r"of processor time on this request: use a smaller schema"):
                    await pool.run("compile_for_ever", b"", grammar=b"bad")
            assert pool.counters.killed.total() == 1
            queued = [asyncio.create_task(pool.run("compile_for_ever", b"", grammar=b"worse")) for _ in range(3)]
            ended = await asyncio.gather(*queued, return_exceptions=True)
            assert [type(error) for error in ended] == [InvalidRequest] * 3
            assert pool.counters.killed.total() == 2
            with pytest.raises(InvalidRequest, match="send fewer or shorter messages"):
                await pool.run("spin", b"", grammar=b"good")
            assert await pool.run("echo", b"", b"x", grammar=b"good") == b"x"

    run(main)


def test_new_grammars_leave_a_worker_to_others(folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with pool_of(folder, workers=2) as pool:
            gate = tmp_path / "open"
            checks = [asyncio.create_task(pool.run("check", b"", bytes(gate), grammar=b"%d" % i)) for i in range(3)]
            await until(lambda: pool.statistics()["pending"] == 3, "the checks are queued")
            assert pool.statistics()["idle"] == 1
            assert await pool.run("echo", b"", b"x") == b"x"
            gate.touch()
            assert await asyncio.gather(*checks) == [b"held"] * 3

            gate.unlink()
            known = [asyncio.create_task(pool.run("check", b"", bytes(gate), grammar=b"1")) for _ in range(2)]
            await until(lambda: pool.statistics()["idle"] == 0, "checks that passed before run everywhere")
            gate.touch()
            await asyncio.gather(*known)

    run(main)


def test_a_grammar_that_was_not_reached_is_still_new(folder: Path, tmp_path: Path) -> None:
    """A job whose prompt has images asks for them before it comes to its grammar."""

    async def main() -> None:
        async with pool_of(folder, workers=2) as pool:
            gate = tmp_path / "open"
            await pool.run("echo", b"", b"x", grammar=b"1")
            checks = [asyncio.create_task(pool.run("check", b"", bytes(gate), grammar=b"1")) for _ in range(2)]
            await until(lambda: pool.statistics()["pending"] == 2, "the checks are queued")
            assert pool.statistics()["idle"] == 1
            gate.touch()
            await asyncio.gather(*checks)

    run(main)


def test_a_single_worker_checks_grammars_too(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "open").touch()

    async def main() -> None:
        async with pool_of(folder) as pool:
            assert await pool.run("check", b"", bytes(tmp_path / "open"), grammar=b"1") == b"held"

    run(main)


def test_a_worker_that_somebody_else_killed_costs_no_answer(folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with pool_of(folder) as pool:
            mark = str(tmp_path / "died once").encode()
            assert await pool.run("die", str(int(signal.SIGKILL)).encode(), mark) == b"alive"
            idle = pool.statistics()["worker_pids"][0]
            os.kill(idle, signal.SIGKILL)
            await until(lambda: idle not in pool.statistics()["worker_pids"], "the end is noticed")
            assert await pool.run("echo", b"x") == b"x"
            assert not pool.counters.killed

    run(main)


def test_workers_that_are_lost_together_are_replaced_by_as_many(folder: Path) -> None:
    async def lose_all(pool: WorkerPool) -> None:
        lost = pool.statistics()["worker_pids"]
        assert len(lost) == 2
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not set(lost) & set(pool.statistics()["worker_pids"]), "the ends are noticed")
        await until(lambda: pool.statistics()["workers"] >= 2, "others come")
        await asyncio.sleep(0.2)  # one more would come now

    async def main() -> None:
        async with pool_of(folder, workers=2) as pool:
            for _ in range(5):
                await lose_all(pool)
            assert pool.statistics()["workers"] == 2

    run(main)


def test_a_worker_that_stands_still_is_replaced(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No processor time is spent, so the bound of elapsed time ends it."""
    monkeypatch.setattr(item_module, "MIN_ELAPSED_S", 0.3)
    killed: list[str] = []

    async def main() -> None:
        async with pool_of(folder, on_killed=killed.append) as pool:
            with pytest.raises(InvalidRequest, match="took more than"):
                await pool.run("hold", b"", str(tmp_path / "never").encode())
            monkeypatch.setattr(item_module, "MIN_ELAPSED_S", 30.0)
            assert await pool.run("echo", b"x") == b"x"
            assert len(killed) == 1

    run(main)


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc tells that a process is stopped")
def test_a_worker_that_was_stopped_from_outside_costs_no_answer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP, a debugger: its piece is no more to blame than with SIGKILL."""
    monkeypatch.setattr(item_module, "MIN_ELAPSED_S", 1.0)

    async def main() -> None:
        async with pool_of(folder) as pool:
            (stopped,) = pool.statistics()["worker_pids"]
            os.kill(stopped, signal.SIGSTOP)
            assert await pool.run("echo", b"x") == b"x"
            assert pool.statistics()["worker_pids"] != [stopped]
            assert not pool.counters.killed
            await until(lambda: not alive(stopped), "it ends")

    run(main)


def test_a_worker_that_keeps_much_memory_is_replaced_by_a_small_one(folder: Path) -> None:
    async def main() -> None:
        async with pool_of(folder) as pool:
            grown = int(await pool.run("grow", b""))
            assert int(await pool.run("pid", b"")) != grown
            await until(lambda: not alive(grown), "the large one ends")

    run(main)


def test_a_wait_is_bounded_and_counted_and_health_says_that_nobody_is_free(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "MIN_WAIT_S", 0.2)
    refused: list[int] = []

    async def main() -> None:
        async with pool_of(folder, max_wait_s=0.2, on_refused=lambda: refused.append(1)) as pool:
            gate = tmp_path / "open"
            holding = asyncio.create_task(pool.run("hold", b"", str(gate).encode()))
            await asyncio.sleep(0)
            with pytest.raises(Busy, match=BUSY) as caught:
                await pool.run("echo", b"x")
            assert caught.value.retry_after_s is not None
            assert (len(refused), pool.counters.refused) == (1, 1)
            await until(lambda: pool.unavailable_reason, "it says that it is blocked")
            assert "no text worker has been free for" in pool.unavailable_reason
            gate.touch()
            assert await holding == b"held"
            assert pool.unavailable_reason == ""
            assert await pool.run("echo", b"x") == b"x"

    run(main)


def test_a_caller_that_leaves_takes_waiting_work_along(folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with pool_of(folder) as pool:
            gate, mark = tmp_path / "open", tmp_path / "ran"
            holding = asyncio.create_task(pool.run("hold", b"", str(gate).encode()))
            waiting = asyncio.create_task(pool.run("die", b"0", str(mark).encode()))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert pool.statistics()["pending"] == 1
            gate.touch()
            await holding
            await pool.run("echo", b"")
            assert not mark.exists()

    run(main)


def test_a_flood_of_one_tenant_does_not_starve_another(folder: Path, tmp_path: Path) -> None:
    done: list[str] = []

    async def main() -> None:
        async with pool_of(folder) as pool:

            async def work(tenant: str) -> None:
                await pool.run("echo", b"", tenant=tenant)
                done.append(tenant)

            gate = tmp_path / "open"
            holding = asyncio.create_task(pool.run("hold", b"", str(gate).encode(), tenant="flood"))
            flood = [asyncio.create_task(work("flood")) for _ in range(20)]
            await asyncio.sleep(0)
            other = asyncio.create_task(work("other"))
            await asyncio.sleep(0)
            gate.touch()
            await asyncio.gather(holding, other, *flood)

    run(main)
    assert done.index("other") <= 2


def test_a_tenant_with_every_pending_place_gives_way_to_another(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "MAX_PENDING", 8)

    async def main() -> None:
        async with pool_of(folder) as pool:
            gate = tmp_path / "open"
            holding = asyncio.create_task(pool.run("hold", b"", str(gate).encode(), tenant="flood"))
            await asyncio.sleep(0)
            flood = [asyncio.create_task(pool.run("echo", b"f", tenant="flood")) for _ in range(8)]
            await asyncio.sleep(0)
            with pytest.raises(Busy, match="too many prompts wait"):
                await pool.run("echo", b"", tenant="flood")
            others = [asyncio.create_task(pool.run("echo", b"o", tenant="other")) for _ in range(8)]
            await asyncio.sleep(0)
            gate.touch()
            ended = await asyncio.gather(holding, *flood, *others, return_exceptions=True)
            kept = [not isinstance(result, Busy) for result in ended]
            assert kept == [True] * 5 + [False] * 4 + [True] * 4 + [False] * 4
            refused = [error for error in ended if isinstance(error, Busy)]
            assert all(error.retry_after_s for error in refused)
            assert pool.counters.refused == 9

    run(main)


def test_the_fork_server_is_started_again_and_work_goes_on(folder: Path) -> None:
    restarts: list[int] = []

    async def main() -> None:
        async with pool_of(folder, workers=2, on_restart=lambda: restarts.append(1)) as pool:
            old = pool.statistics()
            os.kill(old["pid"], signal.SIGKILL)
            await until(lambda: pool.unavailable_reason, "its end is noticed")
            with pytest.raises(EngineUnavailable, match="started again"):
                pool.view()
            assert await pool.run("echo", b"x") == b"x"
            await until(lambda: not pool.unavailable_reason, "it is back")
            new = pool.statistics()
            assert (new["restarts"], len(restarts), new["workers"]) == (1, 1, 2)
            if sys.platform == "linux":
                await until(lambda: not any(map(alive, old["worker_pids"])), "the old workers went with it")

    run(main)


def test_while_the_fork_server_restarts_its_expected_end_comes_nearer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    loading = ForkServerProcess.load

    def back_s(pool: WorkerPool) -> float | None:
        with pytest.raises(EngineUnavailable) as caught:
            pool.view()
        assert pool.is_restarting
        return caught.value.retry_after_s

    async def main() -> None:
        nonlocal now
        go = asyncio.Event()

        async def load(self: ForkServerProcess, *arguments: Any) -> Any:
            await go.wait()
            return await loading(self, *arguments)

        async with pool_of(folder, clock=lambda: now) as pool:
            assert not pool.is_restarting
            pool._load_s = 8.0
            monkeypatch.setattr(ForkServerProcess, "load", load)
            os.kill(pool.statistics()["pid"], signal.SIGKILL)
            await until(lambda: pool.is_restarting, "its end is noticed")
            assert back_s(pool) == 8.0
            now += 5.0
            assert back_s(pool) == 3.0
            assert pool._busy("it is full").retry_after_s == 3.0
            now += 13.0
            assert back_s(pool) == 10.0, "as long again as it is late"
            go.set()
            await until(lambda: not pool.is_restarting, "it is back")
            pool.view()

    run(main)


def test_a_worker_that_is_lost_while_the_fork_server_loads_is_no_more_than_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork server that has not loaded the model answers no order to fork: it would be taken for hung."""
    loading = ForkServerProcess.load

    async def main() -> None:
        async with pool_of(folder, workers=2) as pool:
            refills: list[asyncio.Task[None]] = []

            async def load(self: ForkServerProcess, *arguments: Any) -> Any:
                loads = asyncio.create_task(loading(self, *arguments))
                await asyncio.sleep(0)  # the order to load goes first
                refills.append(asyncio.create_task(pool._refill()))
                return await loads

            monkeypatch.setattr(ForkServerProcess, "load", load)
            os.kill(pool.statistics()["pid"], signal.SIGKILL)
            await until(lambda: refills and not pool.unavailable_reason, "it is back")
            await asyncio.gather(*refills)
            found = pool.statistics()
            assert (found["workers"], found["killed"], found["restarts"]) == (2, {}, 1)

    run(main)


def test_a_fork_server_that_is_killed_while_it_loads_does_not_blame_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = ForkServerProcess.start

    async def start(self: ForkServerProcess) -> None:
        await starting(self)
        self.kill()

    monkeypatch.setattr(ForkServerProcess, "start", start)
    said = refusal(folder)
    assert "starting the text processes was killed (SIGKILL)" in said or "could not be started" in said
    assert "another model" not in said


def test_a_fork_server_that_hangs_is_killed_and_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_module, "FORK_S", 1.0)
    monkeypatch.setattr(pool_module, "MIN_WAIT_S", 0.2)
    killed: list[str] = []

    async def main() -> None:
        async with pool_of(folder, on_killed=killed.append) as pool:
            old = pool.statistics()
            os.kill(old["pid"], signal.SIGSTOP)
            os.kill(old["worker_pids"][0], signal.SIGKILL)
            waiting = asyncio.create_task(pool.run("echo", b"x"))
            await until(lambda: pool.unavailable_reason, "health tells of it")
            assert "no text worker runs" in pool.unavailable_reason
            with pytest.raises(EngineUnavailable, match="no text worker runs") as caught:
                pool.view()
            assert caught.value.retry_after_s is not None
            assert await waiting == b"x"
            await until(lambda: not pool.unavailable_reason, "it is back")
            pool.view()
            new = pool.statistics()
            assert (new["restarts"], new["workers"], new["killed"]) == (1, 1, {"the fork server": 1})
            assert killed == ["the fork server"]
            await until(lambda: not alive(old["pid"]), "the old one is gone")

    run(main)
    told = [record.getMessage() for record in caplog.records if "fork server" in record.getMessage()]
    how = "the text fork server started no worker within 1 s and was killed"
    effect = "new requests get 503 until it is back, running answers go on"
    assert told == [f"{how}; starting it again in 0.0 s (restart 1); {effect}"]


def test_while_the_fork_server_hangs_a_lost_workers_piece_goes_to_another_that_is_idle(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "REPORT_S", 0.1)

    async def main() -> None:
        async with pool_of(folder, workers=2) as pool:
            mark = tmp_path / "go"
            piece = asyncio.create_task(pool.run("hold", b"", str(mark).encode()))
            await until(lambda: pool.statistics()["idle"] == 1, "it runs")
            (busy,) = (worker.pid for worker in pool._workers if worker.item is not None)
            pid = pool.statistics()["pid"]
            os.kill(pid, signal.SIGSTOP)
            os.kill(busy, signal.SIGKILL)
            mark.touch()
            try:
                await asyncio.wait_for(piece, process_module.FORK_S / 2)
            finally:
                os.kill(pid, signal.SIGCONT)

    run(main)


def test_a_fork_server_that_hangs_right_after_its_start_ends_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "FORK_S", 0.2)
    handle = ForkServerProcess._handle

    def deaf(self: ForkServerProcess, message: FromServer) -> None:
        if not isinstance(message, Forked):
            handle(self, message)

    monkeypatch.setattr(ForkServerProcess, "_handle", deaf)
    assert "started no worker within 0.2 s" in refusal(folder)


def test_workers_that_were_idle_for_long_are_not_blocked_once_all_have_work(folder: Path, tmp_path: Path) -> None:
    now = 0.0

    async def main() -> None:
        nonlocal now
        async with pool_of(folder, clock=lambda: now) as pool:
            now += 1000.0
            gate = tmp_path / "open"
            holding = asyncio.create_task(pool.run("hold", b"", str(gate).encode()))
            await until(lambda: not pool.statistics()["idle"], "it works")
            assert (pool.blocked_s, pool.unavailable_reason) == (0.0, "")
            now += 31.0
            assert "no text worker has been free for 31.0 s" in pool.unavailable_reason
            gate.touch()
            await holding

    run(main)


def test_a_fork_server_for_which_there_is_no_descriptor_is_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files")]
    starting = ForkServerProcess.start

    async def start(self: ForkServerProcess) -> None:
        if failures:
            raise failures.pop()
        await starting(self)

    async def main() -> None:
        async with pool_of(folder) as pool:
            monkeypatch.setattr(ForkServerProcess, "start", start)
            os.kill(pool.statistics()["pid"], signal.SIGKILL)
            await until(lambda: pool.unavailable_reason, "its end is noticed")
            assert await pool.run("echo", b"x") == b"x"
            assert pool.statistics()["restarts"] == 2

    run(main)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_fork_server_has_one_thread_and_no_grpc(folder: Path) -> None:
    """A process with threads can't fork safely."""

    async def main() -> None:
        async with pool_of(folder, jobs="treadle.fronts.web.body_jobs:JOBS") as pool:
            own = Path(f"/proc/{pool.statistics()['pid']}")
            assert len(list((own / "task").iterdir())) == 1
            assert "cygrpc" not in (own / "maps").read_text()

    run(main)


def test_a_fork_server_that_never_comes_back_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_BACKOFF_S", 0.0)

    async def main() -> None:
        async with pool_of(folder) as pool:
            pool._load_order = order(folder / "gone")
            os.kill(pool.statistics()["pid"], signal.SIGKILL)
            await pool.failed()
            assert pool.is_failed
            assert "in a row" in pool.unavailable_reason

    run(main)


def test_close_answers_everybody_and_leaves_no_process(folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with pool_of(folder) as pool:
            pids = [pool.statistics()["pid"], *pool.statistics()["worker_pids"]]
            never = str(tmp_path / "never").encode()
            tasks = [asyncio.create_task(pool.run("hold", b"", never)) for _ in range(3)]
            await until(lambda: pool.statistics()["pending"] == 3, "all are there")
            await pool.close()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(error) for error in ended] == [ServerStopping] * 3
            with pytest.raises(ServerStopping):
                await pool.run("echo", b"")
        await until(lambda: not any(map(alive, pids)), "no process is left")

    run(main)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a busy worker ends with its piece of work")
def test_everything_ends_with_a_server_that_is_killed(folder: Path) -> None:
    code = (
        "import asyncio, sys, os\n"
        "from tests.text.test_worker_pool import pool_of\n"
        "from pathlib import Path\n"
        "async def main():\n"
        "    async with pool_of(Path(sys.argv[1]), workers=2) as pool:\n"
        "        asyncio.create_task(pool.run('hold', b'', b'/nowhere/at/all'))\n"
        "        await asyncio.sleep(0.2)\n"
        "        found = pool.statistics()\n"
        "        print(found['pid'], *found['worker_pids'], flush=True)\n"
        "        await asyncio.sleep(100)\n"
        "asyncio.run(main())\n"
    )

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, str(folder), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        pids = list(map(int, (await process.stdout.readline()).split()))
        assert len(pids) == 3
        process.kill()
        await process.wait()
        await until(lambda: not any(map(alive, pids)), "all have ended")

    run(main)


def test_no_secret_reaches_the_text_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_API_KEY", "secret")

    async def main() -> None:
        async with pool_of(folder) as pool:
            assert "TREADLE_API_KEY" not in psutil.Process(pool.statistics()["pid"]).environ()

    run(main)


# Folders -----------------------------------------------------------------------------------------------------------


def refusal(folder: Path, **given: Any) -> str:
    async def main() -> str:
        made = WorkerPool(workers=1, max_wait_s=1.0)
        try:
            with pytest.raises(ModelError) as caught:
                await made.load(order(folder, **given))
            return caught.value.message
        finally:
            await made.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    "template",
    [
        "{{ 10 ** (10 ** 9) }}",
        "{{ 'a' * 80000000000 }}",
        "{{ '%20000000000d' % 1 }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_never_ends_is_refused_in_one_line(tmp_path: Path, template: str) -> None:
    folder = builders.write_folder(tmp_path / "m", builders.byte_level(), chat_template=template)
    said = refusal(folder)
    assert "chat template" in said
    assert "\n" not in said


def test_a_tokenizer_that_explodes_is_refused_in_one_line(tmp_path: Path) -> None:
    from tokenizers import normalizers

    tokenizer = builders.byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "aa") for _ in range(40)])
    said = refusal(builders.write_folder(tmp_path / "m", tokenizer), memory_bytes=512 << 20)
    assert "tokenizer" in said
    assert "\n" not in said


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_pipe_in_a_files_place_is_refused_at_once(tmp_path: Path, name: str) -> None:
    folder = builders.write_folder(tmp_path / "m", builders.byte_level())
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert name in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "special_tokens_map.json"])
def test_deep_json_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    folder = builders.write_folder(tmp_path / "m", builders.byte_level())
    (folder / name).write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    assert "nested too deeply" in refusal(folder)


def test_a_factor_beyond_numbers_changes_nothing(tmp_path: Path) -> None:
    rope = {"type": "yarn", "factor": 1e308, "original_max_position_embeddings": 1024}
    config = {"vocab_size": 400, "max_position_embeddings": 2048, "rope_scaling": rope}
    folder = builders.write_folder(tmp_path / "m", builders.byte_level(), config=config)
    assert TextModel.load(folder).context == 2048
