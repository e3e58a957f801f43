"""Products of joined layers: the layers' own results, side by side."""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.support.cuda import ReferenceKernel, failing
from treadle.runner.fused import small_gemm
from treadle.runner.fused.merged_linear import FEW_ROWS, LIGHT, LIGHT_FOR_FEW, MergedLinear, Tools
from treadle.runner.fused.merged_linear import merge_linears as joined_by
from treadle.runner.fused.skinny_gemm import SkinnyGemm

MANY = 40


def layers(count: int, *, columns: int = 512, bias: bool = False, dtype: Any = mx.float16) -> list[nn.Linear]:
    made = [nn.Linear(columns, 64 * (i + 1), bias=bias) for i in range(count)]
    for layer in made:
        layer.set_dtype(dtype)
    return made


def joined(some: list[Any], kernel: Any, *, layer_bytes: int = 0, head: bool = False) -> MergedLinear:
    product = joined_by(some, Tools.of(kernel, layer_bytes, mx.float16), head=head)
    Count.launched.clear()  # what was tried
    return product


def quantized(some: list[nn.Linear], **how: Any) -> list[nn.QuantizedLinear]:
    return [nn.QuantizedLinear.from_linear(layer, **how) for layer in some]


@pytest.mark.parametrize("rows", [1, 5, 8, 65])
@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_a_mode_without_biases_works_too(mode: str, bits: int, group: int, rows: int) -> None:
    check(quantized(layers(2), bits=bits, group_size=group, mode=mode), rows)


def check(some: list[Any], rows: int) -> None:
    x = mx.random.normal((rows, 512)).astype(mx.float16)
    wanted = mx.concatenate([layer(x) for layer in some], axis=-1).astype(mx.float32)
    product = joined(some, ReferenceKernel)
    found = product(x).astype(mx.float32)
    assert product.outputs == found.shape[1]
    assert mx.allclose(found, wanted, atol=2e-2, rtol=2e-2).item()


@pytest.mark.parametrize("rows", [1, 8, 33, 64, 65])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_product_is_its_layers_side_by_side(bits: int, bias: bool, rows: int) -> None:
    """By the kernel for few rows, and by MLX where there are more."""
    mx.random.seed(rows)
    some = layers(3, bias=bias)
    check(some if bits == 16 else quantized(some, bits=bits, group_size=64), rows)


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (6, 64), (4, 128), (2, 64)])
def test_other_ways_of_quantizing_work_too(bits: int, group: int) -> None:
    check(quantized(layers(2), bits=bits, group_size=group), 3)


def test_one_layer_is_not_copied() -> None:
    (layer,) = layers(1)
    assert joined([layer], ReferenceKernel).weight is layer.weight


class Count(ReferenceKernel):
    launched: ClassVar[list[str]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        Count.launched.append(self.name)
        return super().__call__(*args, **kwargs)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(Count, "launched", [])
    return Count.launched


@pytest.mark.parametrize(
    ("rows", "layer_bytes", "kernels"),
    [
        (1, 0, ["skinny_gemm"]),
        (64, 0, ["skinny_gemm"]),
        (65, 0, ["dequantize", "small_gemm"]),
        (65, LIGHT + 1, ["dequantize"]),
        (200, 0, ["dequantize"]),
    ],
)
def test_few_rows_are_the_kernels_and_more_are_of_weights_made_plain(
    rows: int, layer_bytes: int, kernels: list[str], launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_gemm, "MOST", 199 * 64 * 512)
    product = joined(quantized(layers(1), bits=4, group_size=64), Count, layer_bytes=layer_bytes)
    product(mx.zeros((rows, 512), mx.float16))
    assert launched == kernels


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("rows", [65, 200])
def test_the_product_of_weights_made_plain_adds_the_bias(
    rows: int, dtype: Any, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel and by MLX; a bias of another type is added behind it."""
    monkeypatch.setattr(small_gemm, "MOST", 199 * 64 * 512)
    some = quantized(layers(1, bias=True), bits=4, group_size=64)
    some[0].bias = some[0].bias.astype(dtype)
    product = joined(some, Count)
    x = mx.random.normal((rows, 512)).astype(mx.float16)
    y = product(x)
    assert y.dtype == dtype
    assert mx.allclose(y.astype(mx.float32), some[0](x).astype(mx.float32), atol=2e-2, rtol=2e-2).item()
    assert launched == ["dequantize", *["small_gemm"] * (rows == 65)]


@pytest.mark.parametrize(
    ("rows", "launches"), [(1, ["packed_gemm"]), (64, ["packed_gemm"]), (65, ["dequantize", "small_gemm"])]
)
@pytest.mark.parametrize(("columns", "group"), [(896, 64), (512, 32)])
def test_few_rows_that_the_skinny_kernel_does_not_fit_are_the_packed_ones(
    columns: int, group: int, rows: int, launches: list[str], launched: list[str]
) -> None:
    some = quantized(layers(1, columns=columns), bits=4, group_size=group)
    joined(some, Count)(mx.zeros((rows, columns), mx.float16))
    assert launched == launches


@pytest.mark.parametrize(("rows", "launches"), [(1, []), (64, []), (65, ["dequantize"])])
def test_few_rows_that_no_kernel_fits_are_mlxs(rows: int, launches: list[str], launched: list[str]) -> None:
    """To make the whole weight plain for each token would be nine times what is read."""
    some = quantized(layers(1, columns=96), bits=4, group_size=32)
    joined(some, Count)(mx.zeros((rows, 96), mx.float16))
    assert launched == launches


def test_a_packed_kernel_that_fails_is_left_out(launched: list[str]) -> None:
    tools = Tools.of(failing("packed_gemm").kernel, 0, mx.float16)
    product = joined_by(quantized(layers(1, columns=896), bits=4, group_size=64), tools)
    assert product.skinny is None
    (status,) = (one for one in tools.statuses([product]) if one.name == "packed_gemm")
    assert "no kernel packed_gemm today" in status.reason


@pytest.mark.parametrize(("rows", "launches"), [(64, ["skinny_gemm"]), (65, [])])
def test_a_head_is_never_made_plain(rows: int, launches: list[str], launched: list[str]) -> None:
    """Of a large vocabulary that is a gigabyte, and few tokens at a time have their logits wanted."""
    joined(quantized(layers(1), bits=4, group_size=64), Count, head=True)(mx.zeros((rows, 512), mx.float16))
    assert launched == launches


@pytest.mark.parametrize(
    ("rows", "layer_bytes", "head", "launches"),
    [
        (1, LIGHT, False, []),
        (2, LIGHT, False, ["skinny_gemm"]),
        (32, LIGHT, False, ["skinny_gemm"]),
        (33, LIGHT, False, ["small_gemm"]),
        (MANY, LIGHT, False, ["small_gemm"]),
        (MANY + 1, LIGHT, False, []),
        (33, LIGHT, True, []),
        (33, LIGHT + 1, False, []),
        (1, LIGHT + 1, False, []),
        (2, LIGHT + 1, False, ["skinny_gemm"]),
        (FEW_ROWS, LIGHT_FOR_FEW, False, ["skinny_gemm"]),
        (FEW_ROWS + 1, LIGHT_FOR_FEW, False, []),
        (2, LIGHT_FOR_FEW + 1, False, []),
        (2, LIGHT, True, []),
    ],
)
def test_plain_weights_need_the_kernels_where_the_host_is_slower_than_the_device(
    rows: int, layer_bytes: int, head: bool, launches: list[str], launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_gemm, "MOST", MANY * 192 * 512)
    product = joined(layers(2), Count, layer_bytes=layer_bytes, head=head)
    product(mx.zeros((rows, 512), mx.float16))
    assert launched == launches


def mixed() -> list[Any]:
    one, other = layers(2)
    return [one, *quantized([other], bits=4, group_size=64)]


def two_ways() -> list[Any]:
    one, other = layers(2)
    return [*quantized([one], bits=8, group_size=64), *quantized([other], bits=4, group_size=64)]


@pytest.mark.parametrize("some", [mixed, two_ways])
def test_layers_that_do_not_go_together_are_refused(some: Any) -> None:
    with pytest.raises(NotImplementedError, match="quantized in different ways"):
        joined(some(), ReferenceKernel)


def test_a_bias_that_a_layer_has_not_is_zeros_for_it() -> None:
    some = [*layers(1), *layers(1, bias=True)]
    x = mx.random.normal((3, some[0].weight.shape[1]))
    expected = mx.concatenate([layer(x) for layer in some], axis=-1)
    assert mx.allclose(joined(some, ReferenceKernel)(x), expected, atol=1e-4).item()
    assert "bias" not in some[0]


@pytest.mark.parametrize(
    ("bits", "group", "outputs", "columns", "dtype"),
    [
        (4, 64, 64, 512, mx.float32),
        (4, 64, 64, 768, mx.float16),
        (4, 64, 8, 512, mx.float16),
        (4, 32, 64, 512, mx.float16),
        (6, 64, 64, 512, mx.float16),
    ],
)
def test_what_the_kernel_for_few_rows_does_not_fit_is_refused(
    bits: int, group: int, outputs: int, columns: int, dtype: Any
) -> None:
    parts = mx.quantize(mx.zeros((outputs, columns), dtype), group_size=group, bits=bits)
    with pytest.raises(NotImplementedError):
        SkinnyGemm(*parts, bits, group, ReferenceKernel)
