"""Compiled passes of a model's own module: the same numbers, made once for a few numbers of rows."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import mlx.core as mx
import pytest

from tests.runner.backends import Driven, segment
from tests.runner.paged.models import DIM, KV_HEADS, UNFUSED, make, paged
from tests.support.cuda import ReferenceKernel, ReferenceKernels
from treadle.runner.kv.paged.backend import PagedConfig
from treadle.runner.kv.paged.memory import uniform
from treadle.runner.kv.paged.paged_pass import PAGE
from treadle.runner.layers.choose import FasterLayers
from treadle.runner.layers.compiled_module import CompiledModule
from treadle.runner.layers.replace import ReplacedLayers
from treadle.runner.loading.backend_choice import Rejection
from treadle.runner.mlxlm import connect, tap_layers

FAMILIES = ("qwen3_moe", "gemma3", "llama yarn", "llama windowed", "llama biased")


class Traceable(ReferenceKernel):
    """Computes some numbers of all its inputs by MLX, and counts its calls."""

    calls: ClassVar[int] = 0

    def __call__(self, inputs: Any, *_: Any, shapes: Any, dtypes: Any, **__: Any) -> list[Any]:
        Traceable.calls += 1
        of = mx.sin(sum(array.flatten()[:4].astype(mx.float32).mean() for array in inputs))
        return [mx.broadcast_to(of, shape).astype(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


class TraceableKernels(ReferenceKernels):
    kernel = Traceable
    compile = staticmethod(mx.compile)


def rows_of(module: Any, *, compiled: bool, layers: ReplacedLayers | None = None) -> Driven:
    library = connect()
    assert library.route_attention(module)
    windows, selection = library.windows(module), library.selection(module)
    assert windows is not None
    kernels = TraceableKernels(KV_HEADS, DIM, PAGE, mx.float32, rep=2)
    layers = layers or ReplacedLayers(module, {})
    decoder = CompiledModule(module, selection, layers, mx.compile) if compiled else None
    config = PagedConfig(uniform(windows, kernels), selection, False, decoder, compiled=compiled, pages=256)
    return Driven(config, module)


def step(rows: Driven, count: int, start: int, tokens: int = 1) -> Any:
    """Logits of a pass over `count` rows."""
    pieces = [segment(str(i), tuple(range(i + 3, i + 3 + tokens)), start, wants=1) for i in range(count)]
    done = rows.compute(pieces, None)
    mx.eval(done.logits, done.arrays)
    return done.logits


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_module_itself(name: str) -> None:
    both = [rows_of(make(name), compiled=compiled) for compiled in (False, True)]
    for rows in both:
        for i in range(5):
            rows.admit(str(i))
    for count, start, tokens in [(5, 0, 20), (5, 20, 1), (3, 21, 1), (5, 22, 1), (5, 23, 1)]:
        plain, compiled = (step(rows, count, start, tokens) for rows in both)
        assert plain.shape == compiled.shape
        assert mx.allclose(plain, compiled, atol=1e-4, rtol=1e-4).item()


@pytest.mark.parametrize("observed", [False, True])
def test_hidden_states_are_kept_of_compiled_passes_too(observed: bool) -> None:
    """Those behind the last norm, and those that a drafter reads of layers."""
    kept = []
    for compiled in (False, True):
        module, calls = make("qwen3_moe"), []
        rows = rows_of(module, compiled=compiled)
        if observed:
            selection = connect().selection(module)
            assert selection is not None
            tap_layers(module, selection, (0, 1))
        for i in range(3):
            rows.admit(str(i))
        step(rows, 3, 0, 20)
        for start in (20, 21):
            before = Traceable.calls
            pieces = [segment(str(i), (i + 3,), start, wants=1, hidden=1, observed=observed) for i in range(3)]
            done = rows.backend.compute(rows.known(pieces), None, hidden=True)
            mx.eval(done.logits, done.arrays, done.hidden)
            calls.append(Traceable.calls - before)
        assert (calls[1] == 0) is compiled
        kept.append(mx.concatenate([done.hidden[str(i)] for i in range(3)]))
    assert kept[0].shape == (3, 2 * 64 if observed else 64)
    assert mx.allclose(kept[0], kept[1], atol=1e-4, rtol=1e-4).item()


def test_a_pass_is_made_once_for_a_few_numbers_of_rows() -> None:
    rows = rows_of(make("qwen3_moe"), compiled=True)
    for i in range(8):
        rows.admit(str(i))
    made = []
    for start, (count, tokens) in enumerate([(2, 20), (1, 1), (5, 1), (6, 1), (5, 1), (1, 1), (7, 1), (8, 1)]):
        before = Traceable.calls
        step(rows, count, start * 20, tokens)
        made.append(Traceable.calls > before)
    assert made == [True, True, True, False, False, False, True, False]


def test_the_first_pass_is_not_compiled_and_prompts_are_not() -> None:
    """What kinds of attention there are is not known before the first pass."""
    rows = rows_of(make("gemma3"), compiled=True)
    rows.admit("0")
    for start, tokens in [(0, 1), (1, 30), (31, 30)]:
        before = Traceable.calls
        step(rows, 1, start, tokens)
        assert Traceable.calls > before


def reading(module: Any) -> Any:
    """Let the first layer of a module read a number."""
    kind = type(module.model.layers[0])
    own = kind.__call__

    class Reading(kind):  # type: ignore[misc, valid-type]
        def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
            assert x.sum().item() is not None
            return own(self, x, *args, **kwargs)

    Reading.__module__ = kind.__module__
    module.model.layers[0].__class__ = Reading
    return module


def test_a_module_that_reads_numbers_is_not_compiled_any_more(caplog: pytest.LogCaptureFixture) -> None:
    rows, plain = rows_of(reading(make("qwen3_moe")), compiled=True), rows_of(make("qwen3_moe"), compiled=False)
    with caplog.at_level(logging.INFO):
        for one in (rows, plain):
            for i in range(3):
                one.admit(str(i))
            step(one, 3, 0, 20)
        for start in (20, 21):
            assert mx.allclose(step(rows, 3, start), step(plain, 3, start), atol=1e-4, rtol=1e-4).item()
    assert "can't be compiled (ValueError: [eval] Attempting to eval an array" in caplog.text
    assert len(caplog.records) == 1


def test_launches_of_a_traced_pass_follow_none_of_another() -> None:
    module = make("qwen3_moe", dtype=mx.float16)
    layers = FasterLayers(module, "cuda", kernel=Traceable)
    orders = layers._linear
    orders.tools_for(mx.float16)
    (order,) = orders.orders
    first, order.last = order.last, mx.ones(3)
    with layers.traced():
        assert order.last is first
        order.last = mx.ones(3)
    assert order.last is first


def test_a_model_that_is_not_fused_is_compiled() -> None:
    rejected: list[Rejection] = []
    config = paged(make(UNFUSED), rejected=rejected)
    assert (config.fused, config.compiled) == (False, True)
    assert [one.backend for one in rejected] == ["fused layers"]


def test_the_reason_why_one_is_not_compiled_is_reported() -> None:
    rejected: list[Rejection] = []

    class Kernels(ReferenceKernels):
        @staticmethod
        def compile(program: Any) -> Any:
            raise RuntimeError("no compiler today")

    config = paged(make(UNFUSED), kernels=Kernels, rejected=rejected)
    assert (config.compiled, config.decoder) == (False, None)
    assert rejected[-1] == Rejection("compiled passes", "RuntimeError: no compiler today")


def test_padding_of_experts_changes_nobody() -> None:
    """Five rows are padded to six. Their logits are those of each row alone."""
    module = make("qwen3_moe")
    rows = Driven(paged(module), module)
    prompts = [tuple(range(i + 1, i + 9 + 3 * i)) for i in range(5)]
    for i, prompt in enumerate(prompts):
        rows.admit(str(i))
        rows.compute([segment(str(i), prompt[:-1], 0)], None)
    done = rows.compute(
        [segment(str(i), prompt[-1:], len(prompt) - 1, wants=1) for i, prompt in enumerate(prompts)], None
    )
    assert done.logits is not None
    for i, prompt in enumerate(prompts):
        expected = make("qwen3_moe")(mx.array([prompt]))[0, -1]
        assert mx.allclose(done.logits[i], expected, atol=2e-3, rtol=1e-3).item()
