"""The scripts in `benchmarks/gpu/` that check kernels, with stand-ins: what is off is found, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from benchmarks.gpu import attention, attention_shapes, families_steps, family_shapes, linear, sampling

from tests.support.cuda import ReferenceKernel, ReferenceKernels
from treadle.runner.sampling.sampling_kernel import SamplingKernel


class Half(ReferenceKernels):
    dtypes = (mx.float16,)


class Off(ReferenceKernel):
    """Is a little off."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [one * 1.05 for one in super().__call__(*args, **kwargs)]


class OffKernels(Half):
    kernel = Off


def test_attention_that_is_right_is_found_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.check(5, Half, longest=200)
    assert "5 cases, 0 wrong" in capsys.readouterr().out


def test_attention_that_is_off_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert not attention.check(2, OffKernels, longest=200)
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gpt-oss, windowed", "MLA, 20 heads", "192 and 128 (MiMo)"])
def test_a_familys_attention_is_found_right_or_named(name: str) -> None:
    kind = attention_shapes.KINDS[name]
    kind = replace(kind, shape=replace(kind.shape, dtype=mx.float16))
    way = next(iter(kind.ways))
    rows = ([(1, 40), (1, 0)], [(30, 5)])
    assert "WRONG" not in attention_shapes.check(kind, way, rows, Half)
    assert attention_shapes.check(kind, way, rows, OffKernels).count("WRONG") == 2


def test_products_that_are_right_are_found_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert linear.check(4, ReferenceKernel, (mx.float16,), most_outputs=400)
    assert "0 products wrong" in capsys.readouterr().out


def test_products_that_are_off_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert not linear.check(2, Off, (mx.float16,), most_outputs=400)
    assert "WRONG" in capsys.readouterr().out


def test_draws_that_are_right_are_found_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert sampling.check(SamplingKernel(600, mx.float32, ReferenceKernel), 600, 1024, mx.float32)
    assert "WRONG" not in capsys.readouterr().out


class Early(ReferenceKernel):
    """Takes the token before now and then."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        tokens, spilled = super().__call__(*args, **kwargs)
        return [mx.where(tokens % 3 == 0, mx.maximum(tokens - 1, 0), tokens), spilled]


def test_draws_that_are_off_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert not sampling.check(SamplingKernel(600, mx.float32, Early), 600, 1024, mx.float32)
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("family", family_shapes.SHAPES)
def test_a_familys_shape_is_one_of_mlx_lm_and_its_share_of_experts_grows(family: str) -> None:
    """Real sizes, of which nothing is computed."""
    from mlx_lm.utils import _get_classes

    config = family_shapes.config_of(family)
    kind, arguments = _get_classes(config)
    assert kind(arguments.from_dict(config)).layers
    shares = [family_shapes.share_of_experts(config, tokens) for tokens in (1, 8, 32)]
    assert 0 < shares[0] <= shares[1] <= shares[2] <= 1
    has_experts = any("expert" in name for name in config)
    assert (shares[0] < 1) == has_experts


def test_results_of_families_become_a_table_also_of_those_that_failed() -> None:
    step = {"rows": 1, "ms": 2.0, "floor_ms": 1.0, "of_floor": 0.5, "peak": 3.0, "theirs_ms": 4.0, "ratio": 0.5}
    prompts = [
        {"tokens": 2048, "tokens_s": 10_000.0, "theirs_tokens_s": 5_000.0},
        {"tokens": 16384, "tokens_s": 8_000.0},
    ]
    longest = {"tokens": 32768, "held_mb": 1030.0, "needed_mb": 1024.5, "whole_mb": 6000.0}
    whole = {"steps": [step], "prompts": prompts, "longest": longest}
    lines: list[dict[str, Any]] = [
        {"family": "qwen3", "bits": "4", "path": "paged, fused, 9 kernels", **whole},
        {"family": "lfm2", "bits": "-", "failed": "stopped after 180 s"},
    ]
    first, second = families_steps.table(lines).splitlines()
    assert first.split(" | ")[2:] == [
        "paged, fused, 9 kernels",
        "2.00 / 4.00 = 0.50 (50%)",
        "10,000 / 5,000",
        "8,000",
        "3.0",
        "1,030.0 / 1,024.5 / 6,000.0 MB of 32,768 |",
    ]
    assert second == "| lfm2 | - | failed: stopped after 180 s |"
