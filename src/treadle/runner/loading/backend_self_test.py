"""Self-test of a KV backend: a few sequences of a model through it, compared with each alone in mlx-lm's caches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..base import RunnerBroken
from ..device.guard import mlx_runtime
from ..forward.segments import KvSequence, RowSegment
from ..kv.backend import KvBackend, KvConfig, Unsupported
from ..kv.paged.backend import PAGE, PagedBackend
from ..mlxlm import MlxLm

TOLERANCE = 0.25
"""Mean difference over the logits' spread: half precision stays far below, a wrong position goes far above."""

FAULTS = (ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, RunnerBroken)
"""Errors of a model's code that is used in another way than its author thought of, or of a kernel's compiler."""
_PROMPTS = (tuple(range(1, 38)), (8, 9), (10, 11, 12, 13))
_SPLITS = (19, 1, 2)
_NEXT = (14, 15, 16)
SELF_TEST_PAGES = sum(-(-(len(prompt) + 1) // PAGE) for prompt in _PROMPTS)


class SelfTestFailed(Unsupported):
    """A KV backend that should serve the model gave wrong results, or a fault, on this machine."""


def self_test(library: MlxLm, module: Any, config: KvConfig) -> None:
    """Compute a few sequences, in pieces and together, in the backend of `config`. Raises SelfTestFailed where it
    failed, or gave other logits than mlx-lm's caches."""
    live: dict[str, KvSequence] = {}
    backend: KvBackend | None = None
    try:
        with mlx_runtime("trying the model"):
            backend = config.build(module, live, time.monotonic)
            alone = [_alone(library, module, *row) for row in zip(_PROMPTS, _SPLITS, _NEXT, strict=True)]
            together = _together(backend, live)
            mx.eval(alone, together)
            copies_pages = not isinstance(backend, PagedBackend) or backend.copies_pages()
    except FAULTS as error:
        raise SelfTestFailed(f"rows in one pass failed ({type(error).__name__}: {error})") from error
    finally:
        if backend is not None:
            backend.close()
    if not copies_pages:
        raise SelfTestFailed("a page's copy is another one")
    for expected, found in zip(alone, together, strict=True):
        _compare(expected.astype(mx.float32), found.astype(mx.float32))


def _compare(expected: Any, found: Any) -> None:
    if expected.shape != found.shape:
        raise SelfTestFailed(f"rows in one pass gave logits {found.shape} and not {expected.shape}")
    if not (mx.mean(mx.abs(found - expected)) <= TOLERANCE * mx.std(expected)).item():
        raise SelfTestFailed("rows gave other logits in one pass than alone")


def _alone(library: MlxLm, module: Any, prompt: Sequence[int], split: int, token: int) -> Any:
    """Logits (3, V) after the first `split` tokens of a prompt, after all of it and after one more token."""
    caches = library.new_caches(module)
    first = module(mx.array([prompt], mx.int32), cache=caches)[0]
    second = module(mx.array([[token]], mx.int32), cache=caches)[0]
    return mx.concatenate([first[split - 1 : split], first[-1:], second])


def _together(backend: KvBackend, live: dict[str, KvSequence]) -> list[Any]:
    """The same of all prompts: each in two pieces, beside the others', then one more token of all."""
    live |= {str(i): KvSequence(str(i), "", prompt) for i, prompt in enumerate(_PROMPTS)}
    whole = [(live[str(i)], *row) for i, row in enumerate(zip(_PROMPTS, _SPLITS, _NEXT, strict=True))]
    steps = [
        [RowSegment(sequence, prompt[:split], 0, wants=1) for sequence, prompt, split, _ in whole],
        [RowSegment(sequence, prompt[split:], split, wants=1) for sequence, prompt, split, _ in whole],
        [RowSegment(sequence, (token,), len(prompt), wants=1) for sequence, prompt, _, token in whole],
    ]
    found: list[list[Any]] = [[] for _ in whole]
    for sequence in live.values():
        backend.admit(sequence)
    for segments in steps:
        done = backend.compute(segments, None)
        assert done.logits is not None
        mx.eval(done.logits, done.arrays)
        for id_, (first, _) in done.places.items():
            found[int(id_)].append(done.logits[first : first + 1])
    return [mx.concatenate(parts) for parts in found]
