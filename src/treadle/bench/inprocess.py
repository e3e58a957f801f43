"""Treadle's engine and mlx-lm's BatchGenerator in one process, on the same weights and the same prompts.

No module of MLX is imported before OpenBLAS is chosen, as in the server's owner. Both engines use the model as Treadle
loads it (float32 on a CPU), on this thread, in turn, and each goes first in every other round. Both get the BLAS
threads that Treadle would use at that moment. Decoding is greedy and only the token limit ends a row.
"""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Settings
from ..core.compute_path import ComputePath
from ..core.messages import Failed, FinishReason, FromOwner, StepReport, Submit
from ..core.statistics import RunnerStatistics
from ..engine.loop import EngineLoop
from ..engine.mailbox import Mailbox
from ..engine.owner import OwnerLimits, kv_tokens, scheduler_of
from ..runner.base import RunnerBroken
from ..runner.device import blas
from ..runner.device.require_mlx import require_mlx
from .engine_figures import FORMAT, OURS, THEIRS, Batch, EngineResult, RunRecorder, agreement, batch_of
from .errors import BenchError
from .machine import this_machine

Prompts = Sequence[tuple[int, ...]]
ReportProgress = Callable[[str], None]
MAX_ROWS = 1024


@dataclass(frozen=True)
class EngineBench:
    """Parameters of a run: for each size in `batches` that number of prompts of `prompt` tokens at once, `tokens`
    tokens of each, `rounds` times after a round that does not count. `prefill_tokens` is the server's setting of that
    name; `threads` bounds BLAS threads (None: the server's choice)."""

    batches: Sequence[int] = (1, 8, 32)
    prompt: int = 128
    tokens: int = 64
    rounds: int = 3
    seed: int = 0
    prefill_tokens: int = Settings.prefill_tokens
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.batches:
            raise BenchError("--batch names no batch size: give for example 1,8,32")
        for size in self.batches:
            if not 1 <= size <= MAX_ROWS:
                raise BenchError(f"--batch {size}: a batch has 1 to {MAX_ROWS} rows")
        _at_least("--prompt", self.prompt, 1)
        _at_least("--tokens", self.tokens, 2)  # the first one belongs to the prompt's time
        _at_least("--rounds", self.rounds, 1)
        _at_least("--prefill-tokens", self.prefill_tokens, 1)
        if self.threads is not None:
            _at_least("--threads", self.threads, 1)


def _at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise BenchError(f"{flag} {value}: give at least {least}")


def measure(folder: Path, name: str, bench: EngineBench, progress: ReportProgress = lambda stage: None) -> EngineResult:
    """Load the model in `folder` and run both engines. The calling thread owns all MLX state meanwhile.

    Raises BenchError if the model can't run such a batch or an engine fails, and the errors of loading a model.
    """
    begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    engines = Engines(folder, name, bench, progress)
    try:
        for size in bench.batches:
            engines.check(size)
        batches = tuple(_batch(engines, bench, size, progress) for size in bench.batches)
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
            compute=engines.compute,
        )
    finally:
        engines.close()


def prompts(bench: EngineBench, size: int, round_: int, vocabulary: int) -> Prompts:
    """Build prompts: the same for the same seed, size and round. No two rounds share any, so that no cache helps."""
    rng = random.Random(f"{bench.seed} {size} {round_}")
    return [tuple(rng.randrange(vocabulary) for _ in range(bench.prompt)) for _ in range(size)]


def _batch(engines: Engines, bench: EngineBench, size: int, progress: ReportProgress) -> Batch:
    loop = engines.engine_loop(size)
    runs: dict[str, Callable[[Prompts], RunRecorder]] = {
        OURS: lambda batch: engines.run_treadle(loop, batch),
        THEIRS: engines.run_mlx_lm,
    }
    passes, agreed = [], []
    for round_ in range(bench.rounds + 1):  # round 0 warms both up
        batch = prompts(bench, size, round_, engines.model.vocabulary)
        records: dict[str, RunRecorder] = {}
        for engine in (OURS, THEIRS) if round_ % 2 else (THEIRS, OURS):
            progress(f"batch {size}, {f'round {round_} of {bench.rounds}' if round_ else 'warming up'}: {engine}")
            records[engine], peak = engines.run_measured(runs[engine], batch)
            if round_:
                passes.append(records[engine].as_run(engine, round_, peak))
        if round_:
            agreed.append(agreement(round_, records[OURS].rows, records[THEIRS].rows))
    return batch_of(size, bench.prompt, bench.tokens, passes, agreed)


class Engines:
    """One model in memory, and runs of both engines on it."""

    def __init__(self, folder: Path, name: str, bench: EngineBench, progress: ReportProgress) -> None:
        report = blas.prepare(bench.threads)
        require_mlx()
        from ..runner.device.blas_threads import ThreadGovernor
        from ..runner.loading.loader import load
        from ..runner.model_runner import ModelRunner

        if report.warning:
            progress(report.warning)
        self.model = load(
            folder, name=name, prefill_tokens=bench.prefill_tokens, details={"blas": str(report)}, progress=progress
        )
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

    @property
    def compute(self) -> ComputePath:
        """Compute path of Treadle's run."""
        return self._runner.capabilities().compute

    def check(self, size: int) -> None:
        """Raise BenchError if `size` rows can't share a step, or don't fit."""
        bench, capabilities = self._bench, self._runner.capabilities()
        if self.model.choice.config.name == "serial":
            reason = capabilities.details.get("not batched", "its caches can't be merged")
            raise BenchError(f"mlx-lm's BatchGenerator can't run {capabilities.model} ({reason}): choose another model")
        row_tokens = bench.prompt + bench.tokens
        if row_tokens > capabilities.context:
            raise BenchError(
                f"--prompt {bench.prompt} and --tokens {bench.tokens} make {row_tokens} tokens, and the context of "
                f"{capabilities.model} is {capabilities.context}: give fewer"
            )
        capacity, needed = (
            kv_tokens(capabilities, size),
            size * -(-row_tokens // capabilities.kv.block) * capabilities.kv.block,
        )
        if capacity and needed > capacity:
            raise BenchError(
                f"a batch of {size} needs a cache of {needed:,} tokens, and there is memory for {capacity:,}: "
                "give a smaller --batch, --prompt or --tokens"
            )

    def engine_loop(self, size: int) -> EngineLoop:
        """Return the owner's loop for batches of `size`, with the scheduler that a server would have."""
        limits = OwnerLimits(max_running=size, prefill_tokens=self._bench.prefill_tokens)
        return EngineLoop(self._runner, scheduler_of(self._runner, limits), Mailbox(), self._reports.append)

    def run_measured(self, engine: Callable[[Prompts], RunRecorder], batch: Prompts) -> tuple[RunRecorder, int]:
        """Run `engine` and return its record and its peak memory in bytes. State of the last run is cleared before."""
        import mlx.core as mx

        self._runner.forget_prefixes()
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        try:
            return engine(batch), int(mx.get_peak_memory())
        except (RunnerBroken, RuntimeError, MemoryError) as error:
            line = " ".join(str(error).split()) or type(error).__name__
            raise BenchError(f"an engine failed at batch {len(batch)} ({line}): give a smaller --batch") from error

    def run_treadle(self, loop: EngineLoop, batch: Prompts) -> RunRecorder:
        """Run Treadle's engine, without the fronts and the transport to the owner."""
        record = RunRecorder(len(batch), self._bench.tokens)
        prefilled_s = _prefilled_s(loop)
        for i, prompt in enumerate(batch):
            loop.mailbox.put(Submit(id=str(i), prompt=prompt, max_tokens=self._bench.tokens, max_wait_s=1e9))
        while not record.done:
            began = time.perf_counter()
            loop.run_once()
            took_s = time.perf_counter() - began
            record.step(_reported_tokens(self._reports), took_s)
            self._reports.clear()
        record.prefill_s = _prefilled_s(loop) - prefilled_s
        while loop.has_work:  # the last rows are released
            loop.run_once()
        return record

    def run_mlx_lm(self, batch: Prompts) -> RunRecorder:
        """Run mlx-lm's generator with its own defaults, as its server and its `batch_generate` use it, except that it
        may decode the whole batch at once: its default would hold at 32."""
        from mlx_lm.generate import BatchGenerator

        record = RunRecorder(len(batch), self._bench.tokens)
        generator = BatchGenerator(
            self.model.module, max_tokens=self._bench.tokens, completion_batch_size=max(32, len(batch))
        )
        try:
            with generator.stats() as statistics:
                began = time.perf_counter()
                uids = generator.insert([list(prompt) for prompt in batch])
                rows = {uid: i for i, uid in enumerate(uids)}
                while not record.done:
                    self._before_step()
                    record.step(_generated_tokens(generator, rows), time.perf_counter() - began)
                    began = time.perf_counter()
        finally:
            generator.close()
        record.prefill_s = float(statistics.prompt_time)
        return record

    def close(self) -> None:
        """Free the model."""
        self._runner.close()
        del self.model


def _prefilled_s(loop: EngineLoop) -> float:
    """Return the seconds that this loop has read prompts so far."""
    return loop.scheduler.statistics(0.0, RunnerStatistics()).prefill_s


def _reported_tokens(reports: Sequence[FromOwner]) -> list[tuple[int, int]]:
    """Return (row, token) of each token in a step's reports. Raises BenchError if a row or the engine failed."""
    gained: list[tuple[int, int]] = []
    for report in reports:
        if isinstance(report, Failed):
            raise BenchError(f"Treadle's engine failed: {report.message}")
        for output in report.outputs if isinstance(report, StepReport) else ():
            if output.finish is not None and output.finish.reason is not FinishReason.LENGTH:
                raise BenchError(f"Treadle's engine ended a row: {output.finish.reason.value} {output.finish.message}")
            gained += [(int(output.id), token) for token in output.tokens]
    return gained


def _generated_tokens(generator: Any, rows: dict[int, int]) -> list[tuple[int, int]]:
    """Return (row, token) of one iteration of mlx-lm's generator. Its log-probabilities are dropped unread, as a server
    does unless a client asks for them."""
    _, responses = generator.next()
    return [(rows[response.uid], int(response.token)) for response in responses]
