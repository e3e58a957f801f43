"""Linear layers of any model: the shapes in which they meet MLX, and the kernels that they go to."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.mla import MultiLinear

from tests.support.cuda import ReferenceKernel, failing
from treadle.core.compute_path import KernelPolicy, KernelState, KernelStatus
from treadle.runner.fused import merged_linear
from treadle.runner.layers.choose import FasterLayers
from treadle.runner.layers.linear import LinearMakers

COLUMNS = 512


class Model(nn.Module):
    """Layers as they stand in a model; `kinds` are quantized each in its way."""

    def __init__(self, dtype: Any = mx.float16, **kinds: dict[str, Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, COLUMNS)
        self.down = nn.Linear(COLUMNS, 64, bias=True)
        self.up = nn.Linear(COLUMNS, 160, bias=False)
        self.heads = MultiLinear(64, 32, 4)
        self.set_dtype(dtype)
        for name, how in kinds.items():
            setattr(self, name, getattr(self, name).to_quantized(**how))
        mx.eval(self.parameters())


class Count(ReferenceKernel):
    launched: ClassVar[Counter[str]] = Counter()

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        Count.launched[self.name] += 1
        return super().__call__(*args, **kwargs)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of x that reach MLX's quantized product."""
    shapes: list[tuple[int, ...]] = []
    own = mx.quantized_matmul

    def product(x: Any, *args: Any, **kwargs: Any) -> Any:
        shapes.append(x.shape)
        return own(x, *args, **kwargs)

    monkeypatch.setattr(mx, "quantized_matmul", product)
    return shapes


def faster(model: Model, kernel: Any = Count, policy: KernelPolicy = KernelPolicy.AUTO) -> FasterLayers:
    layers = FasterLayers(model, "cuda", policy, kernel)
    layers.install()
    assert not layers.rejected
    Count.launched.clear()
    return layers


def x(*shape: int, dtype: Any = mx.float16) -> Any:
    return mx.random.normal(shape, key=mx.random.key(sum(shape))).astype(dtype)


def state(layers: FasterLayers, name: str) -> KernelStatus:
    return next(status for status in layers.statuses if status.name == name)


FOUR = {"group_size": 64, "bits": 4}
WAYS = [
    FOUR,
    {"group_size": 32, "bits": 3},
    {"group_size": 128, "bits": 6},
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    {"group_size": 16, "bits": 4, "mode": "nvfp4"},
]


@pytest.mark.parametrize("how", WAYS, ids=lambda how: f"{how.get('mode', 'affine')}-{how['bits']}-{how['group_size']}")
def test_results_are_the_layers_own(how: dict[str, Any]) -> None:
    model = Model(up=how, down=how, embed=how)
    given = [x(rows, 1, COLUMNS) for rows in (1, 2, 7, 8, 33, 70)] + [x(2, 5, COLUMNS), x(1, 70, COLUMNS)]
    calls = [model.up, model.down, lambda x: model.embed.as_linear(x)]
    expected = [[call(one) for one in given] for call in calls]
    layers = faster(model)
    assert len(layers) == 4
    for call, results in zip(calls, expected, strict=True):
        for one, own in zip(given, results, strict=True):
            found = call(one)
            assert (found.shape, found.dtype) == (own.shape, own.dtype)
            limit = 0.02 * float(mx.abs(own).max().item())  # type: ignore[arg-type]
            assert mx.allclose(found, own, rtol=0, atol=limit).item()


def test_rows_never_reach_mlx_one_by_one(products: list[tuple[int, ...]]) -> None:
    """Also without kernels."""
    model = Model(up={"group_size": 64, "bits": 3}, embed={"group_size": 64, "bits": 3})
    layers = faster(model, policy=KernelPolicy.OFF)
    for rows in (1, 2, 7, 8, 64):
        products.clear()
        assert model.up(x(rows, 1, COLUMNS)).shape == (rows, 1, 160)
        assert model.embed.as_linear(x(rows, 1, COLUMNS)).shape == (rows, 1, 96)
        expected = (rows if rows in (1, 8, 64) else 8, COLUMNS)
        assert products == [expected, expected]
    assert state(layers, "replaced_layers").state is KernelState.ACTIVE


def test_too_few_columns_for_tiles_of_mlx_are_not_padded(products: list[tuple[int, ...]]) -> None:
    model = nn.QuantizedLinear(32, 64, False, 32, 4)
    model.set_dtype(mx.float16)
    faster(model, policy=KernelPolicy.OFF)
    products.clear()
    model(x(3, 1, 32))
    assert products == [(3, 32)]


@pytest.mark.parametrize(
    ("how", "few"), [(FOUR, "skinny_gemm"), (FOUR | {"bits": 3}, "packed_gemm"), (WAYS[3], "packed_gemm")]
)
def test_quantized_layers_use_the_kernels(how: dict[str, Any], few: str) -> None:
    model = Model(up=how)
    layers = faster(model)
    for rows, kernels in [(1, [few]), (64, [few]), (65, ["dequantize", "small_gemm"])]:
        Count.launched.clear()
        model.up(x(1, rows, COLUMNS))
        assert [*Count.launched] == kernels
    assert state(layers, few).state is KernelState.ACTIVE


@pytest.mark.parametrize(("rows", "kernels"), [(1, []), (2, ["skinny_gemm"]), (33, ["small_gemm"])])
def test_layers_of_16_bits_use_them_where_the_host_is_slower_than_the_device(rows: int, kernels: list[str]) -> None:
    model = Model()
    layers = faster(model)
    model.up(x(rows, 1, COLUMNS))
    assert [*Count.launched] == kernels
    assert "2 linear layers" in state(layers, "replaced_layers").reason


def test_large_layers_of_16_bits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    for name in ("LIGHT", "LIGHT_FOR_FEW"):
        monkeypatch.setattr(merged_linear, name, 0)
    layers = faster(model)
    assert type(model.up) is nn.Linear
    assert state(layers, "skinny_gemm").state is KernelState.NOT_APPLICABLE


@pytest.mark.parametrize("how", [FOUR, None])
def test_a_head_is_not_dequantized_and_stays_in_16_bits(how: dict[str, Any] | None) -> None:
    """Of a large vocabulary that would be a gigabyte."""
    model = Model() if how is None else Model(up=how)
    model.embed = nn.Embedding(160, COLUMNS)
    faster(model)
    for rows, kernels in [(8, ["skinny_gemm"]), (70, [])]:
        Count.launched.clear()
        model.up(x(rows, 1, COLUMNS))
        assert [*Count.launched] == ([] if how is None else kernels)
    assert (type(model.up) is nn.Linear) == (how is None)


def test_replaced_layers_are_in_no_cycle() -> None:
    """Weights go with the model, at once."""
    model = Model(up=FOUR, heads={"group_size": 32, "bits": 4})
    layers = faster(model)
    gone = [weakref.ref(one) for one in (model.up, model.heads, model.down)]
    del layers, model
    assert [one() for one in gone] == [None] * 3


def test_without_kernels_rows_are_laid_side_by_side_only(products: list[tuple[int, ...]]) -> None:
    model = Model(up=FOUR)
    layers = faster(model, policy=KernelPolicy.OFF)
    products.clear()
    model.up(x(9, 1, COLUMNS))
    assert products == [(9, COLUMNS)]
    assert not Count.launched
    assert type(model.down) is nn.Linear
    assert [status.name for status in layers.statuses] == ["replaced_layers"]


def test_numbers_of_another_type_go_to_mlx(products: list[tuple[int, ...]]) -> None:
    model = Model(up=FOUR, down=FOUR)
    expected = [one(x(9, 1, COLUMNS, dtype=mx.float32)) for one in (model.up, model.down)]
    faster(model)
    products.clear()
    for own, one in zip(expected, (model.up, model.down), strict=True):
        found = one(x(9, 1, COLUMNS, dtype=mx.float32))
        assert found.dtype == own.dtype
        assert mx.allclose(found, own, rtol=1e-3, atol=1e-3).item()
    assert products == [(9, COLUMNS)] * 2
    assert not Count.launched


def test_float32_layers_of_another_type_than_they_are_made_for_go_to_mlx() -> None:
    model = Model()
    expected = [one(x(9, 1, COLUMNS, dtype=mx.float32)) for one in (model.up, model.down)]
    faster(model)
    found = [one(x(9, 1, COLUMNS, dtype=mx.float32)) for one in (model.up, model.down)]
    assert all(mx.allclose(a, b, rtol=1e-3, atol=1e-3).item() for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("shape", [(1, 4, 1), (5, 4, 1), (2, 4, 3)])
def test_layers_of_heads_read_a_heads_weight_once(bits: int, transpose: bool, shape: tuple[int, int, int]) -> None:
    model = Model() if bits == 16 else Model(heads={"group_size": 32, "bits": 4})
    given = x(*shape, 64 if transpose else 32)
    expected = model.heads(given, transpose=transpose)
    faster(model)
    found = model.heads(given, transpose=transpose)
    assert found.shape == expected.shape
    assert mx.allclose(found, expected, rtol=0.01, atol=0.02).item()


def test_launches_that_share_a_workspace_are_in_order() -> None:
    """Two layers have the same input: nothing else says which of them comes first."""
    model = Model(up=FOUR, down=FOUR)
    made = LinearMakers(model, Recording)
    makers = made.makers
    one, other = (makers["mlx.nn.layers.quantized.QuantizedLinear"](layer) for layer in (model.up, model.down))
    assert one is not None
    assert other is not None
    given = x(3, COLUMNS)
    for rows in (3, 70):
        y = one.methods["__call__"](x(rows, COLUMNS))
        other.methods["__call__"](given)
        assert Recording.after[-1].shape[0] == rows
        mx.eval(y)
    (order,) = made.orders
    order.restart()
    one.methods["__call__"](given)
    assert Recording.after[-1].shape == (1,)


class Recording(ReferenceKernel):
    after: ClassVar[list[Any]] = []

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> list[Any]:
        self.after.append(inputs[-1])
        return super().__call__(inputs, *args, **kwargs)


def test_a_kernel_that_fails_leaves_mlx_with_the_reason() -> None:
    model = Model(up=FOUR)
    layers = FasterLayers(model, "cuda", KernelPolicy.AUTO, failing("skinny_gemm").kernel)
    layers.install()
    assert "no kernel skinny_gemm today" in state(layers, "replaced_layers").reason
    assert state(layers, "replaced_layers").state is KernelState.FAILED
    assert model.up(x(3, 1, COLUMNS)).shape == (3, 1, 160)


def test_on_metal_layers_stay() -> None:
    layers = FasterLayers(Model(up=FOUR), "metal")
    layers.install()
    assert len(layers) == 0
    assert state(layers, "replaced_layers").state is KernelState.NOT_APPLICABLE
