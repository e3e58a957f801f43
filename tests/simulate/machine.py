"""An owner in simulated time: the real loop and scheduler, and steps that take what a cost model says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.explore.turns import TurnLoop
from tests.support.capabilities import capabilities
from tests.support.inert import Inert
from treadle.core.capabilities import Capabilities, Sharing
from treadle.core.messages import Failed, FromOwner, Ready, Stopped, Submit, ToOwner
from treadle.core.plan import Admit, RowFailure, RowTokens, StepPlan, StepResult
from treadle.engine.handle import OnExit, OnMessage
from treadle.engine.in_flight_table import InFlightTable
from treadle.engine.loop import EngineLoop
from treadle.engine.mailbox import Mailbox
from treadle.engine.owner import OwnerLimits, scheduler_for
from treadle.runner.base import Job

VOCABULARY = 50_000


def token_at(request: Submit, position: int) -> int:
    """What a request gains at a position, whatever else happens."""
    return (request.prompt[-1] * 31 + len(request.prompt) * 7 + position * 13) % VOCABULARY


@dataclass(frozen=True)
class Costs:
    """Seconds of a step: an overhead, each decoding row, each prompt token; and of a start of the engine."""

    step_s: float = 0.16
    row_s: float = 0.005
    prompt_token_s: float = 0.0006
    load_s: float = 20.0

    def of(self, rows: int, prompt: int) -> tuple[float, float]:
        """What prompts and decoding rows of a step take."""
        decode_s = self.step_s + rows * self.row_s if rows else 0.0
        prefill_s = prompt * self.prompt_token_s + (0.0 if rows else self.step_s) if prompt else 0.0
        return prefill_s, decode_s


@dataclass
class _Held:
    request: Submit
    fed: int


class SimulatedRunner(Inert):
    """Rows as numbers: how many tokens each was fed, which must be what its plan says. Prompts of one salt begin with
    the same `trunk` tokens, which are reused once one of them has been computed."""

    def __init__(self, capabilities: Capabilities, costs: Costs, trunk: int, spend: Callable[[float], None]) -> None:
        self.rows: dict[str, _Held] = {}
        self.fail_next = False
        self.raise_next = False
        self._can, self._costs, self._trunk, self._spend = capabilities, costs, trunk, spend
        self._stored: set[str] = set()
        self._plan: StepPlan | None = None

    def capabilities(self) -> Capabilities:
        return self._can

    def free_blocks(self) -> int:
        block = self._can.kv.block
        return self._can.kv.blocks - sum(-(-row.fed // block) for row in self.rows.values())

    def match_prefix(self, admit: Admit) -> int:
        salt = admit.request.salt
        if not salt or salt not in self._stored:
            return 0
        block = self._can.kv.block
        most = min(self._trunk, len(admit.request.prompt) - 1, max(0, self.free_blocks()) * block)
        return most - most % block

    def start(self, plan: StepPlan) -> None:
        if self.raise_next:
            self.raise_next = False
            raise ValueError("a step raises by lot")
        for admit in plan.admit:
            assert admit.request.id not in self.rows, "admitted again without a release"
            self.rows[admit.request.id] = _Held(admit.request, admit.cached_tokens)
        for chunk in plan.prefill:
            held = self.rows[chunk.id]
            assert chunk.start == held.fed, "a chunk begins where the cache ends"
            held.fed += chunk.count
            if held.request.salt and held.fed >= self._trunk:
                self._stored.add(held.request.salt)
        for decode in plan.decode:
            held = self.rows[decode.id]
            held.fed += 1
            assert held.fed == len(held.request.prompt) + decode.position, "the cache holds all before this position"
        assert self.free_blocks() >= 0, "more blocks than there are"
        self._plan = plan

    def finish(self) -> StepResult:
        plan, self._plan = self._plan, None
        assert plan is not None
        prefill_s, decode_s = self._costs.of(len(plan.decode), sum(chunk.count for chunk in plan.prefill))
        self._spend(prefill_s + decode_s)
        failures: tuple[RowFailure, ...] = ()
        if self.fail_next and plan.decode:
            self.fail_next = False
            failures = (RowFailure(id=plan.decode[0].id, message="a row fails by lot"),)
        failed = {failure.id for failure in failures}
        rows = tuple(
            RowTokens(id=decode.id, tokens=(token_at(self.rows[decode.id].request, decode.position),))
            for decode in plan.decode
            if decode.id not in failed
        )
        return StepResult(rows=rows, failures=failures, prefill_s=prefill_s, decode_s=decode_s)

    def release(self, row_id: str) -> None:
        self.rows.pop(row_id, None)

    def jobs(self) -> Mapping[str, Job]:
        return {}


@dataclass(frozen=True)
class Machine:
    """What the simulated device has and takes."""

    slots: int = 8
    blocks: int = 700
    block: int = 16
    context: int = 8192
    trunk: int = 1024
    costs: Costs = Costs()

    def capabilities(self) -> Capabilities:
        full_s = self.costs.of(self.slots, 0)[1]
        return capabilities(
            model="simulated",
            architecture="none",
            vocabulary=VOCABULARY,
            context=self.context,
            device="cpu",
            dtype="float32",
            kv_block=self.block,
            kv_blocks=self.blocks,
            prefix_cache=True,
            sharing=Sharing.COPIED,
            decode_step_s=full_s,
            prompt_token_s=self.costs.prompt_token_s,
        )


class SimulatedOwner:
    """One life of an engine. Its steps follow each other in the event loop's time, and its reports come at their
    ends."""

    pids = itertools.count(1)

    def __init__(self, machine: Machine, events: TurnLoop) -> None:
        self.pid = next(self.pids)
        self.dead = False
        self.stuck = False
        self.steps = 0
        self.runner: SimulatedRunner | None = None
        self.loop: EngineLoop | None = None
        self._machine = machine
        self._events = events
        self._mailbox = Mailbox()
        self._table = InFlightTable()
        self._until = 0.0  # when the step of now ends
        self._awake = False
        self._ended = asyncio.Event()
        self._on_message: OnMessage
        self._on_exit: OnExit

    async def start(self, on_message: OnMessage, on_exit: OnExit) -> None:
        self._on_message, self._on_exit = on_message, on_exit
        self._events.call_later(self._machine.costs.load_s, self._load)

    def send(self, message: ToOwner) -> None:
        self._mailbox.put(message)
        self._wake()

    def kill(self) -> bool:
        if not self.dead:
            self.dead = True
            self._events.call_later(0.01, self._end, "killed by SIGKILL")
        return True

    async def ended(self) -> None:
        await self._ended.wait()

    def is_suspended(self) -> bool:
        return False

    def in_steps(self) -> frozenset[int]:
        return self._table.read()

    def _load(self) -> None:
        if self.dead:
            return
        can = self._machine.capabilities()
        self.runner = SimulatedRunner(can, self._machine.costs, self._machine.trunk, self._spend)
        scheduler = scheduler_for(can, OwnerLimits(self._machine.slots, 512), self.runner.match_prefix)
        self.loop = EngineLoop(self.runner, scheduler, self._mailbox, self._say, self._clock, self._table)
        self._say(Ready(capabilities=can, pid=self.pid, load_s=self._machine.costs.load_s))
        self._wake()

    def _wake(self) -> None:
        if self.loop is not None and not self._awake:
            self._awake = True
            self._events.call_at(max(self._until, self._events.time()), self._step)

    def _step(self) -> None:
        self._awake = False
        if self.dead or self.stuck or self.loop is None:
            return
        self._until = self._events.time()
        self.steps += 1
        self.loop.run_once(wait_s=0.0)
        if not self.loop.stopped and self.loop.has_work:
            self._until = max(self._until, self._events.time() + 0.001)
            self._wake()

    def _clock(self) -> float:
        return max(self._until, self._events.time())

    def _spend(self, seconds: float) -> None:
        self._until = self._clock() + seconds

    def _say(self, message: FromOwner) -> None:
        self._events.call_at(self._clock(), self._tell, message)

    def _tell(self, message: FromOwner) -> None:
        if not self._ended.is_set() and not self.dead:
            self._on_message(message)
            if isinstance(message, Stopped | Failed):
                self.dead = True
                self._events.call_later(0.01, self._end, "exit code 0")

    def _end(self, how: str) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._on_exit(how)
