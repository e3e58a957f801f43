"""How products of few rows are shared out: weights once, x in shared memory, a block for every processor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cuda import ReferenceKernel
from treadle.runner.device.properties import DeviceProperties
from treadle.runner.fused.skinny_gemm import SIZES, Launch, SkinnyGemm, Weights, launch

H200 = DeviceProperties()
QKV, OUT = Weights(6144, 4096, 4, 64), Weights(4096, 4096, 4, 64)
GATE_UP, DOWN = Weights(24576, 4096, 4, 64), Weights(4096, 12288, 4, 64)
HEAD = Weights(151936, 4096, 4, 64)


@st.composite
def weights(draw: st.DrawFn) -> Weights:
    group = draw(st.sampled_from([64, 128]))
    inputs = 8 * group * draw(st.integers(1, 40))
    return Weights(draw(st.integers(16, 40_000)), inputs, draw(st.sampled_from([4, 8])), group)


@given(weights(), st.sampled_from(SIZES), st.sampled_from([99, 163, 227]), st.integers(1, 160))
def test_a_launch_fits_the_chip_and_has_work_for_every_warp(some: Weights, rows: int, shared: int, count: int) -> None:
    """Also every split and part has columns, and every block a tile."""
    way = launch(some, rows, DeviceProperties(count, shared * 1024))
    if way is None:
        assert rows * some.inputs * 2 > 16 * 1024
        return
    assert way.shared(some) <= shared * 1024
    assert way.across * way.splits <= count
    assert way.warps % way.parts == 0
    assert way.splits * way.parts * some.eight <= some.inputs
    assert 0 < way.across <= some.tiles


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("some", [QKV, OUT, GATE_UP, DOWN, HEAD], ids=["qkv", "out", "gate_up", "down", "head"])
def test_the_layers_of_a_large_model_keep_nearly_all_processors_busy(some: Weights, rows: int) -> None:
    way = launch(some, rows, H200)
    assert way is not None
    assert way.across * way.splits >= 0.9 * H200.processors


@pytest.mark.parametrize(
    ("some", "rows", "measured"),
    [
        (QKV, 8, (12, 4, 1)),
        (QKV, 16, (12, 1, 4)),
        (OUT, 8, (8, 4, 1)),
        (OUT, 16, (8, 1, 4)),
        (GATE_UP, 8, (12, 1, 1)),
        (GATE_UP, 16, (12, 1, 1)),
        (GATE_UP, 32, (12, 1, 2)),
        (GATE_UP, 64, (12, 1, 4)),
        (DOWN, 8, (12, 1, 6)),
        (DOWN, 64, (12, 1, 12)),
        (HEAD, 8, (12, 1, 1)),
        (HEAD, 64, (12, 1, 4)),
    ],
)
def test_what_was_measured_to_be_best_is_chosen(some: Weights, rows: int, measured: tuple[int, int, int]) -> None:
    """Warps, parts and splits; within 3 % of the fastest of some hundred on an H200."""
    way = launch(some, rows, H200)
    assert way is not None
    assert (way.warps, way.parts, way.splits) == measured


def test_what_a_block_holds_grows_with_its_rows_its_columns_and_its_warps() -> None:
    one = Launch(rows=8, depth=4, warps=8, parts=1, splits=2, across=64)
    more = (replace(one, rows=16), replace(one, splits=1), replace(one, warps=12))
    assert all(other.shared(OUT) > one.shared(OUT) for other in more)


@pytest.mark.parametrize(
    ("info", "kilobytes"),
    [
        ({}, 227),
        ({"compute_capability_major": 9, "compute_capability_minor": 0}, 227),
        ({"compute_capability_major": 8, "compute_capability_minor": 0}, 163),
        ({"compute_capability_major": 8, "compute_capability_minor": 9}, 99),
        ({"compute_capability_major": 12, "compute_capability_minor": 0}, 99),
    ],
)
def test_a_chip_is_known_by_its_compute_capability(info: dict[str, Any], kilobytes: int) -> None:
    assert DeviceProperties.of(info).shared == kilobytes * 1024


def few(
    outputs: int, inputs: int, *, chip: DeviceProperties, bits: int = 4, group: int = 64, dtype: Any = mx.float16
) -> SkinnyGemm:
    parts = mx.quantize(mx.random.normal((outputs, inputs)).astype(dtype), group_size=group, bits=bits)
    return SkinnyGemm(*parts, bits, group, ReferenceKernel, chip)


def test_with_little_shared_memory_only_fewer_rows_go_this_way() -> None:
    """Eight thousand columns of 64 rows, in at most sixteen splits, are 64 KB."""
    assert few(32, 8192, chip=DeviceProperties()).most_rows == 64
    assert 0 < few(32, 8192, chip=DeviceProperties(shared=64 * 1024)).most_rows < 64
    with pytest.raises(NotImplementedError, match="shared memory"):
        few(32, 8192, chip=DeviceProperties(shared=8 * 1024))


@pytest.mark.parametrize("rows", [1, 2, 8, 17, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 512), (40, 1024), (601, 2560), (4096, 1024)])
def test_any_number_of_rows_is_launched_as_the_kernel_expects(outputs: int, inputs: int, rows: int) -> None:
    x = mx.random.normal((rows, inputs)).astype(mx.float16)
    assert few(outputs, inputs, chip=H200)(x).shape == (rows, outputs)
