"""What the attention kernels take of a chip: rings and tiles are as large as it lets them be."""

from __future__ import annotations

import mlx.core as mx
import pytest

from treadle.runner.device.properties import DeviceProperties
from treadle.runner.kv.backend import Unsupported
from treadle.runner.kv.paged.kernels import Kernels

H200, A100, L40S = (DeviceProperties(shared=size * 1024) for size in (227, 163, 99))


def kernels(dim: int, bits: int, chip: DeviceProperties) -> Kernels:
    return Kernels(8, dim, 32, mx.bfloat16, bits, rep=4, chip=chip)


@pytest.mark.parametrize(
    ("dim", "bits", "chip", "stages", "tile"),
    [
        (64, 16, H200, 5, 64),
        (128, 16, H200, 3, 64),  # twice on a multiprocessor
        (128, 8, H200, 5, 64),
        (256, 16, H200, 3, 64),  # once
        (128, 16, A100, 2, 64),
        (256, 16, A100, 2, 16),
        (128, 16, L40S, 2, 64),
        (128, 8, L40S, 4, 64),
        (64, 16, L40S, 2, 64),
    ],
)
def test_rings_are_as_deep_as_shared_memory_lets_them(
    dim: int, bits: int, chip: DeviceProperties, stages: int, tile: int
) -> None:
    some = kernels(dim, bits, chip)
    some.check_memory()
    assert (some._stages, some._tile) == (stages, tile)
    assert max(some._decode_memory(stages), some._prefill_memory(tile)) + 1024 <= chip.shared


def test_heads_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="heads of 256 dimensions take 164352 bytes"):
        kernels(256, 16, L40S).check_memory()


def test_a_chip_is_known_by_its_capability() -> None:
    ada = {"compute_capability_major": 8, "compute_capability_minor": 9}
    assert DeviceProperties.of(ada) == L40S
    assert DeviceProperties.of({}) == DeviceProperties()
