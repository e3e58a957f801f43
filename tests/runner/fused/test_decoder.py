"""Decoders with their kernels fused give the module's own logits, or say why they can't."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from msgspec.structs import replace as replaced

from tests.runner.backends import Driven, segment
from tests.runner.looped import Looped
from tests.runner.paged.models import DIM, KV_HEADS, PAGE, PAGE_BYTES, UNFUSED, VOCABULARY, loaded, make, paged
from tests.runner.reference import reference
from tests.support.cuda import ReferenceKernel, ReferenceKernels
from treadle.core.compute_path import KernelName, KernelState
from treadle.core.image import VisionCapabilities
from treadle.core.messages import Submit
from treadle.runner.forward.batch_buckets import PROMPT_SIZES
from treadle.runner.forward.compiled import CompiledPasses
from treadle.runner.forward.segments import Features
from treadle.runner.fused import merged_linear
from treadle.runner.fused.decoder import FusedDecoder
from treadle.runner.kv.paged import tiling
from treadle.runner.kv.paged.backend import PagedConfig
from treadle.runner.kv.paged.memory import uniform
from treadle.runner.mlxlm import Selection, connect
from treadle.runner.mlxvlm import LazyImage, Picture
from treadle.runner.mlxvlm.encoded import Walk
from treadle.runner.model_runner import ModelRunner
from treadle.runner.vision.model import Vision

PLAIN = ["llama", "llama3", "llama scaled", "llama tied", "llama biased", "llama windowed", "qwen2", "qwen3"]
PROMPTS = [tuple((7 * i + j * j) % 256 for j in range(n)) for i, n in enumerate((1, 3, 40, 90))]


def decoder(module: Any, dtype: Any = mx.float32) -> FusedDecoder:
    return FusedDecoder(module, [ReferenceKernels(KV_HEADS, DIM, PAGE, dtype, rep=2)] * 2, Selection())


def logits(module: Any, config: PagedConfig, prompt: tuple[int, ...], pieces: int) -> Any:
    """Of all tokens of a prompt, computed in so many passes."""
    rows = Driven(config, module)
    rows.admit("a")
    found: list[Any] = []
    size = -(-len(prompt) // pieces)
    for start in range(0, len(prompt), size):
        tokens = prompt[start : start + size]
        found.append(rows.compute([segment("a", tokens, start, wants=len(tokens))], None).logits)
    return mx.concatenate(found)


@pytest.mark.parametrize("name", PLAIN)
def test_the_logits_are_the_modules_own(name: str) -> None:
    """Norms, biases, kinds of positions, windows, tied heads; tokens by the kernel for few and by that for many."""
    module = make(name)
    config = paged(module)
    assert config.fused
    wanted = make(name)
    for prompt in PROMPTS:
        expected = wanted(mx.array([prompt]), cache=connect().new_caches(wanted))[0]
        for pieces in (1, 5):
            assert mx.allclose(logits(module, config, prompt, pieces), expected, atol=2e-3, rtol=1e-3).item()


@pytest.mark.parametrize("name", PLAIN)
def test_rows_decode_what_they_decode_alone(name: str) -> None:
    """Through the program that is compiled for rows that decode."""
    module = make(name)
    model = loaded(module, paged(module))
    loop = Looped(ModelRunner(model), prefill_tokens=512)
    some = [Submit(id=str(i), prompt=prompt, max_tokens=12, max_wait_s=1e9) for i, prompt in enumerate(PROMPTS)]
    assert loop.run(*some) == {request.id: reference(model, request) for request in some}


@pytest.mark.parametrize("name", ["llama", "qwen3", UNFUSED])
def test_keys_and_values_of_8_bits_change_little(name: str) -> None:
    """Fused layers put them there, others' own too; tokens by the kernel for few and by that for many."""
    module, wanted = make(name), make(name)
    config = paged(module, bits=8)
    assert config.fused == (name != UNFUSED)
    assert sum(layer.kernels.page_bytes for layer in config.layers) == PAGE_BYTES * (DIM + 4) // (4 * DIM)
    for prompt in PROMPTS[1:]:
        expected = wanted(mx.array([prompt]), cache=connect().new_caches(wanted))[0]
        for pieces in (1, 5):
            off: Any = mx.abs(logits(module, config, prompt, pieces) - expected)
            assert 0 < float(off.mean()) < 0.05 * float(expected.std())


def test_what_is_reused_of_8_bits_is_what_was_kept() -> None:
    """Pages that are shared, and one that is copied: the second time rows say what they said."""
    model = loaded(make("llama"), paged(make("llama"), bits=8))
    loop = Looped(ModelRunner(model), prefill_tokens=512)
    some = [Submit(id=str(i), prompt=prompt, max_tokens=12, max_wait_s=1e9) for i, prompt in enumerate(PROMPTS)]
    assert loop.run(*some) == loop.run(*some)
    assert loop.runner.statistics().prefix.copied_bytes > 0


@pytest.mark.parametrize(("name", "bits"), [("qwen2", 8), ("llama", 4)])
def test_quantized_layers_are_fused_too(name: str, bits: int) -> None:
    """In half precision, with products of few rows by the kernel for them."""
    module = make(name, dtype=mx.float16, hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    nn.quantize(module, group_size=64, bits=bits)
    expected = [module(mx.array([prompt]))[0].astype(mx.float32) for prompt in PROMPTS[:3]]
    mx.eval(expected)
    config = paged(module, pages=64)
    assert config.fused
    for prompt, wanted in zip(PROMPTS[:3], expected, strict=True):
        found = logits(module, config, prompt, 1).astype(mx.float32)
        assert (mx.abs(found - wanted).mean() < 0.02 * wanted.std()).item()


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_the_module_works_as_before_and_nothing_is_held_twice(bits: int) -> None:
    """Its layers' weights are parts of the joined ones, not copies."""
    module = make("qwen2", intermediate_size=4096)
    if bits:
        nn.quantize(module, group_size=64, bits=bits)
        mx.eval(module.parameters())
    tokens = mx.array([PROMPTS[2]])
    before = module(tokens)
    mx.eval(before)
    mx.clear_cache()
    held = mx.get_active_memory()
    fused = decoder(module)
    assert fused is not None
    mx.clear_cache()
    assert mx.get_active_memory() - held < 200_000
    assert mx.array_equal(module(tokens), before).item()


def test_weights_that_change_in_the_module_change_in_the_decoder() -> None:
    """They are the same memory."""
    module = make("llama")
    fused = decoder(module)
    mlp: Any = fused._steps[1].branch
    gate_up = mlp.inputs.products[0].weight
    up = module.model.layers[0].mlp.up_proj.weight
    np.array(up, copy=False)[:] = 5.0
    assert (gate_up[up.shape[0] :] == 5.0).all().item()


def test_a_long_position_turns_as_far_as_the_modules_own() -> None:
    module = make("llama3")
    fused = decoder(module)
    attention: Any = fused._steps[0].branch
    rotary = attention.rotary
    assert rotary is not None
    cos_sin = 30_000 * rotary.inv_freq
    pair = mx.concatenate([mx.ones(DIM // 2), mx.zeros(DIM // 2)])
    turned = module.model.layers[0].self_attn.rope(pair[None, None, None], offset=30_000).flatten()
    assert mx.allclose(turned[: DIM // 2], mx.cos(cos_sin), atol=2e-2).item()
    assert mx.allclose(turned[DIM // 2 :], mx.sin(cos_sin), atol=2e-2).item()


def test_other_decoders_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"no fused decoder for mlx_lm\.models\.gpt_neox"):
        decoder(make(UNFUSED))


@pytest.mark.parametrize("dim", [80, 96])
@pytest.mark.parametrize("changed", [{}, {"rope_traditional": True}])
def test_heads_that_are_no_multiple_of_64_are_fused_too(dim: int, changed: dict[str, Any]) -> None:
    """Phi's."""
    module = make("llama", head_dim=dim, **changed)
    config = paged(module)
    assert config.fused
    prompt = PROMPTS[-1]
    expected = make("llama", head_dim=dim, **changed)(mx.array([prompt]))[0]
    for pieces in (1, 5):
        assert mx.allclose(logits(module, config, prompt, pieces), expected, atol=2e-3, rtol=1e-3).item()


def test_a_head_behind_an_unknown_norm_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="last norm"):
        FusedDecoder(make("llama"), [ReferenceKernels(KV_HEADS, DIM, PAGE, mx.float32, rep=2)] * 2, None)


class Adapted(nn.Linear):
    """A linear layer as adapters replace them."""


def test_an_mlp_with_a_replaced_layer_stays_the_modules_own() -> None:
    module = make("llama")
    module.model.layers[1].mlp.up_proj = Adapted(64, 128, bias=False)
    expected = module(mx.array([PROMPTS[2]]))[0]
    config = paged(module)
    assert config.decoder is not None
    assert config.decoder.own_modules == [module.model.layers[1].mlp]
    assert mx.allclose(logits(module, config, PROMPTS[2], 1), expected, atol=2e-3, rtol=1e-3).item()


@pytest.mark.parametrize(
    ("name", "states"), [("qwen3_moe", {KernelState.ACTIVE}), ("qwen3", {KernelState.NOT_APPLICABLE})]
)
def test_experts_do_not_count_where_the_host_is_slower_than_the_device(
    name: str, states: set[KernelState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture's other products are small, however many experts there are."""
    for name_of in ("LIGHT", "LIGHT_FOR_FEW"):
        monkeypatch.setattr(merged_linear, name_of, 700_000)
    wide = {"moe_intermediate_size": 256} if name == "qwen3_moe" else {"intermediate_size": 1024}
    module = make(name, dtype=mx.float16, hidden_size=256, **wide)
    found = {status.name: status.state for status in decoder(module, mx.float16).product_kernels}
    assert {found[KernelName.SKINNY_GEMM], found[KernelName.SMALL_GEMM]} == states


def test_layers_without_a_known_part_stay_the_modules_own_between_norms() -> None:
    module = make("llama")
    for layer in module.model.layers:
        layer.self_attn.q_proj = Adapted(64, 256, bias=False)
        layer.mlp.up_proj = Adapted(64, 128, bias=False)
    assert decoder(module).own_parts == "2 Attention, 2 MLP"


class Lazy(ReferenceKernel):
    """Computes nothing, as lazily as the real kernels: made to be traced."""

    calls = 0

    def __call__(self, inputs: Any, *_: Any, shapes: Any, dtypes: Any, **__: Any) -> list[Any]:
        Lazy.calls += 1
        of = sum(array.flatten()[0].astype(mx.float32) for array in inputs)
        return [mx.broadcast_to(of, shape).astype(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


class LazyKernels(ReferenceKernels):
    kernel = Lazy
    compile = staticmethod(mx.compile)


def lazy_config(module: Any, pages: int) -> PagedConfig:
    kernels, selection = LazyKernels(KV_HEADS, DIM, PAGE, mx.float32, rep=2), Selection()
    return PagedConfig(
        uniform([0, 0], kernels), selection, False, FusedDecoder(module, [kernels] * 2, selection), pages=pages
    )


def lazy_rows() -> Driven:
    """Rows whose passes are traced, and compute nothing of use."""
    return Driven(lazy_config(make("llama"), 512))


def launches(rows: Driven, *pieces: tuple[int, int, int]) -> int:
    """Kernels that are called for a pass of rows, each of so many tokens from so many on, with so many wanted."""
    before = Lazy.calls
    for i in range(len(pieces)):
        rows.admit(str(i))
    done = rows.compute(
        [segment(str(i), (5,) * n, start, wants=wants) for i, (n, start, wants) in enumerate(pieces)], None
    )
    mx.eval(done.arrays if done.logits is None else done.logits)
    for i in range(len(pieces)):
        rows.release(str(i))
    wanted = sum(wants for _, _, wants in pieces)
    assert (0 if done.logits is None else done.logits.shape[0]) == wanted
    return Lazy.calls - before


def test_a_pass_of_rows_that_decode_is_put_together_once_for_a_few_numbers_of_rows() -> None:
    """Nothing in it has to be known before it runs."""
    rows = lazy_rows()
    calls = [launches(rows, *[(1, step, 1)] * count) for step, count in enumerate((1, 5, 6, 5, 1, 7, 8))]
    assert [i for i, some in enumerate(calls) if some] == [0, 1, 5]


def test_what_is_usual_is_compiled_at_the_start() -> None:
    """Rows that decode, prompts alone, and both; and what a cached prefix leaves of a prompt."""
    module = make("llama")
    runner = ModelRunner(replace(loaded(module, lazy_config(module, 256)), context=1024))
    assert runner.capabilities().steps.chunk_sizes == PROMPT_SIZES
    runner.warm_up()
    rows = Driven(runner=runner)
    for pieces in (
        [(1, 620, 1)] * 7,
        [(1, 5, 1), *[(1, 300, 1)] * 15],
        [(90, 0, 1)],
        [(1, 40, 1), (300, 0, 0)],
        [*[(1, 300, 1)] * 16, (64, 32, 1), (50, 0, 1)],
        *[[*[(1, 300, 1)] * decoding, (left, 620, 1)] for decoding in (0, 1, 3, 8) for left in (2, 3, 5, 8)],
    ):
        assert launches(rows, *pieces) == 0


class BareTower:
    """A tower of two layers, whose features are zeros."""

    layers = 2

    def count(self, shape: Any, grid: Any) -> int:
        return 48

    def image(self, pixels: Any, grid: Any, table: Any) -> LazyImage:
        return LazyImage(self._walk(), lambda features: features)

    def _walk(self) -> Walk:
        rows = mx.zeros((48, 64))
        yield mx.zeros(1), rows
        yield (mx.zeros(1),)
        return rows


@pytest.mark.parametrize("whole", [False, True])
def test_passes_with_images_are_compiled_at_the_start(whole: bool) -> None:
    """A part of an image, or all of it, with positions of three axes, or tokens that see each other; alone, and beside
    rows that decode."""
    module = make("qwen3", rope_scaling={"type": "default", "mrope_section": [12, 11, 9], "mrope_interleaved": True})
    vision = Vision(
        BareTower(), 7, VisionCapabilities(layers=3, whole=whole), 1 << 20, 0 if whole else 1, usual=(Picture((1, 1)),)
    )
    if not whole:
        vision = replace(vision, usual=(Picture((1, 1), ((1, 6, 8),)),))
    runner = ModelRunner(replace(loaded(module, lazy_config(module, 256)), context=300, vision=vision))
    runner.warm_up()
    rows = Driven(runner=runner)
    features = Features(np.arange(4, 52, dtype=np.int32), mx.zeros((48, 64)), [mx.zeros((48, 64))])
    for count, decoding in ((90, 0), (60, 3), (200, 7)):
        places = np.arange(count, dtype=np.int32)
        seen = np.where((places >= 4) & (places < 52), 51, places)
        axes = np.repeat(places[:, None], 3, axis=1) // [1, 2, 3]
        columns = {"last_visible": seen} if whole else {"positions": axes.astype(np.int32)}
        before = Lazy.calls
        for i in range(1 + decoding):
            rows.admit(str(i))
        pieces = [segment(str(i), (5,), 200, wants=1) for i in range(1, 1 + decoding)]
        pieces.append(replaced(segment("0", (7,) * count, 0), features=features, **columns))
        mx.eval(rows.compute(pieces, None).arrays)
        for i in range(1 + decoding):
            rows.release(str(i))
        assert Lazy.calls == before, (count, decoding)


MIXED = ((1, 700, 1), (1, 90, 1), (130, 0, 1))
ALIKE = {
    "further on": ((1, 703, 1), (1, 65, 1), (130, 30, 1)),
    "longer": ((1, 700, 1), (1, 90, 1), (160, 0, 1)),
    "nothing wanted of the prompt": ((1, 700, 1), (1, 90, 1), (130, 0, 0)),
    "one more row that decodes": ((1, 700, 1), (1, 90, 1), (1, 90, 1), (129, 0, 1)),
    "rows of more tokens": ((1, 700, 1), (2, 90, 1), (129, 0, 1)),
    "a prompt in parts": ((1, 700, 1), (1, 90, 1), (130, 6000, 1)),
}
OTHERS = {
    "much longer": ((1, 700, 1), (1, 90, 1), (193, 0, 1)),
    "more rows that decode": (*[(1, 90, 1)] * 5, (129, 0, 1)),
    "all wanted of the prompt": ((1, 700, 1), (1, 90, 1), (130, 0, 130)),
    "of more tokens in tiles of more rows": ((1, 700, 1), (6, 90, 1), (125, 0, 1)),
    "a prompt alone": ((132, 0, 3),),
    "two prompts": ((66, 0, 1), (66, 0, 2)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_pass_with_prompts_is_put_together_once_for_those_alike(name: str) -> None:
    rows = lazy_rows()
    assert launches(rows, *MIXED) > 0
    assert launches(rows, *ALIKE[name]) == 0


@pytest.mark.parametrize("name", OTHERS)
def test_a_pass_with_prompts_is_another_program_where_anything_constant_differs(name: str) -> None:
    rows = lazy_rows()
    launches(rows, *MIXED)
    assert launches(rows, *OTHERS[name]) > 0
    assert launches(rows, *MIXED) == 0


def test_a_prompt_in_many_parts_is_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "_BLOCKS", 2)
    rows = lazy_rows()
    launches(rows, *MIXED)
    assert launches(rows, *ALIKE["a prompt in parts"]) > 0


def test_keys_and_values_of_8_bits_are_not_compiled_beside_prompts() -> None:
    """What they are made plain in grows from pass to pass; so nothing is filled up there."""
    rows = Driven(paged(make("llama"), bits=8))
    backend = rows.backend
    assert backend.chunk_sizes == ()
    rows.admit("a")
    some = [segment("a", (5,) * count, 0) for count in (1, 1, 40)]
    assert backend.order(some) == some
    assert [len(piece.tokens) for piece in backend.order([some[0]] * 5)] == [1] * 6
    for start in (0, 40, 80):
        rows.compute([segment("a", (5,) * 40, start, wants=1)], None)
    (first, *_) = backend.layers
    assert len(first.step.compiled) == 0


class Anew(CompiledPasses):
    """Keeps nothing."""

    def get(self, shapes: Hashable, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        return make()


@pytest.mark.parametrize(("name", "seed"), [("llama", 0), ("llama windowed", 1), ("llama", 2)])
def test_passes_compute_the_same_in_sizes_and_from_a_program(name: str, seed: int) -> None:
    """Logits, keys and values, over random mixes; a program's constants were another pass's."""
    dice, module = random.Random(seed), make(name)
    config = paged(module)
    both = [Driven(config), Driven(config)]
    both[0].backend.in_buckets = False
    both[0].backend.layers[0].step.compiled = Anew()
    held: dict[str, int] = {}
    for _ in range(40):
        for id_ in [id_ for id_ in held if held[id_] > 150 or dice.random() < 0.1]:
            del held[id_]
            for rows in both:
                rows.release(id_)
        pieces = []
        for id_ in dice.sample("abc", dice.randint(1, 3)):
            start, count = held.setdefault(id_, 0), dice.choice((1, 1, 3, dice.randint(9, 40)))
            tokens = tuple(dice.randrange(VOCABULARY) for _ in range(count))
            pieces.append(segment(id_, tokens, start, wants=dice.choice((0, 1)) if count > 1 else 1))
            held[id_] += count
        for rows in both:
            for id_ in held:
                rows.admit(id_)
        plain, compiled = (rows.compute(pieces) for rows in both)
        mx.eval([done.arrays for done in (plain, compiled)])
        assert plain.places == compiled.places
        assert (plain.logits is None) == (compiled.logits is None)
        if plain.logits is not None and compiled.logits is not None:
            assert mx.allclose(plain.logits, compiled.logits, atol=1e-5).item()
        for one, other in zip(*(rows.backend.layers for rows in both), strict=True):
            assert mx.allclose(one.pool.data, other.pool.data, atol=1e-5).item()
    assert 0 < len(both[1].backend.layers[0].step.compiled) < 20
