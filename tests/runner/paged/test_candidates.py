"""Rows are in pages where trying that gave the model's own logits, and it is said once where it did not."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.runner.backends import Driven
from tests.runner.looped import Looped
from tests.runner.paged.models import PAGE_BYTES, UNFUSED, loaded, make, paged
from tests.support.cuda import ReferenceKernel, ReferenceKernels, failing
from treadle.core.messages import Submit
from treadle.errors import ConfigError
from treadle.runner import build
from treadle.runner.kv.backend import Unsupported
from treadle.runner.kv.cost import KvCost
from treadle.runner.kv.paged.backend import PagedConfig
from treadle.runner.kv.paged.kernels import AttentionShape, Kernels
from treadle.runner.kv.paged.paged_pass import PAGE
from treadle.runner.loading import candidates, choose_backend, load_errors
from treadle.runner.loading.backend_choice import BackendChoice, BackendRequest, Rejection
from treadle.runner.loading.model import LoadedModel
from treadle.runner.loading.probe import Probe
from treadle.runner.loading.reference import Reference
from treadle.runner.mlxlm import connect
from treadle.runner.model_runner import ModelRunner


class Wrong(ReferenceKernel):
    """Rotates by nothing: every token stands where the others do."""

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if self.name == "cos_sin":
            inputs = [mx.zeros_like(inputs[0]), *inputs[1:]]
        return super().__call__(inputs, *args, **kwargs)


class WrongKernels(ReferenceKernels):
    kernel = Wrong


class Idle(ReferenceKernel):
    """Copies no page."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [mx.zeros(1, mx.int32)] if self.name == "copy_pages" else super().__call__(*args, **kwargs)


class IdleKernels(ReferenceKernels):
    kernel = Idle


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_plain_decoder_has_pages_and_fused_layers_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    config = paged(make("qwen3"), pages=40)
    assert (config.name, config.fused) == ("paged", True)
    backend = Driven(config).backend
    assert (backend.blocks, backend.block, backend.lookahead) == (40, 32, 1)
    assert not warnings(caplog)


def test_other_decoders_have_pages_and_their_own_layers(caplog: pytest.LogCaptureFixture) -> None:
    rejected: list[Rejection] = []
    assert not paged(make(UNFUSED), rejected=rejected).fused
    ((backend, reason, failed),) = rejected
    assert not failed
    assert backend == "fused layers"
    assert "no fused decoder" in reason
    assert not warnings(caplog)


@pytest.mark.parametrize("kernel", ["rotate", "add_norm", "activate"])
def test_a_kernel_of_the_fused_layers_that_does_not_compile_leaves_the_pages(
    kernel: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not paged(make("llama"), kernels=failing(kernel)).fused
    (warning,) = warnings(caplog)
    assert f"no kernel {kernel} today" in warning
    assert "not fused" in warning


def test_fused_layers_that_give_other_logits_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    assert not paged(make("llama"), kernels=WrongKernels).fused
    (warning,) = warnings(caplog)
    assert "not the model's own" in warning


@pytest.mark.parametrize("kernel", ["write", "attend_decode", "attend_prefill", "copy_pages"])
def test_a_kernel_of_the_pages_that_does_not_compile_means_none(kernel: str) -> None:
    with pytest.raises(Unsupported, match=f"no kernel {kernel} today"):
        paged(make(UNFUSED), kernels=failing(kernel))


def test_pages_whose_copies_are_others_mean_none() -> None:
    with pytest.raises(Unsupported, match="a page's copy is another one"):
        paged(make(UNFUSED), kernels=IdleKernels)


def test_the_module_is_as_it_was_when_nothing_could_be_used() -> None:
    module, wanted = make("llama"), make("llama")
    tokens = mx.array([[1, 2, 3, 4]])
    with pytest.raises(Unsupported):
        paged(module, kernels=failing("attend_decode"))
    assert mx.allclose(module(tokens), wanted(tokens), atol=1e-4).item()


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (AttentionShape(2, 4, 64, mx.float32), "not in"),
        (AttentionShape(2, 4, 72, mx.bfloat16), "not of 72"),
        (AttentionShape(2, 4, 64, mx.bfloat16, value_dim=40), "of 64 and 40"),
        (AttentionShape(1, 4, 640, mx.bfloat16), "576 at most"),
        (AttentionShape(1, 4, 320, mx.bfloat16, value_dim=200, latent=True), "multiples of 128"),
        (AttentionShape(3, 4, 64, mx.bfloat16), "can't share"),
        (AttentionShape(1, 48, 128, mx.float16), ""),
        (AttentionShape(8, 32, 256, mx.bfloat16), ""),
        (AttentionShape(4, 64, 192, mx.bfloat16, value_dim=128), ""),
        (AttentionShape(1, 128, 576, mx.bfloat16, value_dim=512, latent=True), ""),
    ],
)
def test_attention_that_the_kernels_do_not_know_is_refused_by_name(shape: AttentionShape, why: str) -> None:
    with pytest.raises(Unsupported, match=why) if why else nullcontext():
        Kernels.check(shape)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (AttentionShape(1, 17, 64, mx.bfloat16), "17 query heads share"),
        (AttentionShape(2, 16, 512, mx.bfloat16), "not stored in 8 bits"),
        (AttentionShape(4, 64, 192, mx.bfloat16, value_dim=128), ""),
    ],
)
def test_8_bits_that_the_kernels_do_not_know_are_refused_by_name(shape: AttentionShape, why: str) -> None:
    with pytest.raises(Unsupported, match=why) if why else nullcontext():
        Kernels.check(shape, bits=8)


def test_a_model_with_other_heads_is_refused() -> None:
    with pytest.raises(Unsupported, match="not of 24"):
        paged(make("llama", head_dim=24))


def test_a_model_that_computes_in_float32_is_not_for_the_real_kernels() -> None:
    with pytest.raises(Unsupported, match="float32"):
        paged(make("llama"), kernels=Kernels)


def test_where_nothing_says_how_much_memory_there_is_nothing_is_taken() -> None:
    with pytest.raises(Unsupported, match="how much memory"):
        paged(make("llama"), pages=0)


@pytest.mark.parametrize("pages", [2, 5])
def test_a_small_budget_is_what_there_is(pages: int) -> None:
    """No more is taken than was given, and that is enough to warm up and to serve what fits."""
    module = make("llama")
    runner = ModelRunner(loaded(module, paged(module, pages=pages)))
    runner.warm_up()
    assert (runner.capabilities().kv.blocks, runner.free_blocks()) == (pages, pages)
    loop = Looped(runner)
    fits = Submit(id="fits", prompt=tuple(range(pages * PAGE - 9)), max_tokens=9)
    assert len(loop.run(fits)["fits"]) == 9


def test_a_budget_too_small_for_pages_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have no heads for the kernels, so this one's pages are as large as it says."""

    def loading(*args: Any, memory: int, **kwargs: Any) -> LoadedModel:
        module = make("llama")
        config = candidates.paged(
            Reference(connect(), module, 2048), memory, [], keep_prefixes=True, kernels=ReferenceKernels
        )
        model = loaded(module, config)
        return replace(model, choice=replace(model.choice, budget=memory))

    monkeypatch.setattr(build, "load", loading)
    with monkeypatch.context() as untested:
        untested.delattr(candidates, "_fused")  # the tests of a large model take minutes
        with pytest.raises(ConfigError, match=r"needs 128 KiB of cache for 2 pages, .* give more"):
            build.build(tmp_path, memory=2 * PAGE_BYTES - 1)
    build.build(tmp_path, memory=2 * PAGE_BYTES).close()


def choose(module: Any, kernels: type[ReferenceKernels], bits: int | None = None) -> BackendChoice:
    """As the loader does on CUDA."""
    found = Probe(261, mx.float32, KvCost(1, 2), Reference(connect(), module, 2048))
    return choose_backend.choose(found, BackendRequest("cuda", 1 << 20, 4, True, bits), kernels)


@pytest.mark.parametrize("broken", [False, True])
def test_a_model_that_can_not_have_pages_has_buffers_with_one_warning(
    broken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its layers are tried fused, then by themselves; then sequences have buffers of their own, as elsewhere. The
    choice keeps the reasons, best backend first."""
    choice = choose(make("llama"), failing("attend_decode", "attend_prefill") if broken else ReferenceKernels)
    assert choice.config.name == ("contiguous" if broken else "paged")
    assert [rejection.backend for rejection in choice.rejected] == (["fused layers", "paged"] if broken else [])
    assert ("no kernel attend_decode today" in choice.reason_against("paged")) is broken
    said = warnings(caplog)
    assert len(said) == (2 if broken else 0)
    if broken:
        assert "not fused" in said[0]
        assert "attention kernels are not used" in said[1]


def test_keys_and_values_of_8_bits_are_had_or_refused_by_name() -> None:
    """Never silently left out: who asked for them has given less memory."""
    choice = choose(make("llama"), ReferenceKernels, bits=8)
    assert isinstance(choice.config, PagedConfig)
    assert choice.config.page_bytes < PAGE_BYTES // 3
    assert choice.cost == KvCost(choice.config.page_bytes // PAGE, 0)
    refused = pytest.raises(ConfigError, match=r"no keys and values of 8 bits .*write_int8")
    with refused, load_errors.model_errors(Path("folder")):  # it is not the model's fault
        choose(make("gemma3"), failing("write_int8"), bits=8)
