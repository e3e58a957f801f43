"""Engine under test: runs prompts through it without HTTP, and records its restarts and its batch sizes."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..compose.engine import engine_for
from ..config import Settings
from ..core.messages import StepReport, Submit, TokenLogprob
from ..engine.client import EngineClient
from ..engine.generation import Generation
from ..errors import StartFailed
from ..models import ModelFolder
from ..text import TextModel

ROWS = 8
_WAIT_S = 600.0
Result = TypeVar("Result")

_SENTENCES = (
    "The lighthouse keeper counted the ships that passed before dawn.",
    "A good engine does one thing at a time, and does it for many at once.",
    "In the north the winters are long, and people mend their nets by the fire.",
    "She asked how far it was to the river, and nobody at the table knew.",
    "Water boils at a lower temperature on a mountain than at the sea.",
    "The third train of the morning was late, so the market opened without bread.",
    "Numbers were written on the wall in chalk, from one to forty-two.",
    "Every loom needs a weaver, and every weaver needs a loom.",
)


@dataclass(frozen=True)
class CompletedRun:
    """One finished sequence. Times are in seconds from its submission."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    ttft_s: float
    total_s: float


class TrialObserver:
    """Observer that records the largest batch and the restarts."""

    def __init__(self) -> None:
        self.most_running = 0
        self.restart = asyncio.Event()

    def step(self, report: StepReport) -> None:
        self.most_running = max(self.most_running, report.statistics.running)

    def restarted(self) -> None:
        self.restart.set()

    def admitted(self, kind: str, wait_s: float) -> None: ...

    def first_token(self, kind: str, ttft_s: float) -> None: ...

    def tokens(self, kind: str, count: int, gap_s: float) -> None: ...

    def finished(self, kind: str, reason: str, total_s: float) -> None: ...

    def refused(self, reason: str) -> None: ...

    def died(self, cause: str) -> None: ...

    def replayed(self) -> None: ...

    def quarantined(self) -> None: ...


class EngineTrial:
    """Engine in a child process, with slots for ROWS sequences and no other users."""

    def __init__(self, settings: Settings, folder: ModelFolder) -> None:
        self.settings = replace(
            settings,
            in_process=False,
            max_running=ROWS,
            max_waiting=4 * ROWS,
            max_wait_s=_WAIT_S,
            log_level="error",
        )
        self.observer = TrialObserver()
        self.client: EngineClient = engine_for(self.settings, lambda: folder, [self.observer])

    @contextmanager
    def generating(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, logprobs: int | None = None
    ) -> Iterator[list[Generation]]:
        """Context manager that starts greedy sequences and cancels them at its end. No stop token ends one before
        `max_tokens`."""
        with self.client.reserve(
            rows=len(prompts),
            prompt_tokens=sum(map(len, prompts)),
            completion_tokens=max_tokens,
            kind="doctor",
            tag="doctor",
        ) as reservation:
            yield reservation.submit(
                [Submit(id="", prompt=tuple(p), max_tokens=max_tokens, logprobs=logprobs) for p in prompts]
            )

    async def run(self, prompt: Sequence[int], max_tokens: int, *, logprobs: int | None = None) -> CompletedRun:
        """Generate to the end. Raises the error that ended it early."""
        with self.generating([prompt], max_tokens, logprobs=logprobs) as (generation,):
            return await _read(generation)

    async def run_batch(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[CompletedRun]:
        """Generate from all prompts to the end, submitted at the same moment."""
        with self.generating(prompts, max_tokens) as generations:
            return await gather_or_cancel([_read(generation) for generation in generations])

    async def wait_for_restart(self) -> None:
        """Wait until a lost engine is ready again. Raises StartFailed if it has failed for good."""
        failed = asyncio.create_task(self.client.supervisor.failed())
        back = asyncio.create_task(self.observer.restart.wait())
        try:
            await asyncio.wait((failed, back), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise StartFailed(failed.result())
        finally:
            failed.cancel()
            back.cancel()
            await asyncio.gather(failed, back, return_exceptions=True)

    async def idle_ttft_s(self, prompt: Sequence[int], times: int = 3) -> float:
        """Return the median time to the first token on an otherwise idle engine, in seconds."""
        return statistics.median([(await self.run(prompt, 1)).ttft_s for _ in range(times)])


async def _read(generation: Generation) -> CompletedRun:
    tokens: list[int] = []
    entries: list[TokenLogprob] = []
    began, ttft_s = time.monotonic(), 0.0
    async with aclosing(aiter(generation)) as deltas:
        async for delta in deltas:
            if delta.tokens and not tokens:
                ttft_s = time.monotonic() - began
            tokens.extend(delta.tokens)
            entries.extend(delta.logprobs)
    return CompletedRun(tuple(tokens), tuple(entries), ttft_s, time.monotonic() - began)


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all at once. If one raises, cancel the remaining ones and raise its error."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def make_prompt(text: TextModel, tokens: int, variant: int) -> tuple[int, ...]:
    """Build a prompt of `tokens` tokens of English; each `variant` begins with another sentence."""
    variant %= len(_SENTENCES)
    passage = " ".join((*_SENTENCES[variant:], *_SENTENCES[:variant]))
    ids = text.encode(passage)
    while len(ids) < tokens:
        passage += " " + passage
        ids = text.encode(passage)
    return tuple(ids[:tokens])
