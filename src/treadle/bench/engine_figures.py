"""What `treadle bench engine` saw, and its figures: plain values, no engine behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from .measures import spread
from .ratios import Figure, Row, row_of
from .samples import Machine

FORMAT = 1
OURS, THEIRS = "treadle", "mlx-lm"


class Pass(msgspec.Struct, frozen=True):
    """One engine's way with one batch, all of whose prompts came at once.

    `wall_s` is the whole of it, `first_s` until every row had its first token; rows that had theirs decode meanwhile.
    `prefill_s` is what reading prompts took, as each engine counts it. `full_step_s` are the steps after `first_s` in
    which every row gained a token, `full_tokens` in all: what decoding costs with the batch full, and nothing to read
    beside it.
    `peak_bytes` is the most that MLX held meanwhile, weights included.
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
    """Whether both engines gave the same tokens: `equal` of `rows` rows did, and the others parted at the earliest at
    position `first_divergence` (0 is the first generated token)."""

    round: int
    rows: int
    equal: int
    first_divergence: int | None = None


class Batch(msgspec.Struct, frozen=True):
    """One batch size. In each of `figures` mlx-lm is the first target: `ratios` are Treadle's values over its."""

    size: int
    passes: tuple[Pass, ...]
    agreement: tuple[Agreement, ...]
    figures: tuple[Row, ...]

    @property
    def all_equal(self) -> bool:
        return all(round_.equal == round_.rows for round_ in self.agreement)


class EngineResult(msgspec.Struct, frozen=True):
    """A whole run: what its JSON file holds. `details` are for people: device, versions, which BLAS answered."""

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


class Record:
    """Takes down the tokens of a pass as they come, and when."""

    def __init__(self, prompts: int, tokens: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(prompts)]
        self.first_s = 0.0
        self.wall_s = 0.0
        self.prefill_s = 0.0
        self.full_step_s: list[float] = []
        self.full_tokens = 0
        self._wanted = tokens

    @property
    def done(self) -> bool:
        return all(len(row) >= self._wanted for row in self.rows)

    def step(self, gained: Sequence[tuple[int, int]], took_s: float) -> None:
        """One step is over: (row, token) of each token it gave."""
        waiting = not all(self.rows)
        for row, token in gained:
            self.rows[row].append(token)
        self.wall_s += took_s
        if waiting:
            self.first_s = self.wall_s
        elif len({row for row, _ in gained}) == len(self.rows):
            self.full_step_s.append(took_s)
            self.full_tokens += len(gained)

    def as_pass(self, engine: str, round_: int, peak_bytes: int) -> Pass:
        return Pass(
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
    """Compare the tokens of two passes over the same prompts."""
    parted = [place for a, b in zip(ours, theirs, strict=True) if (place := _divergence(a, b)) is not None]
    return Agreement(round_, len(ours), len(ours) - len(parted), min(parted, default=None))


def _divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position at which they differ, one of them having ended included."""
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def batch_of(size: int, prompt: int, tokens: int, passes: Sequence[Pass], agreed: Sequence[Agreement]) -> Batch:
    """The figures of one batch size from its passes."""
    rows = (_row(figure, read, size, prompt, tokens, passes) for figure, read in FIGURES)
    return Batch(size, tuple(passes), tuple(agreed), tuple(row for row in rows if row is not None))


Read = Callable[[Pass, int, int, int], float | None]
"""A pass's value, given the batch's size, the prompts' length and how many tokens each row generated."""


def _decode_rate(seen: Pass, size: int, prompt: int, tokens: int) -> float | None:
    return seen.full_tokens / sum(seen.full_step_s) if seen.full_step_s else None


def _prefill_rate(seen: Pass, size: int, prompt: int, tokens: int) -> float | None:
    """The last token of a prompt goes in with a decode step."""
    return size * (prompt - 1) / seen.prefill_s if prompt > 1 and seen.prefill_s > 0 else None


def _step(which: str) -> Read:
    def read(seen: Pass, size: int, prompt: int, tokens: int) -> float | None:
        steps = spread(seen.full_step_s)
        return None if steps is None else float(getattr(steps, which))

    return read


FIGURES: tuple[tuple[Figure, Read], ...] = (
    (Figure("decode", "tok/s", "higher"), _decode_rate),
    (Figure("step p50", "s", "lower"), _step("p50")),
    (Figure("step p99", "s", "lower"), _step("p99")),
    (Figure("prefill", "tok/s", "higher"), _prefill_rate),
    (Figure("all have begun", "s", "lower"), lambda seen, size, prompt, tokens: seen.first_s),
    (Figure("whole run", "tok/s", "higher"), lambda seen, size, prompt, tokens: size * tokens / seen.wall_s),
    (Figure("peak memory", "bytes", "lower"), lambda seen, size, prompt, tokens: float(seen.peak_bytes)),
)


def _row(figure: Figure, read: Read, size: int, prompt: int, tokens: int, passes: Sequence[Pass]) -> Row | None:
    values: dict[str, dict[int, float]] = {THEIRS: {}, OURS: {}}
    for seen in passes:
        if (value := read(seen, size, prompt, tokens)) is not None:
            values[seen.engine][seen.round] = value
    return row_of(figure, (THEIRS, OURS), values) if any(values.values()) else None
