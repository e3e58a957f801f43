"""`treadle bench run`: the workloads against every target, interleaved round by round, into one result."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET

from .client import Client
from .drive import Drive, in_background, undisturbed, watch_own_lag
from .errors import BenchError
from .machine import this_machine
from .measures import percentiles
from .plan import Request, Workload
from .samples import Control, Result, Round, Sample, WorkloadInfo
from .servers import Target, program_name, started
from .store import FORMAT
from .wire import Endpoint
from .workloads import digest

CONTROL_EVERY_S = 0.25
SETTLE_S = 20.0
CRASH_S = 1.0
POLL_S = 0.05


@dataclass(frozen=True)
class Plan:
    """Parameters of a run. `rounds` has the workloads of each round, the same names in all of them. `starts` are
    commands and `urls` servers that run already; the first target of all is the reference of the ratios. A run is given
    up when the client's own event loop is later than `max_lag_s` seconds (p99)."""

    rounds: Sequence[Sequence[Workload]]
    starts: Sequence[str] = ()
    urls: Sequence[str] = ()
    names: Sequence[str] = ()
    models: Sequence[str] = ()
    endpoint: Endpoint = "chat"
    api_key: str | None = None
    silence_s: float = 120.0
    start_timeout_s: float = 600.0
    warm_up: int = 2
    max_lag_s: float = 0.05


class Watcher(Protocol):
    """Observer of a run, such as the live table."""

    def begin(self, workload: str, target: str, round_: int, total: int) -> None: ...
    def sample(self, sample: Sample) -> None: ...
    def end(self, round_: Round) -> None: ...


async def run(plan: Plan, watcher: Watcher, on_progress: Callable[[Result], None] = lambda _: None) -> Result:
    """Run everything; `on_progress` is called with the result so far after each round of all targets, and once more if
    the run ends early. Raises BenchError. Servers that were started here have ended when this returns or raises."""
    _check(plan)
    async with contextlib.AsyncExitStack() as stack:
        targets = [await _ready(stack, plan, i, entry) for i, entry in enumerate(_entries(plan))]
        result = Result(
            format=FORMAT,
            started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            machine=this_machine(),
            targets=[target.info for target in targets],
            endpoint=plan.endpoint,
            workloads={},
            rounds={},
            rounds_planned=sum(map(len, plan.rounds)),
        )
        try:
            await _measure(plan, targets, result, watcher, on_progress)
        except (BenchError, asyncio.CancelledError) as error:
            result.stopped = error.message if isinstance(error, BenchError) else "it was interrupted"
            if result.rounds:
                on_progress(result)
            raise
    return result


async def _measure(
    plan: Plan, targets: Sequence[Target], result: Result, watcher: Watcher, on_progress: Callable[[Result], None]
) -> None:
    """Add each workload's rounds to `result`."""
    for workloads in zip(*plan.rounds, strict=True):
        rounds: list[Round] = []
        for number, workload in enumerate(workloads, 1):
            rounds += [await _round(plan, workload, target, number, watcher) for target in targets]
            result.workloads[workload.name] = _info(workloads[:number])
            result.rounds[workload.name] = rounds
            result.rounds_done += 1
            on_progress(result)


def _check(plan: Plan) -> None:
    count = len(plan.starts) + len(plan.urls)
    if not count:
        raise BenchError("there is nothing to measure: give --url URL or --start COMMAND")
    for flag, seconds in (("--silence", plan.silence_s), ("--start-timeout", plan.start_timeout_s)):
        if not seconds > 0:
            raise BenchError(f"{flag} {seconds:g}: give seconds above 0")
    if not plan.max_lag_s >= 0:
        raise BenchError(f"--max-lag {plan.max_lag_s:g}: give 0 or more seconds")
    for label, values in (("name", plan.names), ("model", plan.models)):
        if len(values) > count:
            raise BenchError(f"{len(values)} {label}s for {count} target{'s' * (count > 1)}: give one --{label} each")
    if plan.endpoint == "completions" and (name := _needs_chat(plan.rounds[0])):
        raise BenchError(
            f"workload '{name}' needs --endpoint chat: text completions have no schemas, no tools and no images"
        )
    _refuse_duplicates(plan.names, "--name {}")
    _refuse_duplicates([workload.name for workload in plan.rounds[0]], "workload '{}'")


def _needs_chat(workloads: Sequence[Workload]) -> str:
    """Return the name of the first workload with structured answers or images; "" if there is none."""
    return next((w.name for w in workloads if any(map(_is_chat, w.requests))), "")


def _is_chat(request: Request) -> bool:
    return request.fields is not UNSET or any(message.pictures is not UNSET for message in request.messages)


def _refuse_duplicates(names: Sequence[str], label: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise BenchError(f"{label.format(name)} is there twice: results are kept by name")


def _entries(plan: Plan) -> list[tuple[str | None, str | None]]:
    """Return (command, url) of each target; one of the two is None."""
    entries: list[tuple[str | None, str | None]] = [(command, None) for command in plan.starts]
    return entries + [(None, url) for url in plan.urls]


async def _ready(
    stack: contextlib.AsyncExitStack, plan: Plan, index: int, entry: tuple[str | None, str | None]
) -> Target:
    command, url = entry
    process = await stack.enter_async_context(started(command))
    url = url or f"http://127.0.0.1:{process.port if process else 0}"
    client = Client(url, api_key=plan.api_key, silence_s=plan.silence_s)
    target = Target(_name(plan, index), client, plan.endpoint, process=process)
    await target.get_ready(plan.start_timeout_s, plan.models[index] if index < len(plan.models) else None)
    return target


def _name(plan: Plan, index: int) -> str:
    if index < len(plan.names):
        return plan.names[index]
    names = [*map(program_name, plan.starts), *(url.removeprefix("http://").rstrip("/") for url in plan.urls)]
    name = names[index]
    return name if names.count(name) == 1 else f"{name} {names[: index + 1].count(name)}"


def _info(rounds: Sequence[Workload]) -> WorkloadInfo:
    first = rounds[0]
    return WorkloadInfo(
        seed=first.seed,
        options=first.options,
        requests=len(first.requests),
        concurrency=first.concurrency,
        digest=digest(*rounds),
        goodput=first.goodput,
    )


async def _round(plan: Plan, workload: Workload, target: Target, number: int, watcher: Watcher) -> Round:
    if target.process is not None and target.process.ended:
        target.process.start()
        await target.get_ready(plan.start_timeout_s, target.info.model)
    for i in range(plan.warm_up):
        await target.ask(f"warm-up {i}", "The ship left the harbour three hours late.", 4)
    watcher.begin(workload.name, target.info.name, number, len(workload.requests))
    before = await target.status()
    loop = asyncio.get_running_loop()
    round_ = Round(target=target.info.name, number=number, wall_s=0.0, samples=[])
    began = loop.time()
    with undisturbed():
        async with in_background(watch_own_lag(round_.lag_s)), in_background(_watch_control(target, round_)):
            round_.samples = await Drive(workload, target.send, watcher.sample).run()
    round_.wall_s = loop.time() - began
    round_.crash = await _crash(target, round_.samples)
    if before is not None:
        round_.status = await _counter_growth(target, before)
    watcher.end(round_)
    _check_lag(round_, plan.max_lag_s)
    return round_


async def _crash(target: Target, samples: Sequence[Sample]) -> str:
    """Return the end of a target that ended in the round, else empty. Its connections break a little before its exit
    shows."""
    if target.process is None:
        return ""
    broken = any(sample.outcome in ("failed", "incomplete") for sample in samples)
    for _ in range(int(CRASH_S / POLL_S) if broken else 0):
        if target.process.ended:
            break
        await asyncio.sleep(POLL_S)
    return target.process.ended


def _check_lag(round_: Round, limit_s: float) -> None:
    lag = percentiles(round_.lag_s)
    if lag is not None and lag.p99 > limit_s:
        raise BenchError(
            f"the client was the bottleneck: its event loop was {lag.p99 * 1e3:.0f} ms late (p99; at most "
            f"{limit_s * 1e3:.0f}): ask for less at a time, use a quieter machine, or allow it with --max-lag"
        )


async def _watch_control(target: Target, round_: Round) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while target.control:
        for path in target.control:
            at_s = loop.time() - began
            answer = await target.client.get(path)
            round_.control.append(Control(path=path, at_s=at_s, took_s=answer.took_s, status=answer.status))
        await asyncio.sleep(CONTROL_EVERY_S)


async def _counter_growth(target: Target, before: dict[str, float]) -> dict[str, float]:
    """Return each counter's growth, and `rows_left`: sequences still admitted some time after every client has left."""
    loop = asyncio.get_running_loop()
    until = loop.time() + SETTLE_S
    after = await target.status()
    while after is not None and after["rows"] > before["rows"] and loop.time() < until:
        await asyncio.sleep(POLL_S)
        after = await target.status()
    if after is None:
        return {}
    grown = {name: after[name] - before[name] for name in after if name != "rows"}
    return grown | {"rows_left": after["rows"]}
