"""`treadle doctor --check`: whether the engine keeps its promises on this device, with this model.

Six checks on one engine in a child process, without HTTP: start, fidelity, cancel, crash, burst, stop. Each has a bound
in time, and each failure is an outcome; only a failed start ends the rest. Slowness is a warning, never a failure.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from ..config import Settings
from ..core.messages import Capabilities
from ..engine.generation import Generation
from ..errors import RequestCancelled, TreadleError, spell
from ..models import resolve
from ..text import TextModel
from .check_report import CheckReport, Outcome
from .engine_trial import Ran, Trial, prompt_of, together
from .findings import Mark

LENGTHS = (3, 8, 17, 33, 64, 130, 257, 520)
FIDELITY_TOKENS = 24
CANCEL_AFTER, CANCEL_TOKENS = 4, 512
CRASH_TOKENS = 128
BURST, BURST_AT_ONCE, BURST_PROMPT, BURST_TOKENS, BURST_GAP_S = 16, 4, 48, 24, 0.1
CANCEL_RATIO, BURST_RATIO = 1.5, 1.1
STOP_GRACE_S = 20.0
TIES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Nats between two tokens within which a batch may pick the other one: what the type's rounding moves logits by."""


@dataclass(frozen=True)
class Bounds:
    """Seconds each check may take; starting has the settings' own bound."""

    fidelity_s: float = 900.0
    cancel_s: float = 180.0
    crash_s: float = 180.0
    burst_s: float = 600.0


class Check:
    """The checks of one trial, in order."""

    def __init__(self, trial: Trial, text: TextModel, bounds: Bounds) -> None:
        self._trial = trial
        self._text = text
        self._bounds = bounds

    async def start(self) -> Outcome:
        """The engine loads its model and warms up."""
        began = time.monotonic()
        await self._trial.client.start()
        can = self._can
        note = (
            "" if can.path == "batched" else f"; rows don't share a step ({can.details.get('not batched', can.path)})"
        )
        load_s = self._trial.client.supervisor.load_s
        return Outcome("start", Mark.OK, f"ready after {time.monotonic() - began:.1f} s (load {load_s:.1f} s){note}")

    async def fidelity(self) -> Outcome:
        """Greedy tokens of prompts of different lengths: each alone, and all of them batched."""
        prompts = self._prompts(LENGTHS)
        alone = [await self._trial.run(prompt, FIDELITY_TOKENS) for prompt in prompts]
        batched = await self._trial.run_batch(prompts, FIDELITY_TOKENS)
        at_once = self._trial.watch.most_running
        lengths = f"{min(map(len, prompts))} to {max(map(len, prompts))} tokens"
        what = f"{len(prompts)} prompts of {lengths}, {FIDELITY_TOKENS} greedy tokens each, {at_once} at once"
        apart = [(i, at) for i in range(len(prompts)) if (at := first_difference(alone[i], batched[i])) is not None]
        if not apart and at_once < 2:
            return Outcome("fidelity", Mark.WARN, f"{what}: the same, but nothing ran together")
        if not apart:
            return Outcome("fidelity", Mark.OK, f"{what}: batched = alone, token for token")
        verdicts = [await self._difference(prompts[i], batched[i], at) for i, at in apart]
        mark = Mark.FAIL if any(mark is Mark.FAIL for mark, _ in verdicts) else Mark.WARN
        first = "; ".join(said for _, said in verdicts[:3])
        return Outcome("fidelity", mark, f"{what}: {len(apart)} differ: {first}")

    async def _difference(self, prompt: Sequence[int], batched: Ran, at: int) -> tuple[Mark, str]:
        """Whether the two tokens were all but equally likely (then rounding decides), and how far apart they were."""
        again = await self._trial.run(prompt, at + 1, logprobs=5)
        top = dict(again.logprobs[at].top)
        where = f"prompt of {len(prompt)} at token {at}"
        if at >= len(batched.tokens):
            return Mark.FAIL, f"{where}: the batched one ended early"
        took, best = batched.tokens[at], max(top.values())
        if took not in top:
            return Mark.FAIL, f"{where}: {again.tokens[at]} alone, {took} batched, which is not among the top five"
        gap = best - top[took]
        tie = gap <= TIES.get(self._can.dtype, TIES["bfloat16"])
        said = f"{where}: {again.tokens[at]} alone, {took} batched, {gap:.4f} nats apart"
        return (Mark.WARN, f"{said} (a tie in {self._can.dtype})") if tie else (Mark.FAIL, said)

    async def cancel(self) -> Outcome:
        """A stream is cancelled in mid-decode: its slot is free, and a follow-up starts at once."""
        prompt, other = self._prompts((BURST_PROMPT, BURST_PROMPT))
        idle_s = await self._trial.idle_ttft_s(other)
        with self._trial.generating([prompt], self._room(prompt, CANCEL_TOKENS)) as (generation,):
            await reach(generation, CANCEL_AFTER)
            generation.cancel()
            began = time.monotonic()
            following = asyncio.create_task(self._trial.run(other, 1))
            try:
                ended = await end_of(generation)
                closed_s = time.monotonic() - began
                follow_s = (await following).ttft_s
            finally:
                following.cancel()
        await self._trial.client.idle()
        if not isinstance(ended, RequestCancelled):
            return Outcome("cancel", Mark.FAIL, f"the cancelled stream ended with {ended!r}")
        ratio = follow_s / idle_s
        said = (
            f"after {CANCEL_AFTER} tokens, slot free in {closed_s * 1e3:.0f} ms; follow-up's first token after "
            f"{follow_s * 1e3:.0f} ms, {ratio:.2f} x idle ({idle_s * 1e3:.0f} ms)"
        )
        slow = ratio > CANCEL_RATIO
        return Outcome("cancel", Mark.WARN if slow else Mark.OK, said + (f"; aim {CANCEL_RATIO}" if slow else ""))

    async def crash(self) -> Outcome:
        """The child is killed in mid-stream: the stream goes on with a new child, with the tokens of a calm run."""
        client = self._trial.client
        (prompt,) = self._prompts((BURST_PROMPT,))
        tokens = self._room(prompt, CRASH_TOKENS)
        calm = await self._trial.run(prompt, tokens)
        pid = client.supervisor.pid
        assert pid is not None
        self._trial.watch.back.clear()
        with self._trial.generating([prompt], tokens) as (generation,):
            await reach(generation, min(CANCEL_AFTER, tokens - 1))
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            ending = asyncio.create_task(end_of(generation))
            not_ready = await self._away()
            await self._trial.back()
            back_s = time.monotonic() - began
            ended = await ending
        after = await self._trial.run(prompt, tokens)
        said = f"killed by SIGKILL in mid-stream: ready again after {back_s:.1f} s"
        if ended is not None:
            return Outcome("crash", Mark.FAIL, f"{said}; the stream ended with {ended!r}")
        if not not_ready:
            return Outcome("crash", Mark.FAIL, f"{said}; health said ready while it was gone")
        if after.tokens != calm.tokens:
            return Outcome("crash", Mark.FAIL, f"{said}; the same prompt gave other tokens afterwards")
        if tuple(generation.generated) != calm.tokens:
            return Outcome("crash", Mark.WARN, f"{said}; the stream went on with other tokens than in a calm run")
        return Outcome("crash", Mark.OK, f"{said}, and the stream went on with the same tokens")

    async def _away(self) -> bool:
        """Whether health says so while the engine is gone; returns once either shows."""
        while not self._trial.watch.back.is_set():
            if not self._trial.client.health().ready:
                return True
            await asyncio.sleep(0)
        return False

    async def burst(self) -> Outcome:
        """Requests that come staggered, some at a time: how evenly they start."""
        places = asyncio.Semaphore(BURST_AT_ONCE)
        prompts = self._prompts([BURST_PROMPT] * BURST)

        async def one(i: int) -> Ran:
            await asyncio.sleep(i * BURST_GAP_S)
            async with places:
                return await self._trial.run(prompts[i], BURST_TOKENS)

        began = time.monotonic()
        ran = await together([one(i) for i in range(BURST)])
        rate = sum(len(r.tokens) for r in ran) / (time.monotonic() - began)
        ttfts = [r.ttft_s for r in ran]
        median_s, worst_s = statistics.median(ttfts), max(ttfts)
        ratio = worst_s / median_s
        said = (
            f"{BURST} requests, {BURST_AT_ONCE} at a time: TTFT median {median_s * 1e3:.0f} ms, "
            f"max/median {ratio:.2f}, {rate:.1f} tok/s"
        )
        uneven = ratio > BURST_RATIO
        return Outcome("burst", Mark.WARN if uneven else Mark.OK, said + (f"; aim {BURST_RATIO}" if uneven else ""))

    async def stop(self) -> Outcome:
        """The child ends by itself and leaves no process."""
        client = self._trial.client
        pid, began = client.supervisor.pid, time.monotonic()
        await client.stop(STOP_GRACE_S)
        took_s = time.monotonic() - began
        if pid is not None and is_alive(pid):
            return Outcome("stop", Mark.FAIL, f"the engine's process {pid} still runs after {took_s:.1f} s")
        if took_s >= STOP_GRACE_S:
            return Outcome("stop", Mark.FAIL, f"the engine did not end within {STOP_GRACE_S:g} s and was killed")
        return Outcome("stop", Mark.OK, f"the engine's process is gone after {took_s:.1f} s")

    def steps(self) -> list[tuple[str, float, Callable[[], Awaitable[Outcome]]]]:
        """Name, bound in seconds, and work of each check that a started engine goes through."""
        bounds, start_s = self._bounds, self._trial.settings.start_timeout_s
        return [
            ("fidelity", bounds.fidelity_s, self.fidelity),
            ("cancel", bounds.cancel_s, self.cancel),
            ("crash", bounds.crash_s + start_s, self.crash),
            ("burst", bounds.burst_s, self.burst),
        ]

    @property
    def _can(self) -> Capabilities:
        can = self._trial.client.capabilities
        assert can is not None
        return can

    def _prompts(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """A prompt for each length, shortened to leave the context room for an answer."""
        longest = max(1, min(self._can.context, self._text.context) - FIDELITY_TOKENS)
        return [prompt_of(self._text, min(length, longest), turn) for turn, length in enumerate(lengths)]

    def _room(self, prompt: Sequence[int], wanted: int) -> int:
        return min(wanted, self._can.context - len(prompt))


async def check_model(settings: Settings, console: Console, bounds: Bounds | None = None) -> CheckReport:
    """Find the model of `settings`, run every check on it, and report; progress goes to `console`."""

    def say(text: str) -> None:
        console.print(f"[dim]{escape(text)}[/]")

    try:
        folder = await asyncio.to_thread(resolve, settings, say)
        text = await asyncio.to_thread(TextModel.load, folder.path, context=settings.context)
    except TreadleError as error:
        return CheckReport(settings.model, (Outcome("model", Mark.FAIL, spell(error.message, settings.spelling)),))
    trial = Trial(settings, folder)
    trial.client.supervisor.on_stage = lambda stage: say(f"  {stage}")
    check = Check(trial, text, bounds or Bounds())
    outcomes: list[Outcome] = []
    try:
        outcomes.append(await bounded("start", trial.settings.start_timeout_s + 10.0, check.start, say))
        for name, bound_s, work in check.steps() if outcomes[0].mark is Mark.OK else []:
            outcomes.append(await bounded(name, bound_s, work, say))
        outcomes.append(await bounded("stop", 2 * STOP_GRACE_S, check.stop, say))
    finally:
        await trial.client.stop(STOP_GRACE_S)
    return CheckReport(folder.name, tuple(outcomes), trial.client.capabilities)


async def bounded(
    name: str, bound_s: float, work: Callable[[], Awaitable[Outcome]], say: Callable[[str], None]
) -> Outcome:
    """The outcome of `work`; what it raises, and a bound that it breaks, are failures."""
    say(f"checking {name}")
    try:
        async with asyncio.timeout(bound_s):
            outcome = await work()
    except TimeoutError:
        outcome = Outcome(name, Mark.FAIL, f"not done within {bound_s:g} s")
    except TreadleError as error:
        outcome = Outcome(name, Mark.FAIL, f"{error.code}: {error.message}")
    say(f"  {outcome.mark.value}: {outcome.said}")
    return outcome


async def reach(generation: Generation, tokens: int) -> None:
    """Read until that many tokens came. Raises what ended the generation before."""
    async with aclosing(aiter(generation)) as deltas:
        async for _ in deltas:
            if generation.completion_tokens >= tokens:
                return


async def end_of(generation: Generation) -> TreadleError | None:
    """Read to the end; the error that ended it, None for a good end."""
    try:
        async with aclosing(aiter(generation)) as deltas:
            async for _ in deltas:
                pass
    except TreadleError as error:
        return error
    return None


def first_difference(one: Ran, other: Ran) -> int | None:
    """The first position at which two runs differ; None where they are the same."""
    if one.tokens == other.tokens:
        return None
    pairs = zip(one.tokens, other.tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens), len(other.tokens)))


def is_alive(pid: int) -> bool:
    """Whether a process of this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
