"""Decoders with their kernels fused give the module's own logits, or say why they can't."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.runner.looped import Looped
from tests.runner.paged.models import DIM, KV_HEADS, PAGE, PAGE_BYTES, VOCABULARY, loaded, make, own_of
from tests.runner.reference import reference
from tests.support.cuda import ReferenceKernel, ReferenceKernels
from treadle.core.messages import Submit
from treadle.runner.body import FlatRows
from treadle.runner.flat import FlatPass, Piece
from treadle.runner.fused.decoder import FusedDecoder
from treadle.runner.mlxlm import Selection, connect
from treadle.runner.own import Own
from treadle.runner.paged.layout import PagedLayout
from treadle.runner.text import TextRunner

PLAIN = ["llama", "llama3", "llama scaled", "llama tied", "llama biased", "llama windowed", "qwen2", "qwen3"]
PROMPTS = [tuple((7 * i + j * j) % 256 for j in range(n)) for i, n in enumerate((1, 3, 40, 90))]


def decoder(module: Any, dtype: Any = mx.float32) -> FusedDecoder:
    return FusedDecoder(module, ReferenceKernels(KV_HEADS, DIM, PAGE, dtype, rep=2), Selection())


def logits(module: Any, own: Own, prompt: tuple[int, ...], pieces: int) -> Any:
    """Of all tokens of a prompt, computed in so many passes."""
    rows = own.new_rows(module)
    rows.admit("a", "")
    found, size = [], -(-len(prompt) // pieces)
    for start in range(0, len(prompt), size):
        tokens = prompt[start : start + size]
        found.append(rows.compute([Piece("a", tokens, start, wants=len(tokens))], None).logits)
    return mx.concatenate(found)


@pytest.mark.parametrize("name", PLAIN)
def test_the_logits_are_the_modules_own(name: str) -> None:
    """Norms, biases, kinds of positions, windows, tied heads; tokens by the kernel for few and by that for many."""
    module = make(name)
    own = own_of(module)
    assert isinstance(own, Own), own
    assert own.decoder is not None
    wanted = make(name)
    for prompt in PROMPTS:
        expected = wanted(mx.array([prompt]), cache=connect().new_caches(wanted))[0]
        for pieces in (1, 5):
            assert mx.allclose(logits(module, own, prompt, pieces), expected, atol=2e-3, rtol=1e-3).item()


@pytest.mark.parametrize("name", PLAIN)
def test_rows_decode_what_they_decode_alone(name: str) -> None:
    """Through the program that is compiled for rows that decode."""
    module = make(name)
    model = loaded(module, own_of(module))
    loop = Looped(TextRunner(model), prefill_tokens=512)
    some = [Submit(id=str(i), prompt=prompt, max_tokens=12, max_wait_s=1e9) for i, prompt in enumerate(PROMPTS)]
    assert loop.run(*some) == {request.id: reference(model, request) for request in some}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_keys_and_values_of_8_bits_change_little(name: str) -> None:
    """Fused layers put them there, others' own too; tokens by the kernel for few and by that for many."""
    module, wanted = make(name), make(name)
    own = own_of(module, bits=8)
    assert isinstance(own, Own), own
    assert (own.decoder is not None) == (name == "llama")
    assert own.page_bytes == PAGE_BYTES * (DIM + 4) // (4 * DIM)
    for prompt in PROMPTS[1:]:
        expected = wanted(mx.array([prompt]), cache=connect().new_caches(wanted))[0]
        for pieces in (1, 5):
            off = mx.abs(logits(module, own, prompt, pieces) - expected)
            assert 0 < off.mean().item() < 0.05 * expected.std().item()


def test_what_is_reused_of_8_bits_is_what_was_kept() -> None:
    """Pages that are shared, and one that is copied: the second time rows say what they said."""
    model = loaded(make("llama"), own_of(make("llama"), bits=8))
    loop = Looped(TextRunner(model), prefill_tokens=512)
    some = [Submit(id=str(i), prompt=prompt, max_tokens=12, max_wait_s=1e9) for i, prompt in enumerate(PROMPTS)]
    assert loop.run(*some) == loop.run(*some)
    assert model.own is not None
    assert loop.runner.statistics().prefix.copied_bytes > 0


@pytest.mark.parametrize(("name", "bits"), [("qwen2", 8), ("llama", 4)])
def test_quantized_layers_are_fused_too(name: str, bits: int) -> None:
    """In half precision, with products of few rows by the kernel for them."""
    module = make(name, dtype=mx.float16, hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    nn.quantize(module, group_size=64, bits=bits)
    expected = [module(mx.array([prompt]))[0].astype(mx.float32) for prompt in PROMPTS[:3]]
    mx.eval(expected)
    own = own_of(module, pages=64)
    assert isinstance(own, Own), own
    assert own.decoder is not None
    for prompt, wanted in zip(PROMPTS[:3], expected, strict=True):
        found = logits(module, own, prompt, 1).astype(mx.float32)
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
    gate_up = fused._layers[0].gate_up.weight
    up = module.model.layers[0].mlp.up_proj.weight
    np.array(up, copy=False)[:] = 5.0
    assert (gate_up[up.shape[0] :] == 5.0).all().item()


def test_a_long_position_turns_as_far_as_the_modules_own() -> None:
    module = make("llama3")
    fused = decoder(module)
    angles = 30_000 * fused._layers[0].turns
    pair = mx.concatenate([mx.ones(DIM // 2), mx.zeros(DIM // 2)])
    turned = module.model.layers[0].self_attn.rope(pair[None, None, None], offset=30_000).flatten()
    assert mx.allclose(turned[: DIM // 2], mx.cos(angles), atol=2e-2).item()
    assert mx.allclose(turned[DIM // 2 :], mx.sin(angles), atol=2e-2).item()


REFUSED = {
    "llama yarn": "YarnRoPE",
    "llama traditional": "RoPE",
    "qwen3_moe": "not a decoder of the plain kind",
    "gemma3": "not a decoder of the plain kind",
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_decoders_are_refused_by_name(name: str) -> None:
    with pytest.raises(NotImplementedError, match=REFUSED[name]):
        decoder(make(name))


def test_a_head_behind_an_unknown_norm_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="last norm"):
        FusedDecoder(make("llama"), ReferenceKernels(KV_HEADS, DIM, PAGE, mx.float32, rep=2), None)


def test_layers_that_were_replaced_are_refused() -> None:
    """As adapters do."""

    class Adapted(nn.Linear):  # type: ignore[misc]
        pass

    module = make("llama")
    module.model.layers[1].mlp.up_proj = Adapted(64, 128, bias=False)
    with pytest.raises(NotImplementedError, match="Adapted"):
        decoder(module)


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


def test_a_pass_of_rows_that_decode_is_put_together_once_for_each_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing in it has to be known before it runs."""
    module, selection = make("llama"), Selection()
    kernels = LazyKernels(KV_HEADS, DIM, PAGE, mx.float32, rep=2)
    layout = PagedLayout([0, 0], kernels, pages=64, keeps=False)
    rows = FlatRows(layout, FlatPass(FusedDecoder(module, kernels, selection), layout, selection))
    monkeypatch.setattr(Lazy, "calls", 0)
    calls = []
    for step, count in enumerate((1, 3, 3, 3, 1)):
        ids = [str(i) for i in range(count)]
        for id_ in ids:
            rows.admit(id_, "")
        done = rows.compute([Piece(id_, (5,), step, wants=1) for id_ in ids], None)
        mx.eval(done.logits, done.arrays)
        assert done.logits is not None
        assert done.logits.shape == (count, VOCABULARY)
        calls.append(Lazy.calls)
    assert 0 < calls[0] < calls[1] == calls[2] == calls[3] == calls[4]
