"""Run of the chaos: a calm part that records the answers, then segment after segment of the plan, each followed by a
quiet point."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import psutil

from .books import at_rest, wrong_books
from .drift import Drift, drift
from .faults import Attack
from .health import Watcher
from .http import HttpClient
from .log import WINDOW_S
from .oracle import REPLAYED, ROUNDING, Oracle, Parting, max_difference
from .outcome import End, Outcome
from .plan import Manner, Plan, Request, Segment
from .points import Problem, Quiet
from .recipes import Answer, Choice, Recipe
from .rpc import RpcClient
from .server import KEY, Server, Usage

STUCK_S = 150.0
EXPLAINED_IN = 100  # attempts to reproduce an answer that differs
MAX_CONCURRENT = 10  # concurrent requests at most: more than slots, as full steps round differently
REST_S = 20.0
OBEYS_S = 0.5  # longest wait of a refused client
LINGERS_S = 0.1
HANG_AFTER_S = 3.0
DRAIN_S = 15.0
FIGURES = ("rss", "pss", "fds", "threads")
OPTIONS = (
    *("--max-running", "8", "--max-wait", "2", "--hang-after", f"{HANG_AFTER_S:g}", "--drain", f"{DRAIN_S:g}"),
    *("--memory", "32MiB", "--stall", "10"),
)


@dataclass
class Chaos:
    """One run against one server. `say` is called with a line about each segment.

    `survives_death`: whether a death of the engine may cost no request its answer; None for the server's own claim.
    `patience`: see Attack.
    """

    plan: Plan
    server: Server
    survives_death: bool | None = None
    _: dataclasses.KW_ONLY
    patience: float = 1.0
    say: Callable[[str], None] = lambda text: None
    problems: list[Problem] = field(default_factory=list)
    quiet: list[Quiet] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    manners: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    requests: int = 0
    forks: int = 0
    _forks: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)
    _sent: int = 0
    _begun: int = 0
    _latencies: list[float] = field(default_factory=list)
    _windows: Counter[int] = field(default_factory=Counter)

    async def __aenter__(self) -> Chaos:
        self.server.begin()
        await self.server.ready()
        engine = (await self.server.status())["engine"]
        survives = REPLAYED in engine if self.survives_death is None else self.survives_death
        self.http = HttpClient(self.server.door)
        self.rpc = RpcClient(self.server.ports[1], f"chaos-{self.plan.seed}", KEY)
        self.oracle = await self._calm(survives)
        self.watcher = Watcher(self.server.ports[0], KEY)
        self.attack = Attack(self.server, self.watcher, HANG_AFTER_S, DRAIN_S, survives)
        self.attack.load_s, self.attack.patience = engine["load_s"], self.patience
        return self

    async def __aexit__(self, *error: object) -> None:
        self.watcher.close()
        await self.rpc.close()
        self.server.kill()

    # The calm run --------------------------------------------------------------------------------------------------

    async def _calm(self, survives_death: bool) -> Oracle:
        """Send every recipe, one at a time. Recipes that gRPC ends elsewhere are sent there too. The wires must
        agree."""
        answers = {recipe.index: await self._alone(recipe, "http") for recipe in self.plan.recipes}
        stopped = [recipe for recipe in self.plan.recipes if recipe.stop and recipe.fits("vllm")]
        rpc = {recipe.index: await self._alone(recipe, "vllm") for recipe in stopped}
        return Oracle(answers, rpc, survives_death=survives_death)

    async def _alone(self, recipe: Recipe, wire: str, salt: str = "") -> Answer:
        self._sent += 1
        scored = dataclasses.replace(recipe, logprobs=True)
        request = Request(-self._sent, wire, Manner.WHOLE, (scored,), stream=False, after=1.0, salt=salt)
        (outcome,) = await self._play(request)
        if outcome.end is not End.COMPLETE or len(outcome.tokens) != recipe.n:
            raise RuntimeError(f"the calm run's request {recipe} ended {outcome}")
        return {
            choice: Choice(tokens, outcome.finishes[choice][0], outcome.logprobs[choice])
            for choice, tokens in outcome.tokens.items()
        }

    # Segments ------------------------------------------------------------------------------------------------------

    async def run(self, segments: Iterable[int], until: Callable[[Chaos], bool] = lambda chaos: False) -> None:
        """Run segments, each with its quiet point, until there are no more or `until` is true; then end the server."""
        for index in segments:
            await self._segment(self.plan.segment(index))
            if until(self):
                break
        await self._end(index)

    async def _segment(self, segment: Segment) -> None:
        began, requests, problems = time.monotonic(), self.requests, len(self.problems)
        todo, self._begun = iter(segment.requests), 0
        strikes = [asyncio.create_task(self._strike(planned.at, planned.fault)) for planned in segment.faults]
        async with asyncio.TaskGroup() as group:
            for _ in range(segment.clients):
                group.create_task(self._client(segment.index, todo))
        await asyncio.gather(*strikes)
        await self._be_quiet(segment.index)
        self._note(segment.index, self.attack.problems)
        took_s, new = time.monotonic() - began, len(self.problems) - problems
        faults = ", ".join(planned.fault for planned in segment.faults) or "calm"
        done = f"{self.requests - requests} requests in {took_s:.1f} s" + (f"; {new} PROBLEMS" if new else "")
        self.say(f"segment {segment.index}: {segment.clients} clients, {faults}; {done}")

    async def _strike(self, at: int, fault: object) -> None:
        while self._begun < at:
            await asyncio.sleep(0.005)
        self.faults[str(fault)] += 1
        await self.attack.strike(fault)  # type: ignore[arg-type]

    async def _client(self, segment: int, todo: Iterable[Request]) -> None:
        """Play one client: request after request."""
        for request in todo:
            self._begun += 1
            outcomes = await self._within_reason(segment, request)
            if outcomes is not None:
                self._judge(segment, request, outcomes)
                await asyncio.sleep(_stays_away_s(request, outcomes))

    async def _within_reason(self, segment: int, request: Request) -> list[Outcome] | None:
        try:
            async with asyncio.timeout(STUCK_S):
                return await self._play(request)
        except TimeoutError:
            self._problem(segment, f"no end in {STUCK_S:g} s ({request.wire} {request.manner})", request)
            return None

    async def _play(self, request: Request) -> list[Outcome]:
        client: HttpClient | RpcClient = self.http if request.wire == "http" else self.rpc
        return await client.play(request)

    def _judge(self, segment: int, request: Request, outcomes: Sequence[Outcome]) -> None:
        self.requests += len(outcomes)
        self.manners[f"{request.wire} {request.manner}"] += len(outcomes)
        for outcome in outcomes:
            self.ends[outcome.end] += 1
            self.tokens += outcome.generated
            self._windows[int(outcome.ended) // WINDOW_S] += 1
            if outcome.end is End.COMPLETE and outcome.generated:
                self._latencies.append(outcome.ended - outcome.began)
        for wrong in self.oracle.judge(request, outcomes, self.attack.windows):
            self._problem(segment, f"{request.wire} {request.manner}: {wrong}", request)

    # Quiet points --------------------------------------------------------------------------------------------------

    async def _be_quiet(self, segment: int) -> None:
        """Wait until nothing is held; check the counters; record the resources of both processes."""
        if self.server.log is None or self.server.ended is not None:
            await self.attack.drained() if self.server.ended is None else await self.attack.revive()
        end = time.monotonic() + REST_S
        status = await self.server.status()
        while not (at_rest(status) and status["ready"]) and time.monotonic() < end:
            await asyncio.sleep(0.02)
            status = await self.server.status()
        await self._explain(segment)
        for wrong in wrong_books(await self.server.status(), await self.server.metrics()):
            self._problem(segment, wrong)
        with contextlib.suppress(psutil.Error):
            self.quiet.append(self._point())
        self._latencies = []

    async def _explain(self, segment: int) -> None:
        """Repeat the requests whose answers differed, on the now calm server. An answer that comes again, after tokens
        whose log-probabilities are those of the calm run, is due to rounding; any other is wrong."""
        rng = random.Random(f"explain/{self.plan.seed}/{segment}")
        for parting in self.oracle.partings:
            fork = (parting.recipe.index, parting.tokens)
            if fork in self._forks or await self._comes_again(rng, parting):
                self._forks.add(fork)
                self.forks += 1
            else:
                self._problem(segment, str(parting), parting.request)
        self.oracle.partings.clear()

    async def _comes_again(self, rng: random.Random, parting: Parting) -> bool:
        """Whether a calm server gives that answer too: through the same wire, with the prompt's cached prefix and, over
        HTTP, without."""
        for number in range(EXPLAINED_IN):
            concurrent = [
                asyncio.create_task(self._alone(rng.choice(self.plan.recipes), "http"))
                for _ in range(rng.randint(0, MAX_CONCURRENT))
            ]
            await asyncio.sleep(0.1 * rng.random())
            salt = rng.choice((parting.request.salt, f"explain-{number}"))
            again = self._alone(parting.recipe, parting.request.wire, salt)
            answers = await asyncio.gather(again, *concurrent, return_exceptions=True)
            if isinstance(answers[0], dict) and self._is_rounding(parting, answers[0][parting.choice]):
                return True
        return False

    def _is_rounding(self, parting: Parting, again: Choice) -> bool:
        same = tuple(again.tokens[: len(parting.tokens)]) == parting.tokens
        calm = self.oracle.calm(parting.request, parting.recipe)[parting.choice]
        return same and max_difference(again.logprobs[: parting.at], calm.logprobs) <= ROUNDING

    def _point(self) -> Quiet:
        engine = self.server.engine_pid()
        return Quiet(
            at=time.monotonic(),
            epoch=self.server.starts,
            server=Usage.of(self.server.pid),
            engine=None if engine is None else Usage.of(engine),
            engine_pid=engine,
            requests=self.requests,
            tokens=self.tokens,
            latencies=tuple(self._latencies),
        )

    async def _end(self, segment: int) -> None:
        """Drain for the last time, and check the whole run."""
        self.attack.silent.append((time.monotonic(), math.inf))
        try:
            await self.attack.end()
        except TimeoutError as error:
            self._problem(segment, f"the last SIGTERM: {error}")
        self._note(segment, self.attack.problems)
        self._note(segment, self.watcher.unfit(self.attack.silent, self.patience))
        for log in self.server.logs:
            self._note(segment, log.storms(self._windows))
            self._note(segment, [f"traceback in the log: {trace[-300:]}" for trace in log.tracebacks])
        self._note(segment, [f"drift: {found}" for found in self.drifts() if found.bad])

    def drifts(self) -> list[Drift]:
        """Return the drifts of the server's and an engine's resources, each over the process with the most quiet
        points."""
        by_process: dict[str, list[tuple[int | None, Usage]]] = {
            "server": [(point.epoch, point.server) for point in self.quiet]
        }
        by_process["engine"] = [(point.engine_pid, point.engine) for point in self.quiet if point.engine is not None]
        found = []
        for process, points in by_process.items():
            longest = Counter(pid for pid, _ in points).most_common(1)
            usages = [usage for pid, usage in points if pid == longest[0][0]]
            found += [drift(f"{process} {name}", [getattr(one, name) for one in usages]) for name in FIGURES]
        return [one for one in found if one is not None and one.after]

    def _note(self, segment: int, found: list[str]) -> None:
        for text in found:
            self._problem(segment, text)
        found.clear()

    def _problem(self, segment: int, text: str, request: Request | None = None) -> None:
        self.problems.append(Problem(segment, text, None if request is None else request.number))


def _stays_away_s(request: Request, outcomes: Sequence[Outcome]) -> float:
    """Return the seconds before the next request: most refused clients obey, for a moment; the rest return soon."""
    last = outcomes[-1]
    if last.end is End.UNREACHABLE:
        return LINGERS_S
    if last.end is not End.REFUSED:
        return 0.0
    return min(OBEYS_S, last.retry_after_s or 0.0) if request.number % 4 else LINGERS_S / 2
