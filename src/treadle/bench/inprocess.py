"""Treadle's engine and mlx-lm's BatchGenerator without a server, on the same weights and the same prompts.

Rules: nothing of MLX is imported before OpenBLAS is chosen, as in the server's owner. Both engines work on the model
as Treadle loads it (float32 on a CPU), on this thread, in turn, and each goes first in every other round. Both get as
many BLAS threads as Treadle would give itself at that moment. Decoding is greedy and nothing ends a row but its limit.
"""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.messages import Failed, FinishReason, FromOwner, RunnerStatistics, StepReport, Submit
from ..engine.loop import EngineLoop
from ..engine.mailbox import Mailbox
from ..engine.owner import OwnerLimits, kv_tokens, scheduler_for
from ..runner.base import RunnerBroken
from ..runner.device import blas
from ..runner.device.require_mlx import require_mlx
from .engine_figures import FORMAT, OURS, THEIRS, Batch, EngineResult, Record, agreement, batch_of
from .errors import BenchError
from .machine import this_machine

Prompts = Sequence[tuple[int, ...]]
Say = Callable[[str], None]
MOST_ROWS = 1024


@dataclass(frozen=True)
class EngineBench:
    """What to run: for each of `batches` that many prompts of `prompt` tokens at once, `tokens` tokens of each,
    `rounds` times after a round that does not count. `prefill_tokens` is the server's setting of that name; `threads`
    are BLAS threads at most (None: as many as the server would take)."""

    batches: Sequence[int] = (1, 8, 32)
    prompt: int = 128
    tokens: int = 64
    rounds: int = 3
    seed: int = 0
    prefill_tokens: int = 2048
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.batches:
            raise BenchError("--batch names no batch size: give for example 1,8,32")
        for size in self.batches:
            if not 1 <= size <= MOST_ROWS:
                raise BenchError(f"--batch {size}: a batch has 1 to {MOST_ROWS} rows")
        _at_least("--prompt", self.prompt, 1)
        _at_least("--tokens", self.tokens, 2)  # the first one belongs to the prompt's time
        _at_least("--rounds", self.rounds, 1)
        _at_least("--prefill-tokens", self.prefill_tokens, 1)
        if self.threads is not None:
            _at_least("--threads", self.threads, 1)


def _at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise BenchError(f"{flag} {value}: give at least {least}")


def measure(folder: Path, name: str, bench: EngineBench, say: Say = lambda stage: None) -> EngineResult:
    """Load the model in `folder` and run both engines. The calling thread owns everything of MLX meanwhile.

    Raises BenchError where the model can't do what is asked or an engine fails, and what loading a model raises.
    """
    begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    engines = Engines(folder, name, bench, say)
    try:
        for size in bench.batches:
            engines.check(size)
        batches = tuple(_batch(engines, bench, size, say) for size in bench.batches)
        return EngineResult(
            format=FORMAT,
            started=begun,
            machine=this_machine(),
            model=engines.model.name,
            dtype=engines.model.dtype,
            details=dict(engines.model.details),
            prompt=bench.prompt,
            tokens=bench.tokens,
            rounds=bench.rounds,
            seed=bench.seed,
            batches=batches,
        )
    finally:
        engines.close()


def prompts(bench: EngineBench, size: int, round_: int, vocabulary: int) -> Prompts:
    """The same for the same seed, size and round; no two rounds share any, so that no cache helps."""
    chance = random.Random(f"{bench.seed} {size} {round_}")
    return [tuple(chance.randrange(vocabulary) for _ in range(bench.prompt)) for _ in range(size)]


def _batch(engines: Engines, bench: EngineBench, size: int, say: Say) -> Batch:
    loop = engines.engine_loop(size)
    ways: dict[str, Callable[[Prompts], Record]] = {
        OURS: lambda wanted: engines.ours(loop, wanted),
        THEIRS: engines.theirs,
    }
    passes, agreed = [], []
    for round_ in range(bench.rounds + 1):  # round 0 warms both up
        wanted = prompts(bench, size, round_, engines.model.vocabulary)
        seen: dict[str, Record] = {}
        for engine in (OURS, THEIRS) if round_ % 2 else (THEIRS, OURS):
            say(f"batch {size}, {f'round {round_} of {bench.rounds}' if round_ else 'warming up'}: {engine}")
            seen[engine], peak = engines.watched(ways[engine], wanted)
            if round_:
                passes.append(seen[engine].as_pass(engine, round_, peak))
        if round_:
            agreed.append(agreement(round_, seen[OURS].rows, seen[THEIRS].rows))
    return batch_of(size, bench.prompt, bench.tokens, passes, agreed)


class Engines:
    """One model in memory, and both engines' ways with it."""

    def __init__(self, folder: Path, name: str, bench: EngineBench, say: Say) -> None:
        report = blas.prepare(bench.threads)
        require_mlx()
        from ..runner.device.blas_threads import ThreadGovernor
        from ..runner.loading.loader import load
        from ..runner.model_runner import ModelRunner

        if report.warning:
            say(report.warning)
        self.model = load(folder, name=name, details={"blas": str(report)}, progress=say)
        self._bench = bench
        self._before_step: Callable[[], None] = lambda: None
        if report.set_threads is not None:
            self._before_step = ThreadGovernor(report.set_threads, report.threads).before_step
        self._runner = ModelRunner(self.model, before_step=self._before_step)
        self._reports: list[FromOwner] = []
        try:
            self._runner.warm_up()
        except BaseException:
            self._runner.close()
            raise

    def check(self, size: int) -> None:
        """Raises BenchError when `size` rows can't share a step, or don't fit."""
        bench, can = self._bench, self._runner.capabilities()
        if not self.model.batched:
            why = can.details.get("not batched", "its caches can't be merged")
            raise BenchError(f"mlx-lm's BatchGenerator can't run {can.model} ({why}): choose another model")
        each = bench.prompt + bench.tokens
        if each > can.context:
            raise BenchError(
                f"--prompt {bench.prompt} and --tokens {bench.tokens} make {each} tokens, and the context of "
                f"{can.model} is {can.context}: give fewer"
            )
        room, needed = kv_tokens(can, size), size * -(-each // can.kv_block) * can.kv_block
        if room and needed > room:
            raise BenchError(
                f"a batch of {size} needs a cache of {needed:,} tokens, and there is memory for {room:,}: "
                "give a smaller --batch, --prompt or --tokens"
            )

    def engine_loop(self, size: int) -> EngineLoop:
        """The owner's loop for batches of `size`, with the scheduler that a server would have."""
        limits = OwnerLimits(max_running=size, prefill_tokens=self._bench.prefill_tokens)
        scheduler = scheduler_for(self._runner.capabilities(), limits, self._runner.reuse)
        return EngineLoop(self._runner, scheduler, Mailbox(), self._reports.append)

    def watched(self, way: Callable[[Prompts], Record], wanted: Prompts) -> tuple[Record, int]:
        """What `way` did, and the most memory it took in bytes. Nothing of the last pass is left to count."""
        import mlx.core as mx

        self._runner.forget_prefixes()
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        try:
            return way(wanted), int(mx.get_peak_memory())
        except (RunnerBroken, RuntimeError, MemoryError) as error:
            line = " ".join(str(error).split()) or type(error).__name__
            raise BenchError(f"an engine failed at batch {len(wanted)} ({line}): give a smaller --batch") from error

    def ours(self, loop: EngineLoop, wanted: Prompts) -> Record:
        """Treadle: everything but the fronts and the way to the owner."""
        record = Record(len(wanted), self._bench.tokens)
        prefilled_s = _prefilled_s(loop)
        for i, prompt in enumerate(wanted):
            loop.mailbox.put(Submit(id=str(i), prompt=prompt, max_tokens=self._bench.tokens, max_wait_s=1e9))
        while not record.done:
            began = time.perf_counter()
            loop.run_once()
            took_s = time.perf_counter() - began
            record.step(_gained(self._reports), took_s)
            self._reports.clear()
        record.prefill_s = _prefilled_s(loop) - prefilled_s
        while loop.has_work:  # the last rows are released
            loop.run_once()
        return record

    def theirs(self, wanted: Prompts) -> Record:
        """mlx-lm: its generator with its own defaults, as its server and its `batch_generate` use it; but it may
        decode the whole batch at once, where its default would hold at 32."""
        from mlx_lm.generate import BatchGenerator

        record = Record(len(wanted), self._bench.tokens)
        generator = BatchGenerator(
            self.model.module, max_tokens=self._bench.tokens, completion_batch_size=max(32, len(wanted))
        )
        try:
            with generator.stats() as counted:
                began = time.perf_counter()
                uids = generator.insert([list(prompt) for prompt in wanted])
                rows = {uid: i for i, uid in enumerate(uids)}
                while not record.done:
                    self._before_step()
                    record.step(_taken(generator, rows), time.perf_counter() - began)
                    began = time.perf_counter()
        finally:
            generator.close()
        record.prefill_s = float(counted.prompt_time)
        return record

    def close(self) -> None:
        """Free the model."""
        self._runner.close()
        del self.model


def _prefilled_s(loop: EngineLoop) -> float:
    """Seconds that this loop has read prompts so far."""
    return loop.scheduler.statistics(0.0, RunnerStatistics()).prefill_s


def _gained(reports: Sequence[FromOwner]) -> list[tuple[int, int]]:
    """(row, token) of what a step had to tell. Raises BenchError where a row or the engine failed."""
    gained: list[tuple[int, int]] = []
    for report in reports:
        if isinstance(report, Failed):
            raise BenchError(f"Treadle's engine failed: {report.message}")
        for output in report.outputs if isinstance(report, StepReport) else ():
            if output.finish is not None and output.finish.reason is not FinishReason.LENGTH:
                raise BenchError(f"Treadle's engine ended a row: {output.finish.reason.value} {output.finish.message}")
            gained += [(int(output.id), token) for token in output.tokens]
    return gained


def _taken(generator: Any, rows: dict[int, int]) -> list[tuple[int, int]]:
    """(row, token) of one iteration of mlx-lm's generator. Its log-probabilities are dropped unread, as a server does
    when nobody asks for them."""
    _, responses = generator.next()
    return [(rows[response.uid], int(response.token)) for response in responses]
