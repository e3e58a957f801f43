"""What the attention kernels take of a chip: rings and tiles are as large as it lets them be."""

from __future__ import annotations

import mlx.core as mx
import pytest

from treadle.runner.device.properties import DeviceProperties
from treadle.runner.kv.backend import Unsupported
from treadle.runner.kv.paged.kernels import AttentionShape, Kernels

H200, A100, L40S = (DeviceProperties(shared=size * 1024) for size in (227, 163, 99))


def kernels(dim: int, bits: int, chip: DeviceProperties) -> Kernels:
    return Kernels(8, dim, 32, mx.bfloat16, bits, rep=4, chip=chip)


@pytest.mark.parametrize(
    ("dim", "bits", "chip", "ring", "tile"),
    [
        (64, 16, H200, (4, 5), 64),
        (128, 16, H200, (4, 3), 64),  # twice on a multiprocessor
        (128, 8, H200, (4, 5), 64),
        (256, 16, H200, (4, 3), 64),  # once
        (128, 16, A100, (4, 2), 64),
        (256, 16, A100, (4, 2), 16),
        (128, 16, L40S, (4, 2), 64),
        (128, 8, L40S, (4, 4), 64),
        (64, 16, L40S, (4, 2), 64),
        (256, 16, L40S, (2, 2), 16),  # with fewer warps
    ],
)
def test_rings_are_as_deep_as_shared_memory_lets_them(
    dim: int, bits: int, chip: DeviceProperties, ring: tuple[int, int], tile: int
) -> None:
    some = kernels(dim, bits, chip)
    some.check_memory()
    assert (some._ring, some._tile) == (ring, tile)
    assert max(some._decode_memory(*ring), some._prefill_memory(tile)) + 1024 <= chip.shared


def latent(chip: DeviceProperties, heads: int) -> Kernels:
    return Kernels.of(AttentionShape(1, heads, 576, mx.bfloat16, value_dim=512, latent=True), 32, 16, chip)


@pytest.mark.parametrize(
    ("chip", "rows", "ways"),
    [
        (H200, 64, {16: (32, 4, 2), 32: (32, 4, 2), 64: (64, 8, 2)}),
        (A100, 64, {16: (16, 4, 2), 32: (16, 4, 2), 64: (32, 8, 2)}),
        (L40S, 32, {16: (32, 8, 2), 32: (16, 8, 2)}),
    ],
)
def test_wide_tiles_are_as_large_as_shared_memory_lets_them(
    chip: DeviceProperties, rows: int, ways: dict[int, tuple[int, int, int]]
) -> None:
    """Two blocks on a multiprocessor, where they fit, take the place of one with more warps."""
    some = latent(chip, 20)
    assert some._most_rows == rows
    assert {each: some._wide_way(each) for each in ways} == ways
    for each, way in ways.items():
        assert (some._wide_memory(each, *way) + 128 + 1024) * (2 if way[1] == 4 else 1) <= chip.shared + 1024


@pytest.mark.parametrize(("heads", "short"), [(8, 4), (20, 1), (128, 0)])
def test_latent_tokens_decode_in_small_tiles_where_all_heads_fit(heads: int, short: int) -> None:
    assert latent(H200, heads).short == short


def test_heads_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="heads of 256 dimensions take 98304 bytes"):
        kernels(256, 16, DeviceProperties(shared=90 * 1024)).check_memory()


def test_a_chip_is_known_by_its_capability() -> None:
    ada = {"compute_capability_major": 8, "compute_capability_minor": 9}
    assert DeviceProperties.of(ada) == L40S
    assert DeviceProperties.of({}) == DeviceProperties()
