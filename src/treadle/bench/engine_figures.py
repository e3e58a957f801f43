"""Result and figures of `treadle bench engine`: plain values without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ..core.compute_path import ComputePath
from .measures import percentiles
from .ratios import Figure, FigureRow, figure_row
from .samples import Machine

FORMAT = 1
OURS, THEIRS = "treadle", "mlx-lm"


class BatchRun(msgspec.Struct, frozen=True):
    """One engine's run over one batch, all of whose prompts came at once.

    `wall_s` is the whole time, `first_s` the time until every row had its first token; rows that had theirs decode
    meanwhile. `prefill_s` is the time of reading prompts, by each engine's own count. `full_step_s` are the steps after
    `first_s` in which every row gained a token, `full_tokens` in all: the cost of decoding with the batch full and no
    prefill. `peak_bytes` is the peak of MLX's memory, weights included.
    """

    engine: str
    round: int
    wall_s: float
    first_s: float
    prefill_s: float
    full_step_s: tuple[float, ...]
    full_tokens: int
    peak_bytes: int


class Agreement(msgspec.Struct, frozen=True):
    """Equality of both engines' tokens: `equal` of `rows` rows are the same, and the earliest difference is at position
    `first_divergence` (0 is the first generated token)."""

    round: int
    rows: int
    equal: int
    first_divergence: int | None = None


class Batch(msgspec.Struct, frozen=True):
    """One batch size. In each of `figures` mlx-lm is the first target: `ratios` are Treadle's values over its."""

    size: int
    passes: tuple[BatchRun, ...]
    agreement: tuple[Agreement, ...]
    figures: tuple[FigureRow, ...]

    @property
    def all_equal(self) -> bool:
        return all(round_.equal == round_.rows for round_ in self.agreement)


class EngineResult(msgspec.Struct, frozen=True):
    """A whole run, as its JSON file holds it. `details` are for people: device, versions, BLAS; `compute` is how
    Treadle ran the model."""

    format: int
    started: str
    machine: Machine
    model: str
    dtype: str
    details: dict[str, str]
    prompt: int
    tokens: int
    rounds: int
    seed: int
    batches: tuple[Batch, ...]
    compute: ComputePath | None = None


class RunRecorder:
    """Recorder of a run's tokens and their times."""

    def __init__(self, prompts: int, tokens: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(prompts)]
        self.first_s = 0.0
        self.wall_s = 0.0
        self.prefill_s = 0.0
        self.full_step_s: list[float] = []
        self.full_tokens = 0
        self._max_tokens = tokens

    @property
    def done(self) -> bool:
        return all(len(row) >= self._max_tokens for row in self.rows)

    def step(self, gained: Sequence[tuple[int, int]], took_s: float) -> None:
        """Record one step of `took_s` seconds: (row, token) of each token it gave."""
        waiting = not all(self.rows)
        for row, token in gained:
            self.rows[row].append(token)
        self.wall_s += took_s
        if waiting:
            self.first_s = self.wall_s
        elif len({row for row, _ in gained}) == len(self.rows):
            self.full_step_s.append(took_s)
            self.full_tokens += len(gained)

    def as_run(self, engine: str, round_: int, peak_bytes: int) -> BatchRun:
        return BatchRun(
            engine=engine,
            round=round_,
            wall_s=self.wall_s,
            first_s=self.first_s,
            prefill_s=self.prefill_s,
            full_step_s=tuple(self.full_step_s),
            full_tokens=self.full_tokens,
            peak_bytes=peak_bytes,
        )


def agreement(round_: int, ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Agreement:
    """Compare the tokens of two runs over the same prompts."""
    divergences = [position for a, b in zip(ours, theirs, strict=True) if (position := _divergence(a, b)) is not None]
    return Agreement(round_, len(ours), len(ours) - len(divergences), min(divergences, default=None))


def _divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first position at which they differ; the end of the shorter one counts. None if they are equal."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def batch_of(size: int, prompt: int, tokens: int, passes: Sequence[BatchRun], agreed: Sequence[Agreement]) -> Batch:
    """Compute the figures of one batch size from its runs."""
    rows = (_row(figure, read, size, prompt, tokens, passes) for figure, read in FIGURES)
    return Batch(size, tuple(passes), tuple(agreed), tuple(row for row in rows if row is not None))


Read = Callable[[BatchRun, int, int, int], float | None]
"""Value of a run, given the batch's size, the prompts' length and the tokens that each row generated."""


def _decode_rate(run: BatchRun, size: int, prompt: int, tokens: int) -> float | None:
    return run.full_tokens / sum(run.full_step_s) if run.full_step_s else None


def _prefill_rate(run: BatchRun, size: int, prompt: int, tokens: int) -> float | None:
    """Return prompt tokens a second; the last token of a prompt goes in with a decode step."""
    return size * (prompt - 1) / run.prefill_s if prompt > 1 and run.prefill_s > 0 else None


def _step(percentile: str) -> Read:
    def read(run: BatchRun, size: int, prompt: int, tokens: int) -> float | None:
        steps = percentiles(run.full_step_s)
        return None if steps is None else float(getattr(steps, percentile))

    return read


FIGURES: tuple[tuple[Figure, Read], ...] = (
    (Figure("decode", "tok/s", "higher"), _decode_rate),
    (Figure("step p50", "s", "lower"), _step("p50")),
    (Figure("step p99", "s", "lower"), _step("p99")),
    (Figure("prefill", "tok/s", "higher"), _prefill_rate),
    (Figure("all have begun", "s", "lower"), lambda run, size, prompt, tokens: run.first_s),
    (Figure("whole run", "tok/s", "higher"), lambda run, size, prompt, tokens: size * tokens / run.wall_s),
    (Figure("peak memory", "bytes", "lower"), lambda run, size, prompt, tokens: float(run.peak_bytes)),
)


def _row(
    figure: Figure, read: Read, size: int, prompt: int, tokens: int, passes: Sequence[BatchRun]
) -> FigureRow | None:
    values: dict[str, dict[int, float]] = {THEIRS: {}, OURS: {}}
    for run in passes:
        if (value := read(run, size, prompt, tokens)) is not None:
            values[run.engine][run.round] = value
    return figure_row(figure, (THEIRS, OURS), values) if any(values.values()) else None
