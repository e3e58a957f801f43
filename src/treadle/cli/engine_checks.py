"""`treadle doctor --check`: test an engine with a model on this device.

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
from ..core.capabilities import Capabilities
from ..core.compute_path import Backend
from ..engine.generation import Generation
from ..errors import RequestCancelled, TreadleError, spell
from ..models import resolve
from ..text import TextModel
from .check_report import CheckReport, Outcome
from .engine_trial import CompletedRun, EngineTrial, gather_or_cancel, make_prompt
from .findings import Mark

LENGTHS = (3, 8, 17, 33, 64, 130, 257, 520)
FIDELITY_TOKENS = 24
CANCEL_AFTER, CANCEL_TOKENS, CANCEL_TRIES = 4, 512, 3
CRASH_TOKENS = 128
BURST, BURST_AT_ONCE, BURST_PROMPT, BURST_TOKENS, BURST_GAP_S = 16, 4, 48, 24, 0.1
CANCEL_RATIO, BURST_RATIO = 1.5, 1.1
STOP_GRACE_S = 20.0
TIES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Difference in nats, by type, within which a batch may choose the other token: the effect of rounding on logits."""


@dataclass(frozen=True)
class Bounds:
    """Seconds that each check may take; the bound of the start is a setting."""

    fidelity_s: float = 900.0
    cancel_s: float = 180.0
    crash_s: float = 180.0
    burst_s: float = 600.0


class EngineChecks:
    """Checks of one trial, in order."""

    def __init__(self, trial: EngineTrial, text: TextModel, bounds: Bounds) -> None:
        self._trial = trial
        self._text = text
        self._bounds = bounds

    async def start(self) -> Outcome:
        """Check that the engine loads its model and warms up."""
        began = time.monotonic()
        await self._trial.client.start()
        note = f"; {self._capabilities.compute.summary()}"
        load_s = self._trial.client.supervisor.load_s
        return Outcome("start", Mark.OK, f"ready after {time.monotonic() - began:.1f} s (load {load_s:.1f} s){note}")

    async def fidelity(self) -> Outcome:
        """Compare greedy tokens of prompts of different lengths, each alone, with those of all in one batch."""
        prompts = self._prompts(LENGTHS)
        alone = [await self._trial.run(prompt, FIDELITY_TOKENS) for prompt in prompts]
        batched = await self._trial.run_batch(prompts, FIDELITY_TOKENS)
        at_once = self._trial.observer.most_running
        lengths = f"{min(map(len, prompts))} to {max(map(len, prompts))} tokens"
        summary = f"{len(prompts)} prompts of {lengths}, {FIDELITY_TOKENS} greedy tokens each, {at_once} at once"
        differing = [(i, at) for i in range(len(prompts)) if (at := first_difference(alone[i], batched[i])) is not None]
        if not differing and at_once < 2:
            return Outcome("fidelity", Mark.WARN, f"{summary}: the same, but nothing ran together")
        if not differing:
            return Outcome("fidelity", Mark.OK, f"{summary}: batched = alone, token for token")
        verdicts = [await self._difference(prompts[i], batched[i], at) for i, at in differing]
        mark = Mark.FAIL if any(mark is Mark.FAIL for mark, _ in verdicts) else Mark.WARN
        first = "; ".join(text for _, text in verdicts[:3])
        return Outcome("fidelity", mark, f"{summary}: {len(differing)} differ: {first}")

    async def _difference(self, prompt: Sequence[int], batched: CompletedRun, at: int) -> tuple[Mark, str]:
        """Judge the first difference: a warning if the two tokens were nearly equally likely, so that rounding decides,
        else a failure. Returns the mark and the gap in words."""
        again = await self._trial.run(prompt, at + 1, logprobs=5)
        top = dict(again.logprobs[at].top)
        position = f"prompt of {len(prompt)} at token {at}"
        if at >= len(batched.tokens):
            return Mark.FAIL, f"{position}: the batched one ended early"
        chosen, best = batched.tokens[at], max(top.values())
        if chosen not in top:
            return Mark.FAIL, f"{position}: {again.tokens[at]} alone, {chosen} batched, which is not among the top five"
        gap = best - top[chosen]
        tie = gap <= TIES.get(self._capabilities.dtype, TIES["bfloat16"])
        text = f"{position}: {again.tokens[at]} alone, {chosen} batched, {gap:.4f} nats apart"
        return (Mark.WARN, f"{text} (a tie in {self._capabilities.dtype})") if tie else (Mark.FAIL, text)

    async def cancel(self) -> Outcome:
        """Cancel a stream in mid-decode, and check that its slot is free and a follow-up starts at once."""
        prompt, other = self._prompts((BURST_PROMPT, BURST_PROMPT))
        idle_s = await self._trial.idle_ttft_s(other)
        tokens = self._cap(prompt, CANCEL_TOKENS)
        for _ in range(CANCEL_TRIES):  # a short stream on a busy machine may be over before the cancel arrives
            ended, closed_s, follow_s = await self._cancel_one(prompt, other, tokens)
            if ended is not None:
                break
        else:
            mark = Mark.FAIL if tokens == CANCEL_TOKENS else Mark.WARN
            return Outcome("cancel", mark, f"{CANCEL_TRIES} streams of {tokens} tokens went on to their end")
        if not isinstance(ended, RequestCancelled):
            return Outcome("cancel", Mark.FAIL, f"the cancelled stream ended with {ended!r}")
        ratio = follow_s / idle_s
        text = (
            f"after {CANCEL_AFTER} tokens, slot free in {closed_s * 1e3:.0f} ms; follow-up's first token after "
            f"{follow_s * 1e3:.0f} ms, {ratio:.2f} x idle ({idle_s * 1e3:.0f} ms)"
        )
        slow = ratio > CANCEL_RATIO
        return Outcome("cancel", Mark.WARN if slow else Mark.OK, text + (f"; aim {CANCEL_RATIO}" if slow else ""))

    async def _cancel_one(
        self, prompt: Sequence[int], other: Sequence[int], tokens: int
    ) -> tuple[TreadleError | None, float, float]:
        """Cancel a stream of `tokens` tokens. Returns the error that ended it (None: it was over before), the seconds
        until its end, and those until the first token of a follow-up."""
        with self._trial.generating([prompt], tokens) as (generation,):
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
        return ended, closed_s, follow_s

    async def crash(self) -> Outcome:
        """Kill the child in mid-stream, and check that a new child continues the stream with the tokens of a run
        without a crash."""
        client = self._trial.client
        (prompt,) = self._prompts((BURST_PROMPT,))
        tokens = self._cap(prompt, CRASH_TOKENS)
        calm = await self._trial.run(prompt, tokens)
        pid = client.supervisor.pid
        assert pid is not None
        self._trial.observer.restart.clear()
        with self._trial.generating([prompt], tokens) as (generation,):
            await reach(generation, min(CANCEL_AFTER, tokens - 1))
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            ending = asyncio.create_task(end_of(generation))
            not_ready = await self._sees_outage()
            await self._trial.wait_for_restart()
            back_s = time.monotonic() - began
            ended = await ending
        after = await self._trial.run(prompt, tokens)
        text = f"killed by SIGKILL in mid-stream: ready again after {back_s:.1f} s"
        if ended is not None:
            return Outcome("crash", Mark.FAIL, f"{text}; the stream ended with {ended!r}")
        if not not_ready:
            return Outcome("crash", Mark.FAIL, f"{text}; health said ready while it was gone")
        if after.tokens != calm.tokens:
            return Outcome("crash", Mark.FAIL, f"{text}; the same prompt gave other tokens afterwards")
        if tuple(generation.generated) != calm.tokens:
            return Outcome("crash", Mark.WARN, f"{text}; the stream went on with other tokens than in a calm run")
        return Outcome("crash", Mark.OK, f"{text}, and the stream went on with the same tokens")

    async def _sees_outage(self) -> bool:
        """Whether health reports the lost engine; returns once it does, or once the engine is back."""
        while not self._trial.observer.restart.is_set():
            if not self._trial.client.health().ready:
                return True
            await asyncio.sleep(0)
        return False

    async def burst(self) -> Outcome:
        """Run staggered requests, some at a time, and compare their times to first token."""
        slots = asyncio.Semaphore(BURST_AT_ONCE)
        prompts = self._prompts([BURST_PROMPT] * BURST)

        async def one(i: int) -> CompletedRun:
            await asyncio.sleep(i * BURST_GAP_S)
            async with slots:
                return await self._trial.run(prompts[i], BURST_TOKENS)

        began = time.monotonic()
        ran = await gather_or_cancel([one(i) for i in range(BURST)])
        rate = sum(len(r.tokens) for r in ran) / (time.monotonic() - began)
        ttfts = [r.ttft_s for r in ran]
        median_s, worst_s = statistics.median(ttfts), max(ttfts)
        ratio = worst_s / median_s
        text = (
            f"{BURST} requests, {BURST_AT_ONCE} at a time: TTFT median {median_s * 1e3:.0f} ms, "
            f"max/median {ratio:.2f}, {rate:.1f} tok/s"
        )
        uneven = ratio > BURST_RATIO
        return Outcome("burst", Mark.WARN if uneven else Mark.OK, text + (f"; aim {BURST_RATIO}" if uneven else ""))

    async def stop(self) -> Outcome:
        """Stop the child, and check that it ends by itself and leaves no process."""
        client = self._trial.client
        pid, began = client.supervisor.pid, time.monotonic()
        await client.stop(STOP_GRACE_S)
        took_s = time.monotonic() - began
        if pid is not None and is_alive(pid):
            return Outcome("stop", Mark.FAIL, f"the engine's process {pid} still runs after {took_s:.1f} s")
        if took_s >= STOP_GRACE_S:
            return Outcome("stop", Mark.FAIL, f"the engine did not end within {STOP_GRACE_S:g} s and was killed")
        return Outcome("stop", Mark.OK, f"the engine's process is gone after {took_s:.1f} s")

    async def untried(self) -> Outcome:
        """Say that the other checks need a model that generates text."""
        return Outcome("fidelity", Mark.WARN, "not checked, as are cancel, crash and burst: it generates no text")

    def steps(self) -> list[tuple[str, float, Callable[[], Awaitable[Outcome]]]]:
        """Return name, bound in seconds, and work of each check that needs a started engine."""
        bounds, start_s = self._bounds, self._trial.settings.start_timeout_s
        if self._capabilities.compute.backend is Backend.ENCODER:
            return [("fidelity", bounds.fidelity_s, self.untried)]
        return [
            ("fidelity", bounds.fidelity_s, self.fidelity),
            ("cancel", bounds.cancel_s, self.cancel),
            ("crash", bounds.crash_s + start_s, self.crash),
            ("burst", bounds.burst_s, self.burst),
        ]

    @property
    def _capabilities(self) -> Capabilities:
        capabilities = self._trial.client.capabilities
        assert capabilities is not None
        return capabilities

    def _prompts(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """Build a prompt of each length, shortened so that the context has room for an answer."""
        longest = max(1, min(self._capabilities.context, self._text.context) - FIDELITY_TOKENS)
        return [make_prompt(self._text, min(length, longest), turn) for turn, length in enumerate(lengths)]

    def _cap(self, prompt: Sequence[int], tokens: int) -> int:
        return min(tokens, self._capabilities.context - len(prompt))


async def check_model(settings: Settings, console: Console, bounds: Bounds | None = None) -> CheckReport:
    """Resolve the model of `settings`, run every check on it, and report; progress goes to `console`."""

    def progress(text: str) -> None:
        console.print(f"[dim]{escape(text)}[/]")

    try:
        folder = await asyncio.to_thread(resolve, settings, progress)
        text = await asyncio.to_thread(TextModel.load, folder.path, context=settings.context)
    except TreadleError as error:
        return CheckReport(settings.model, (Outcome("model", Mark.FAIL, spell(error.message, settings.spelling)),))
    trial = EngineTrial(settings, folder)
    trial.client.supervisor.on_stage = lambda stage: progress(f"  {stage}")
    check = EngineChecks(trial, text, bounds or Bounds())
    outcomes: list[Outcome] = []
    try:
        outcomes.append(await bounded("start", trial.settings.start_timeout_s + 10.0, check.start, progress))
        for name, bound_s, work in check.steps() if outcomes[0].mark is Mark.OK else []:
            outcomes.append(await bounded(name, bound_s, work, progress))
        outcomes.append(await bounded("stop", 2 * STOP_GRACE_S, check.stop, progress))
    finally:
        await trial.client.stop(STOP_GRACE_S)
    return CheckReport(folder.name, tuple(outcomes), trial.client.capabilities)


async def bounded(
    name: str, bound_s: float, work: Callable[[], Awaitable[Outcome]], progress: Callable[[str], None]
) -> Outcome:
    """Run `work` and return its outcome; TreadleErrors and a broken bound become failures."""
    progress(f"checking {name}")
    try:
        async with asyncio.timeout(bound_s):
            outcome = await work()
    except TimeoutError:
        outcome = Outcome(name, Mark.FAIL, f"not done within {bound_s:g} s")
    except TreadleError as error:
        outcome = Outcome(name, Mark.FAIL, f"{error.code}: {error.message}")
    progress(f"  {outcome.mark.value}: {outcome.text}")
    return outcome


async def reach(generation: Generation, tokens: int) -> None:
    """Read until `tokens` tokens came. Raises the error that ended the generation before."""
    async with aclosing(aiter(generation)) as deltas:
        async for _ in deltas:
            if generation.completion_tokens >= tokens:
                return


async def end_of(generation: Generation) -> TreadleError | None:
    """Read to the end; return the error that ended the generation, or None."""
    try:
        async with aclosing(aiter(generation)) as deltas:
            async for _ in deltas:
                pass
    except TreadleError as error:
        return error
    return None


def first_difference(one: CompletedRun, other: CompletedRun) -> int | None:
    """Return the first position at which two runs differ; None if they are the same."""
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
