"""A machine that is a formula, and the engine's loop around it: a host that builds steps, a device that computes them.

Seconds here are simulated. As in `engine/loop.py` a step is built while the one before it is computed, and a step's
seconds are what `runner/model_runner.py` takes them for: until its end, from its start or the end of the one before
it. Where building takes longer than computing, the seconds of a step are those in which the next one was built.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from treadle.core.capabilities import StepCost
from treadle.core.image import Image, VisionCapabilities
from treadle.core.messages import Output, Submit
from treadle.core.plan import RowTokens, StepPlan, StepResult
from treadle.core.scheduler import Scheduler, SchedulerLimits
from treadle.runner.forward.batch_buckets import PROMPT_SIZES

HICCUPS = 250
KNOWN = (64, 256, 1024)
"""Tokens of chunks that a start has measured, as of a machine that waits."""
WITHOUT_WAITING = 1e9
LAYERS = 28


@dataclass(frozen=True)
class Machine:
    """What a step takes: to be built, where rows decode and where a prompt is read beside them, and to be computed, by
    its tokens of prompts and those before them. Each time is within +-`noise`; the first chunk of the prompt "long" is
    `first` times as dear, and steps with chunks, by their numbers, in `slow` five times; one time in HICCUPS
    is longer by `hiccup_s`. Encoding an image takes `layer_s` for each of LAYERS. The host hands over no more than the
    device computes in `ahead_s`, and waits with the rest."""

    build_s: float
    build_mixed_s: float
    decode_s: float
    mixed_s: float
    token_s: float
    context_s: float = 0.0  # for each token and each one before it
    lookahead: int = 1
    noise: float = 0.0
    first: float = 1.0
    slow: frozenset[int] = frozenset()
    hiccup_s: float = 0.0
    chunk_sizes: tuple[int, ...] = ()
    layer_s: float = 0.0
    ahead_s: float = WITHOUT_WAITING

    def computed_s(self, sizes: Mapping[int, int]) -> float:
        """Of chunks by where they start."""
        if not sizes:
            return self.decode_s
        attended = sum(count * (start + count / 2) for start, count in sizes.items())
        return self.mixed_s + self.token_s * sum(sizes.values()) + self.context_s * attended

    def alone_s(self, count: int) -> float:
        """Of a prompt's first chunk by itself, as a start measures it."""
        return self.build_mixed_s + self.computed_s({0: count})


@dataclass
class Sent:
    """One request: when it was sent, and when its tokens came."""

    at: float
    token_s: list[float] = field(default_factory=list)
    done: bool = False

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.at


@dataclass(frozen=True)
class _Started:
    plan: StepPlan
    began: float
    done: float


class Served:
    """A scheduler that drives a machine. What is sent for later is taken when its time has come, between two steps."""

    def __init__(self, machine: Machine, *, max_running: int = 64, prefill_tokens: int = 2048, seed: int = 0) -> None:
        self.machine = machine
        vision = VisionCapabilities(layers=LAYERS, quadratic=8000)
        chunks = tuple(
            StepCost(0, count, machine.alone_s(count)) for count in KNOWN if machine.ahead_s < WITHOUT_WAITING
        )
        limits = SchedulerLimits(
            max_running, prefill_tokens, chunk_sizes=machine.chunk_sizes, vision=vision, chunks=chunks
        )
        self.scheduler = Scheduler(limits)
        self.now = 0.0
        self.sent: dict[str, Sent] = {}
        self.chunks: list[tuple[float, int]] = []  # when each step with a part of a prompt was planned, and its tokens
        self._later: deque[tuple[float, Submit]] = deque()
        self._chance = random.Random(seed)
        self._started: deque[_Started] = deque()
        self._device_free = self._finished_at = 0.0

    def send(self, id_: str, prompt: int, max_tokens: int, at: float | None = None, image: int = 0) -> Sent:
        """Send a prompt, whose first tokens stand for an image of so many."""
        at = self.now if at is None else at
        images = (Image(0, image, id_.encode(), "pixels", (4 * image, 1536)),) if image else ()
        request = Submit(id=id_, prompt=(1,) * prompt, max_tokens=max_tokens, max_wait_s=1e9, images=images)
        self._later.append((at, request))
        self._later = deque(sorted(self._later, key=lambda entry: entry[0]))
        self.sent[id_] = Sent(at)
        return self.sent[id_]

    def until(self, holds: Callable[[], bool], steps: int = 100_000) -> None:
        for _ in range(steps):
            if holds():
                return
            self.step()
        raise AssertionError(f"not reached within {steps} steps")

    def step(self) -> None:
        """One round of the loop."""
        if not self.scheduler.has_work and self._later:
            self.now = max(self.now, self._later[0][0])
        while self._later and self._later[0][0] <= self.now:
            self.scheduler.submit(self._later.popleft()[1], self.now)
        self.scheduler.take_released_ids()
        plan = self.scheduler.plan(self.now)
        if plan.idle:
            self._finish_until(max(0, self.scheduler.in_flight - 1))
        else:
            self._start(plan)
            self._finish_until(self.machine.lookahead)
        self._hear(self.scheduler.flush())

    def _start(self, plan: StepPlan) -> None:
        machine, began, factor = self.machine, self.now, 1.0
        if plan.prefill:
            self.chunks.append((self.now, sum(chunk.count for chunk in plan.prefill)))
            factor = machine.first if any(admit.request.id == "long" for admit in plan.admit) else 1.0
            factor = 5.0 if len(self.chunks) in machine.slow else factor
        self.now += self._noisy(factor * (machine.build_mixed_s if plan.prefill else machine.build_s))
        sizes = {chunk.start: 0 for chunk in plan.prefill}
        for chunk in plan.prefill:
            sizes[chunk.start] += chunk.count
        encoded_s = machine.layer_s * sum(encode.count for encode in plan.encode)
        computed_s = factor * machine.computed_s(sizes) + encoded_s
        self._device_free = max(self.now, self._device_free) + self._noisy(computed_s)
        self._started.append(_Started(plan, began, self._device_free))
        self.now = max(self.now, self._device_free - machine.ahead_s)

    def _noisy(self, seconds: float) -> float:
        hiccup_s = self.machine.hiccup_s if self._chance.random() * HICCUPS < 1 else 0.0
        return seconds * self._chance.uniform(1 - self.machine.noise, 1 + self.machine.noise) + hiccup_s

    def _finish_until(self, in_flight: int) -> None:
        while self.scheduler.in_flight > in_flight:
            started = self._started.popleft()
            self.now = max(self.now, started.done)
            seconds = self.now - max(started.began, self._finished_at)
            self._finished_at = self.now
            rows = tuple(RowTokens(id=row.id, tokens=(7,)) for row in started.plan.decode)
            times: dict[str, Any] = {kind(started.plan): seconds}
            self._hear(self.scheduler.apply(started.plan, StepResult(rows=rows, **times)))

    def _hear(self, outputs: tuple[Output, ...]) -> None:
        for output in outputs:
            self.sent[output.id].token_s += [self.now] * len(output.tokens)
            self.sent[output.id].done |= output.finish is not None


def kind(plan: StepPlan) -> str:
    """The field of a StepResult that has the seconds of such a step, as the runner sees it."""
    chunks = {chunk.id for chunk in plan.prefill}
    decodes = any(decode.id not in chunks for decode in plan.decode)
    return ("mixed_s" if decodes else "prefill_s") if chunks or plan.encode else "decode_s"


@dataclass(frozen=True)
class Stall:
    """What a long prompt beside four decoding rows came to (P3), and a short request that came meanwhile (P4)."""

    kept: float
    gap_ratio: float
    ttft_s: float
    ideal_s: float
    short_ratio: float
    chunk: int


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def stall(
    machine: Machine,
    *,
    prompt: int = 30_000,
    prompts: int = 1,
    image: int = 0,
    decoders: int = 4,
    short: int = 0,
    seed: int = 0,
) -> Stall:
    """Rows decode, one has come after the other; then the long prompt joins them, or several at once, maybe with an
    `image` of so many tokens each. The times are those of the last one."""
    served = Served(machine, seed=seed)
    alone = unloaded(machine, short or 82, seed)
    watched = one_after_the_other(served, decoders)
    for _ in range(300):
        served.step()
    idle, before = gaps(watched)[-200:], len(served.chunks)
    longs = [served.send(f"long {i}" if i else "long", prompt, 1, image=image) for i in range(prompts)]
    shorts = []
    if short:
        step_s = statistics.median(idle)
        shorts = [served.send(f"short {i}", short, 1, at=served.now + (11 + 10.13 * i) * step_s) for i in range(40)]
    first = len(watched.token_s)
    served.until(lambda: all(sent.done for sent in longs))
    during = gaps(watched)[first - 1 :]
    sizes = [count for _, count in served.chunks[before:]]
    cost_s = prompts * (machine.computed_s({0: prompt}) - machine.mixed_s + machine.layer_s * (LAYERS if image else 0))
    return Stall(
        kept=statistics.mean(idle) / statistics.mean(during),
        gap_ratio=quantile(during, 0.99) / quantile(idle, 0.99),
        ttft_s=max(sent.ttft_s for sent in longs),
        ideal_s=cost_s * 1.4 / 0.4,
        short_ratio=statistics.median([s.ttft_s for s in shorts if s.done]) / alone if shorts else 0.0,
        chunk=int(statistics.mean(sizes)),
    )


def one_after_the_other(served: Served, count: int) -> Sent:
    """So many rows that decode for ever come when the one before has begun; the first of them."""
    rows = []
    for i in range(count):
        rows.append(served.send(f"decoder {i}", 82, 10**9))
        served.until(lambda: bool(rows[-1].token_s))
    return rows[0]


def unloaded(machine: Machine, length: int, seed: int = 0) -> float:
    """A short request's TTFT on an idle server."""
    served, ttft_s = Served(machine, seed=seed), []
    for i in range(9):
        sent = served.send(f"{i}", length, 1, at=served.now + 1.0)
        served.until(functools.partial(getattr, sent, "done"))
        ttft_s.append(sent.ttft_s)
    return statistics.median(ttft_s)


def gaps(sent: Sent) -> list[float]:
    return [b - a for a, b in zip(sent.token_s, sent.token_s[1:], strict=False)]


def burst(machine: Machine, at_once: int, *, every_s: float = 0.1, prompt: int = 82, seed: int = 0) -> list[float]:
    """P1: TTFT of 4 requests a slot, `every_s` apart, after a few that warm up."""
    served = Served(machine, max_running=at_once, seed=seed)
    warm = [served.send(f"warm {i}", prompt, 64, at=0.05 * i) for i in range(6)]
    served.until(lambda: all(one.done for one in warm))
    chance, start = random.Random(seed), served.now + 1.0
    jitter = [chance.uniform(0, 0.01) for _ in range(4 * at_once)]
    sent = [served.send(f"{i}", prompt, 64, at=start + every_s * i + jitter[i]) for i in range(4 * at_once)]
    served.until(lambda: all(one.done for one in sent))
    return [one.ttft_s for one in sent]


SMALL = Machine(2.8e-3, 5e-3, 2e-3, 3e-3, 8e-6, context_s=2e-10)
SLOW_HOST = Machine(4.3e-3, 8.3e-3, 2.5e-3, 4.4e-3, 9e-6, context_s=2e-10)
QUICK_HOST = Machine(1e-3, 1.5e-3, 3e-3, 5e-3, 8e-6, context_s=2e-10)
LARGE = Machine(2.8e-3, 5e-3, 5.5e-3, 7e-3, 60e-6, context_s=4e-10)
IN_SIZES = Machine(2.3e-3, 4.2e-3, 1.6e-3, 2.2e-3, 6e-6, context_s=2e-10, chunk_sizes=PROMPT_SIZES)
BENT = Machine(2.3e-3, 3.05e-3, 1.1e-3, 2e-3, 8e-6, context_s=2.4e-10, chunk_sizes=PROMPT_SIZES)
CROWDED = Machine(2.6e-3, 3.3e-3, 8e-3, 9e-3, 4e-6, context_s=2e-10, noise=0.1, chunk_sizes=PROMPT_SIZES)
WAITING = Machine(8e-3, 13e-3, 7e-3, 9e-3, 100e-6, context_s=2e-10, noise=0.15, chunk_sizes=PROMPT_SIZES, ahead_s=0.01)
CPU = Machine(0.0, 0.0, 0.1, 0.13, 3e-3, lookahead=0)
DEAR_MIX = Machine(3.6e-3, 8.5e-3, 3.2e-3, 5e-3, 41e-6, context_s=2e-10)
DEAR_PASS = Machine(1e-3, 1e-3, 4e-3, 12e-3, 8e-6, context_s=2e-10)
