"""The owner in a child process, killed, hung and cut off for real."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.support.aio import in_loop
from tests.support.capabilities import capabilities
from tests.support.child import ENTRY
from tests.support.faults import plain
from tests.support.owners import settle
from treadle.core.messages import Failed, Loading, Ready, Stop, Submit
from treadle.engine import deaths as deaths_module
from treadle.engine.admission import AdmissionLimits
from treadle.engine.child import Channel, freeze_gc_when_ready, transmit
from treadle.engine.client import EngineClient
from treadle.engine.framing import HEADER, frame, from_owner
from treadle.engine.in_flight_table import allocate
from treadle.engine.outbox import Outbox
from treadle.engine.process import ProcessOwner, describe_exit, frame_arguments
from treadle.engine.status import status_of
from treadle.engine.timeouts import Timeouts
from treadle.errors import JobFailed, Quarantined, StartFailed, StepFailed
from treadle.file_descriptors import DescriptorReserve
from treadle.processes import is_stopped

WAIT_S = 60.0  # a child imports its world on a busy core
REQUEST = Submit(id="", prompt=(1, 2), max_tokens=8)
TELLS_STOPS = Path("/proc/self/stat").exists()
TOKENS = [plain(REQUEST, i) for i in range(8)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(deaths_module, "BACKOFF_S", (0.0,))


@asynccontextmanager
async def engine(*, hang_after_s: float = 30.0, **arguments: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient(
        lambda: ProcessOwner(ENTRY, arguments), AdmissionLimits(4, 4, 30.0), Timeouts(hang_after_s, WAIT_S)
    )
    try:
        yield client
    finally:
        await asyncio.wait_for(client.stop(), WAIT_S)
        assert client.supervisor.pid is None or not psutil.pid_exists(client.supervisor.pid), "a child was left behind"


async def start(client: EngineClient) -> int:
    await asyncio.wait_for(client.start(), WAIT_S)
    assert client.supervisor.pid is not None
    return client.supervisor.pid


async def ready_again(client: EngineClient, old: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while not client.health().ready or client.supervisor.pid == old:
            await client.supervisor._next_change()


async def generate(client: EngineClient, request: Submit = REQUEST) -> list[int]:
    async with asyncio.timeout(WAIT_S):
        with client.reserve(
            rows=1, prompt_tokens=len(request.prompt), completion_tokens=8, kind="chat", tag="t"
        ) as reservation:
            (generation,) = reservation.submit([request])
            return [token async for delta in generation for token in delta.tokens]


@contextmanager
def no_descriptors(but: int = 256) -> Iterator[None]:
    """Prevent this process from opening files within the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    gc.collect()  # or descriptors of earlier tests are closed within the block
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(but, hard), hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


# A good life -------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_child_generates_runs_jobs_and_ends_on_stop(tmp_path):
    """A1, C3."""
    async with engine(closed=str(tmp_path / "closed")) as client:
        pid = await start(client)
        assert pid != os.getpid()
        assert os.getpgid(pid) == pid, "Ctrl-C in a terminal must reach the server alone"
        assert await generate(client) == TOKENS
        assert await asyncio.wait_for(client.jobs.run("echo", data=b"\x00"), WAIT_S) == {"data": b"\x00"}
        with pytest.raises(JobFailed, match="not made of plain values"):
            await asyncio.wait_for(client.jobs.run("odd"), WAIT_S)
        assert await generate(client) == TOKENS
    assert client.health().state == "stopped"
    assert (tmp_path / "closed").exists()


@in_loop
async def test_a_prompt_of_100k_tokens_crosses():
    prompt = tuple(range(100_000))
    async with engine(can={"context": 200_000}) as client:
        await start(client)
        request = Submit(id="", prompt=prompt, max_tokens=8)
        assert await generate(client, request) == [plain(request, i) for i in range(8)]
        big = "é" * 3_000_000
        assert await asyncio.wait_for(client.jobs.run("echo", big=big), WAIT_S) == {"big": big}


@in_loop
async def test_signals_meant_for_the_server_do_not_end_the_child():
    """C3: only Stop, or the parent's end, does."""
    async with engine() as client:
        pid = await start(client)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        assert await generate(client) == TOKENS
        assert client.supervisor.pid == pid


# Deaths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
@in_loop
async def test_a_child_that_is_killed_mid_stream_is_replaced_and_its_work_goes_on(tmp_path, number):
    """B7, C4: what ran goes on from its tokens, what waited runs, and nobody hears of it."""
    async with engine(hang_in="step", at=4, max_running=1, once=str(tmp_path / "died")) as client:
        pid = await start(client)
        with client.reserve(rows=2, prompt_tokens=4, completion_tokens=8, kind="chat", tag="t") as reservation:
            runs, waits = reservation.submit([REQUEST, REQUEST])
            stream = aiter(runs)
            first = await asyncio.wait_for(anext(stream), WAIT_S)
            assert first.finish is None
            os.kill(pid, number)
            rest = await asyncio.wait_for(_to_the_end(stream), WAIT_S)
            assert [*first.tokens, *rest] == TOKENS
            assert await asyncio.wait_for(_to_the_end(aiter(waits)), WAIT_S) == TOKENS
        assert client.supervisor.pid != pid
        assert client.busy == 0
        assert await generate(client) == TOKENS
        status = status_of(client)["engine"]
        assert (status["restarts"], status["replayed"], status["quarantined"]) == (1, 2, 0)


async def _to_the_end(stream: Any) -> list[int]:
    return [token async for delta in stream for token in delta.tokens]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ({"signal": int(signal.SIGABRT)}, "crash"),
        ({"broken": True, "at": 2}, "crash"),
        ({"exit": True}, "crash"),
        ({"hang_in": "step", "at": 3}, "hang"),
        ({"signal": int(signal.SIGKILL), "at": 3}, "killed"),
    ],
)
@in_loop
async def test_a_child_that_dies_once_costs_a_pause_alone(tmp_path, fault, cause):
    """B7, C4: a fault of MLX's runtime, a hang, an exit that nobody catches."""
    async with engine(hang_after_s=1.0, once=str(tmp_path / "died"), **fault) as client:
        pid = await start(client)
        assert await generate(client) == TOKENS
        assert not psutil.pid_exists(pid)
        assert client.supervisor.deaths.by_cause == {cause: 1}
        assert await generate(client) == TOKENS
        assert client.dispatch.quarantine.condemned == 0


@in_loop
async def test_restarts_that_fail_three_times_are_the_end(tmp_path):
    """B7, C4."""
    async with engine(after=str(tmp_path / "built")) as client:
        os.kill(await start(client), signal.SIGKILL)
        assert await asyncio.wait_for(client.supervisor.failed(), 3 * WAIT_S) == "the model is gone"
        assert client.health().state == "failed"
        assert client.supervisor.restarts == 3


# Poison ------------------------------------------------------------------------------------------------------------

POISON = Submit(id="", prompt=(66, 2), max_tokens=40)
INNOCENTS = [Submit(id="", prompt=(i, 3, i), max_tokens=30) for i in range(1, 5)]


async def one(client: EngineClient, request: Submit, tenant: str = "") -> list[int]:
    """Return a request that differs from all others."""
    size: dict[str, Any] = {"prompt_tokens": len(request.prompt), "completion_tokens": request.max_tokens}
    with client.reserve(rows=1, kind="chat", tag="t", tenant=tenant, **size) as reservation:
        (generation,) = reservation.submit([request])
        return [token async for delta in generation for token in delta.tokens]


async def end_of_a_poison_in_a_crowd(client: EngineClient, tokens: int = 30) -> Any:
    """Return the harmful request's tokens or error, after checking that the others get their tokens."""
    innocents = [msgspec.structs.replace(request, max_tokens=tokens) for request in INNOCENTS]
    client.admission.limits = AdmissionLimits(8, 8, 30.0)
    await start(client)
    async with asyncio.timeout(2 * WAIT_S):
        crowd = [asyncio.create_task(one(client, request)) for request in innocents]
        await settle()
        foe = asyncio.create_task(one(client, POISON))
        answers = await asyncio.gather(*crowd)
        (end,) = await asyncio.gather(foe, return_exceptions=True)
    assert answers == [[plain(request, i) for i in range(tokens)] for request in innocents]
    return end


@pytest.mark.parametrize(
    ("poison", "deaths"),
    [
        ({"how": "SIGABRT"}, 3),
        ({"how": "SIGSEGV", "at": 12}, 4),
        ({"how": "SIGBUS", "at": 3, "since_joined": True}, 5),
        ({"how": "hang", "at": 5}, 4),
        ({"how": "broken"}, 3),
        ({"how": "broken", "at": 12}, 4),
    ],
    ids=str,
)
@in_loop
async def test_a_poison_is_found_and_the_others_get_what_they_would_have_got(poison, deaths):
    """D4: at prefill, at a token, with a hang, with a fault of the runtime."""
    async with engine(hang_after_s=1.0, max_running=8, poison={"token": 66, **poison}) as client:
        assert isinstance(await end_of_a_poison_in_a_crowd(client), Quarantined)
        status = status_of(client)["engine"]
        assert sum(status["deaths"].values()) <= deaths
        assert (status["quarantined"], status["deaths_explained"]) == (1, sum(status["deaths"].values()))
        async with asyncio.timeout(WAIT_S):
            while not client.health().ready:
                await client.supervisor._next_change()
        before = client.supervisor.pid
        with pytest.raises(Quarantined):
            await one(client, POISON)
        assert client.supervisor.pid == before, "it costs no engine any more"
        assert client.busy == 0


@pytest.mark.parametrize(
    ("poison", "deaths"),
    [({"how": "SIGABRT"}, {2}), ({"how": "SIGSEGV", "at": 12}, {2, 4}), ({"how": "hang"}, {2})],
    ids=str,
)
@in_loop
async def test_a_poison_takes_two_deaths_whoever_waits_beside_it(poison, deaths):
    """D4: tenants take turns on a full server, so the one that is admitted last is not the one that came first. Steps
    here take no time, so a death may lose the reports of several: then a trial ends before the poison acts again."""
    async with engine(hang_after_s=1.0, max_running=2, poison={"token": 66, **poison}) as client:
        client.admission.limits = AdmissionLimits(2, 30, 60.0)
        await start(client)
        crowd = [
            asyncio.create_task(one(client, Submit(id="", prompt=(i, 3), max_tokens=300 + 40 * i), tenant))
            for i, tenant in enumerate(("greedy",) * 8 + ("second", "third"), 1)
        ]
        foe = asyncio.create_task(one(client, POISON, "foe"))
        async with asyncio.timeout(2 * WAIT_S):
            await asyncio.gather(*crowd)
            with pytest.raises(Quarantined):
                await foe
        assert client.supervisor.deaths.total == client.supervisor.deaths.explained
        assert client.supervisor.deaths.total in deaths


@in_loop
async def test_a_poison_that_acts_beside_others_alone_is_found_or_ends_alone():
    """D4: either way nobody else pays for it with more than a pause. The others are long, so that it meets them."""
    async with engine(max_running=8, poison={"token": 66, "beside": True}, can={"context": 100_000}) as client:
        end = await end_of_a_poison_in_a_crowd(client, tokens=2000)
        assert isinstance(end, Quarantined) or end == [plain(POISON, i) for i in range(40)]
        assert 1 <= client.supervisor.deaths.total <= 4


@in_loop
async def test_an_exception_of_one_row_costs_no_engine():
    """B7: found by the owner's own trial."""
    async with engine(poison={"token": 66, "how": "raise", "at": 2}) as client:
        pid = await start(client)
        crowd = [asyncio.create_task(one(client, request)) for request in INNOCENTS[:3]]
        with pytest.raises(StepFailed):
            await one(client, POISON)
        answers = await asyncio.gather(*crowd)
        assert answers == [[plain(request, i) for i in range(30)] for request in INNOCENTS[:3]]
        assert client.supervisor.pid == pid


@in_loop
async def test_three_kills_in_the_middle_of_streams_cost_pauses_alone():
    """An operator's doing is nobody's fault, whenever it comes."""
    async with engine(can={"context": 100_000}) as client:
        client.admission.limits = AdmissionLimits(4, 4, 30.0)
        await start(client)
        requests = [Submit(id="", prompt=(i, 3, i), max_tokens=3000) for i in range(1, 5)]
        with client.reserve(rows=4, prompt_tokens=12, completion_tokens=3000, kind="chat", tag="t") as reservation:
            generations = reservation.submit(requests)
            readers = [asyncio.create_task(_to_the_end(aiter(generation))) for generation in generations]
            async with asyncio.timeout(2 * WAIT_S):
                for kill in range(1, 4):
                    while not client.health().ready or min(g.completion_tokens for g in generations) < 50 * kill:
                        await asyncio.sleep(0.001)
                    assert client.supervisor.pid is not None
                    os.kill(client.supervisor.pid, signal.SIGKILL)
                    while client.supervisor.restarts < kill:
                        await asyncio.sleep(0.001)
                answers = await asyncio.gather(*readers)
        assert answers == [[plain(request, i) for i in range(3000)] for request in requests]
        assert client.supervisor.deaths.by_cause == {"killed": 3}
        assert client.dispatch.quarantine.condemned == 0


@in_loop
async def test_an_idle_child_that_is_stopped_is_not_ready_within_the_bound_and_is_replaced():
    """D21: nobody asks it for anything."""
    async with engine(hang_after_s=1.0) as client:
        pid = await start(client)
        os.kill(pid, signal.SIGSTOP)
        await ready_again(client, pid)
        assert client.supervisor.deaths.by_cause == {"killed" if TELLS_STOPS else "hang": 1}
        assert await generate(client) == TOKENS


@pytest.mark.skipif(not TELLS_STOPS, reason="no /proc")
@in_loop
async def test_a_child_that_is_stopped_from_outside_is_no_requests_fault():
    """Though one request is alone in it each time. Until it is stopped it may be as slow as the machine makes it."""
    request = Submit(id="", prompt=(1, 3, 1), max_tokens=20_000)
    async with engine(can={"context": 100_000}) as client:
        await start(client)
        answer, patient = asyncio.create_task(one(client, request)), client.supervisor._timeouts
        async with asyncio.timeout(2 * WAIT_S):
            for stop in range(1, 3):
                while not client.health().ready or status_of(client)["admission"]["running"] == 0:
                    await asyncio.sleep(0.001)
                pid = client.supervisor.pid
                assert pid is not None
                os.kill(pid, signal.SIGSTOP)
                while not is_stopped(pid):
                    await asyncio.sleep(0.001)
                client.supervisor._timeouts = Timeouts(0.5, WAIT_S)
                while client.supervisor.restarts < stop:
                    await asyncio.sleep(0.001)
                client.supervisor._timeouts = patient
                assert "stopped from outside" in client.supervisor.reason
            assert await answer == [plain(request, i) for i in range(20_000)]
        assert client.supervisor.deaths.by_cause == {"killed": 2}
        assert client.dispatch.quarantine.condemned == 0


# Starts that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["entry", "construct", "warm_up", "capabilities"])
@in_loop
async def test_a_start_that_fails_says_why(where, tmp_path):
    """C1, C2: what was built is closed, nothing lives on."""
    fault: dict[str, Any] = {where: "weights are torn"}
    async with engine(closed=str(tmp_path / "closed"), **fault) as client:
        with pytest.raises(StartFailed, match=r"^weights are torn$"):
            await start(client)
        assert not client.health().ready
    assert (tmp_path / "closed").exists() == (where in ("warm_up", "capabilities"))


@in_loop
async def test_an_owner_whose_first_word_cannot_be_sent_is_a_failed_start():
    """C1: it must not look as if it still loaded."""
    async with engine(unplain=True) as client:
        with pytest.raises(StartFailed, match="exit code 4"):
            await start(client)


@in_loop
async def test_arguments_that_are_not_plain_are_a_failed_start():
    async with engine(odd=object()) as client:
        with pytest.raises(StartFailed, match="could not be launched"):
            await start(client)
        assert client.supervisor.pid is None


@in_loop
async def test_a_spawn_that_fails_leaves_nothing_open(monkeypatch):
    """C1."""

    async def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no more sockets")

    monkeypatch.setattr(asyncio, "open_connection", refuse)
    owner = ProcessOwner(ENTRY, {})
    with pytest.raises(OSError, match="no more sockets"):
        await owner.start(lambda message: None, lambda how: None)
    assert owner._process is not None
    assert await asyncio.wait_for(owner._process.wait(), WAIT_S) == -signal.SIGKILL


@in_loop
async def test_a_process_that_cannot_be_made_is_told(monkeypatch):
    """C1."""

    async def refuse(*args: Any, **kwargs: Any) -> Any:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    async with engine() as client:
        with pytest.raises(StartFailed, match="no more processes"):
            await start(client)


@in_loop
async def test_a_stop_while_the_child_is_spawned_or_builds_ends_it():
    """C3."""
    async with engine(hang_in="build") as client:
        client.begin()
        await settle(3)
        await asyncio.wait_for(client.stop(0.1), WAIT_S)
    async with engine(hang_in="build") as client:
        client.begin()
        async with asyncio.timeout(WAIT_S):
            while client.supervisor.stage != "loading the script":
                await client.supervisor._next_change()
        await asyncio.wait_for(client.stop(0.1), WAIT_S)
        assert client.health().state == "stopped"


@in_loop
async def test_a_child_that_says_what_cannot_be_read_is_killed():
    """B7: else it would be deaf for ever."""
    owner = ProcessOwner(ENTRY, {})
    exits: list[str] = []
    ready = asyncio.Event()
    await owner.start(lambda message: ready.set() if isinstance(message, Ready) else None, exits.append)
    await asyncio.wait_for(ready.wait(), WAIT_S)
    assert owner._task is not None
    transport = owner._writer.transport  # type: ignore[union-attr]
    protocol: Any = transport.get_protocol()
    protocol.data_received(HEADER.pack(1) + b"\xff")
    await asyncio.wait_for(owner.ended(), WAIT_S)
    await owner._task
    assert exits == ["killed by SIGKILL"]
    owner.send(Stop())
    assert owner.kill()


@in_loop
async def test_what_is_sent_before_the_start_is_harmless():
    owner = ProcessOwner(ENTRY, {})
    owner.send(Stop())
    assert owner.kill()
    assert owner.pid is None


def test_a_process_that_runs_or_is_not_there_is_not_stopped():
    assert not is_stopped(os.getpid())
    assert not is_stopped(2**30)


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (3, "exit code 3"), (-6, "killed by SIGABRT"), (-63, "killed by signal 63")],
)
def test_an_exit_in_words(code, words):
    assert describe_exit(code) == words


@in_loop
async def test_what_the_child_writes_comes_through_the_relay_before_its_end_is_told():
    """D1: to the last word of one that is killed."""
    said: list[bytes] = []
    exits: list[tuple[str, bytes]] = []
    owner = ProcessOwner(ENTRY, {"hang_in": "step"}, relay=said.append)
    ready = asyncio.Event()
    await owner.start(
        lambda message: ready.set() if isinstance(message, Ready) else None,
        lambda how: exits.append((how, b"".join(said))),
    )
    await asyncio.wait_for(ready.wait(), WAIT_S)
    owner.send(Submit(id="r", prompt=(1, 2), max_tokens=4))
    async with asyncio.timeout(WAIT_S):
        while b"hanging in a step\n" not in b"".join(said):
            await asyncio.sleep(0.01)
    owner.kill()
    await asyncio.wait_for(owner.ended(), WAIT_S)
    ((how, before),) = exits
    assert how == "killed by SIGKILL"
    assert b"hanging in a step\n" in before


@in_loop
async def test_a_relay_whose_loop_has_gone_tells_nobody():
    owner = ProcessOwner(ENTRY, {}, relay=lambda data: None)
    loop = asyncio.new_event_loop()
    loop.close()
    owner._on_drained(loop)()
    assert not owner._drained.is_set()


# Orphans -----------------------------------------------------------------------------------------------------------


def child_of(sock: socket.socket, entry: str, stderr: int) -> subprocess.Popen[bytes]:
    table = allocate()
    try:
        command = [sys.executable, "-m", "treadle.engine.child", str(sock.fileno()), str(table), entry]
        return subprocess.Popen(command, pass_fds=[sock.fileno(), table], stderr=stderr)
    finally:
        os.close(table)


class Bare:
    """An engine process driven over a raw socket."""

    def __init__(self, **arguments: Any) -> None:
        self.sock, theirs = socket.socketpair()
        with theirs:
            self.process = child_of(theirs, ENTRY, stderr=subprocess.PIPE)
        self.sock.settimeout(WAIT_S)
        self.stream = self.sock.makefile("rb")
        if arguments:
            self.sock.sendall(frame_arguments(arguments))

    def hear(self, kind: type[Any]) -> Any:
        while True:
            (size,) = HEADER.unpack(self.stream.read(HEADER.size))
            message = from_owner.decode(self.stream.read(size))
            if isinstance(message, kind):
                return message

    def wait_error(self, line: bytes) -> None:
        assert self.process.stderr is not None
        while not self.process.stderr.readline().startswith(line):
            assert self.process.poll() is None

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.stream.close()
        self.sock.close()

    def code(self) -> int:
        """Return its exit status, waiting up to WAIT_S seconds."""
        try:
            _, errors = self.process.communicate(timeout=WAIT_S)
            self.errors = errors.decode()
        finally:
            self.process.kill()
            self.process.wait()
            self.close()
        return self.process.returncode


def test_an_orphan_ends_by_itself(tmp_path):
    """Issue 2: the parent's end closes, and the child unwinds."""
    child = Bare(closed=str(tmp_path / "closed"))
    child.hear(Ready)
    child.close()
    assert child.code() == 0
    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize("where", ["build", "step", "close"])
def test_an_orphan_whose_owner_is_stuck_is_ended_by_its_receiver(where):
    """Issue 2: gone within 2 s of the parent's death; the receiver's grace is 1 s."""
    child = Bare(hang_in=where)
    if where == "build":
        child.hear(Loading)
    else:
        child.hear(Ready)
    if where == "step":
        child.sock.sendall(frame(msgspec.structs.replace(REQUEST, id="a", max_wait_s=9.0)))
        child.wait_error(b"hanging in a step")
    child.close()
    assert child.code() == 4


def test_a_parent_that_dies_with_words_unread_ends_the_child_too():
    """Its end is a reset connection then, not an end of file."""
    child = Bare(x=1)
    assert child.sock.recv(1, socket.MSG_PEEK)
    child.stream.close()
    child.sock.close()
    assert child.code() == 0


def test_what_is_said_to_a_parent_that_has_gone_is_dropped():
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        channel, outbox = Channel(ours), Outbox()
        outbox.put(Loading(stage="x"))
        transmit(channel, outbox)
        channel._stream.close()


def test_a_parent_that_dies_before_its_first_word_ends_the_child():
    child = Bare()
    child.close()
    assert child.code() == 3


def test_a_parent_whose_words_cannot_be_read_is_as_good_as_gone():
    child = Bare(x=1)
    child.hear(Ready)
    child.sock.sendall(HEADER.pack(1) + b"\xff")
    assert child.code() == 0
    assert "invalid message" in child.errors


def test_what_the_owner_starts_does_not_inherit_the_socket():
    """A compiler that outlives a crash would hide the child's end from the parent."""
    child = Bare(popen=True)
    can = child.hear(Ready).capabilities
    child.close()
    assert child.code() == 0
    assert can.details == {"inheritable": "[]"}


def test_an_entry_that_cannot_be_imported_says_so():
    """C1."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = child_of(theirs, "tests.support.child:nothing", stderr=subprocess.DEVNULL)
        ours.settimeout(WAIT_S)
        ours.sendall(frame_arguments({}))
        (size,) = HEADER.unpack(ours.recv(HEADER.size, socket.MSG_WAITALL))
        message = from_owner.decode(ours.recv(size, socket.MSG_WAITALL))
        assert isinstance(message, Failed)
        assert "has no attribute 'nothing'" in message.message
        assert process.wait(WAIT_S) == 3


def test_once_it_is_ready_garbage_is_not_looked_for_in_what_is_loaded(monkeypatch):
    """Only then, and before anyone is told."""
    told: list[str] = []
    monkeypatch.setattr("gc.collect", lambda: told.append("collected"))
    monkeypatch.setattr("gc.freeze", lambda: told.append("kept"))
    send = freeze_gc_when_ready(lambda message: told.append(type(message).__name__))
    ready = Ready(capabilities=capabilities(), pid=1, load_s=0.0)
    for message in (Loading(stage="weights"), ready, Failed(code="engine_died", message="")):
        send(message)
    assert told == ["Loading", "collected", "kept", "Ready", "Failed"]


# Descriptors ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_child_is_launched_with_the_descriptors_in_reserve_when_all_others_are_taken() -> None:
    """Clients may hold every other one: the engine must come back all the same."""
    spare = DescriptorReserve()
    client = EngineClient(lambda: ProcessOwner(ENTRY, {}, spare), AdmissionLimits(4, 4, 30.0))
    try:
        with no_descriptors():
            old = await start(client)
            assert len(spare) > 0
            os.kill(old, signal.SIGKILL)
            await ready_again(client, old)
        assert await generate(client) == TOKENS
    finally:
        await asyncio.wait_for(client.stop(), WAIT_S)
        spare.close()


@in_loop
async def test_without_a_reserve_a_launch_fails_for_lack_of_descriptors() -> None:
    """The test above would notice."""
    client = EngineClient(lambda: ProcessOwner(ENTRY, {}), AdmissionLimits(4, 4, 30.0))
    try:
        with no_descriptors(), pytest.raises(StartFailed, match="could not be launched"):
            await start(client)
    finally:
        await asyncio.wait_for(client.stop(), WAIT_S)
