"""Self-tests of mlx-lm's batch caches with a model: batches of sequences, and prompts that share a padded pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from .. import mlxlm
from ..device.owner_thread import mlx_runtime
from ..device.self_test import FAULTS
from ..kv.padded.prefill import MAX_PADDED, MAX_SHARED_TOKENS, together
from ..mlxlm import Caches, MlxLm
from .reference import TRIALS, Found, Reference, Trial

_EXACT_PADDING = 32
"""Padding of a shared pass in its test where the model computes in float32; more beyond short windows."""
_LEAST_ROWS = 4
_DECODE = 2
"""The first of a trial's places that is decoded."""


def reason_not_batched(reference: Reference) -> str:
    """Return the reason why sequences can't share a pass; empty if they can: two decode together, others join."""
    library, trials = reference.library, reference.trials()
    if reason := reason_not_merged(library, library.new_caches(reference.module)):
        return reason
    try:
        with mlx_runtime("testing a batch"):
            rows = [*trials, *TRIALS][: max(_LEAST_ROWS, len(trials))]
            return reference.judge(rows, partial(_batched, reference))
    except FAULTS as error:
        return f"a batch of sequences failed ({type(error).__name__}: {error})"


def reason_not_merged(library: MlxLm, caches: Caches) -> str:
    """Return the reason why a model's caches can't be those of several sequences; empty if they can."""
    if library.can_merge(caches):
        return ""
    return f"its caches can't be merged ({', '.join(sorted({type(cache).__name__ for cache in caches}))})"


def _batched(reference: Reference, trials: Sequence[Trial]) -> list[Found]:
    """All but the first two trials join after two tokens; then the first leaves, and the order changes."""
    rows = [_prefilled(reference, trial) for trial in trials]
    parts: list[list[Any]] = [[] for _ in trials]
    batch, order = mlxlm.merge(rows[:2]), [0, 1]
    half = len(trials[0].continuation) // 2
    for step in range(len(trials[0].continuation)):
        if step == half:
            mlxlm.extend(batch, mlxlm.merge(rows[2:]))
            order = [*range(len(trials))[:0:-1]]
            mlxlm.keep_rows(batch, order)
        at = [step if row < 2 else step - half for row in order]
        tokens = [trials[row].continuation[place] for row, place in zip(order, at, strict=True)]
        logits = _decode(reference.module, tokens, batch)
        for row, part in zip(order, logits, strict=True):
            parts[row].append(part)
    mx.eval(mlxlm.states(mlxlm.extract(batch, 0)))
    return [Found(trial, mx.stack(part), _DECODE) for trial, part in zip(trials, parts, strict=True)]


def shares_prefill(reference: Reference, pad_to: int = 1) -> bool:
    """Whether prompts that share a padded pass go on as prompts alone do: with as much padding as can really occur
    beyond a window, and each chunk once the longer and once the shorter one."""
    long = min(MAX_SHARED_TOKENS, max(_padding(reference), *_short_windows(reference)) * MAX_PADDED)
    lengths = (long, long // MAX_PADDED)
    trials = [_two_chunks(first, second, seed) for seed, (first, second) in enumerate((lengths, lengths[::-1]))]
    try:
        with mlx_runtime("testing a shared pass"):
            return not reference.judge(trials, partial(_sharing_passes, reference, pad_to))
    except FAULTS:
        return False


def _sharing_passes(reference: Reference, pad_to: int, trials: Sequence[Trial]) -> list[Found]:
    """Both chunks of all trials' prompts in padded passes; each trial goes on alone."""
    rows = [reference.library.new_caches(reference.module) for _ in trials]
    for chunk in range(2):
        chunks = [(trial.prompt[: trial.split], trial.prompt[trial.split :])[chunk] for trial in trials]
        rows = together(reference.module, chunks, rows, pad_to=pad_to)
    return [_continued(reference, *pair) for pair in zip(trials, rows, strict=True)]


def _padding(reference: Reference) -> int:
    """Less where float32 shows each wrong token."""
    return _EXACT_PADDING if reference.exact else MAX_SHARED_TOKENS // MAX_PADDED // 2


def _short_windows(reference: Reference) -> list[int]:
    """Windows that the padding of a shared pass can exceed, with a token to spare."""
    windows = reference.library.windows_of_caches(reference.module)
    return [0, *(window + 1 for window in windows if window < MAX_SHARED_TOKENS // MAX_PADDED)]


def _two_chunks(first: int, second: int, seed: int) -> Trial:
    tokens = tuple(1 + (7 * i + 3 * i * i + seed) % 37 for i in range(first + second))
    return Trial(tokens, first, (11, 5, 23, 8))


def _prefilled(reference: Reference, trial: Trial) -> Caches:
    caches = reference.caches(trial)
    reference.module(mx.array([trial.prompt], mx.int32), cache=caches)
    mx.eval(mlxlm.states(caches))
    return caches


def _continued(reference: Reference, trial: Trial, caches: Caches) -> Found:
    logits = mx.concatenate([_decode(reference.module, [token], caches) for token in trial.continuation])
    return Found(trial, logits, _DECODE)


def _decode(module: Any, tokens: Sequence[int], caches: Caches) -> Any:
    logits = module(mx.array(list(tokens), mx.int32)[:, None], cache=caches)[:, -1, :]
    mx.eval(logits, mlxlm.states(caches))
    return logits
