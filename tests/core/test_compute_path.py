"""The compute path in one line, and what `--kernels require` does not accept."""

from __future__ import annotations

import msgspec
import pytest

from treadle.config import KERNELS
from treadle.core.compute_path import (
    Backend,
    ComputePath,
    KernelName,
    KernelPolicy,
    KernelPrograms,
    KernelState,
    KernelStatus,
)

ACTIVE = tuple(KernelStatus(name, KernelState.ACTIVE) for name in KernelName if name is not KernelName.BLAS)
BLAS = KernelStatus(KernelName.BLAS, KernelState.ACTIVE, "OpenBLAS 0.3.29")
FAILED = KernelStatus(KernelName.READBACK, KernelState.FAILED, "numbers do not arrive")
OFF = KernelStatus(KernelName.SAMPLING, KernelState.OFF, "--kernels off")
ON_CUDA = ComputePath(Backend.PAGED, Backend.PAGED, True, 1, True, ACTIVE)
HEADS = "paged: its layers have different heads"


@pytest.mark.parametrize(
    ("path", "line", "shortfalls"),
    [
        (ON_CUDA, "paged, fused, 16 kernels, look-ahead", []),
        (
            ComputePath(Backend.PAGED, Backend.PAGED, False, 1, True, ACTIVE[:3], ("fused layers: positions by Yarn",)),
            "paged, not fused (fused layers: positions by Yarn), 3 kernels, look-ahead",
            ["fused layers: positions by Yarn"],
        ),
        (
            ComputePath(Backend.CONTIGUOUS, Backend.PAGED, why=(HEADS,)),
            f"contiguous ({HEADS})",
            [HEADS],
        ),
        (ComputePath(Backend.PADDED, Backend.CONTIGUOUS), "padded", ["contiguous: not used"]),
        (ComputePath(Backend.CONTIGUOUS, Backend.CONTIGUOUS, kernels=(BLAS,)), "contiguous, blas", []),
        (ComputePath(Backend.CONTIGUOUS, Backend.CONTIGUOUS, kernels=(OFF,)), "contiguous, kernels off", []),
        (
            ComputePath(Backend.PAGED, Backend.PAGED, True, kernels=(*ACTIVE[:2], FAILED)),
            "paged, fused, decode attention and prefill attention, 1 failed (readback)",
            ["readback: numbers do not arrive"],
        ),
    ],
)
def test_one_line_says_what_runs_and_why_not_better(path: ComputePath, line: str, shortfalls: list[str]) -> None:
    assert path.summary() == line
    assert path.shortfalls() == shortfalls


@pytest.mark.parametrize(
    ("programs", "line"),
    [
        (KernelPrograms(), ""),
        (KernelPrograms(3, 20, 2, 1.23), "3 compiled in 1.2 s, 20 from the cache, 2 by MLX"),
        (KernelPrograms(cached=20), "20 from the cache"),
        (KernelPrograms(by_mlx=9, reasons=("no compiler", "no folder")), "9 by MLX; no compiler; no folder"),
        (KernelPrograms(reasons=("no compiler",)), "no compiler"),
    ],
)
def test_one_line_says_where_programs_of_kernels_came_from(programs: KernelPrograms, line: str) -> None:
    assert programs.summary() == line


def test_only_one_by_one_is_serialized() -> None:
    assert [ComputePath(backend).serialized for backend in Backend if backend.value == "serial"] == [True]
    assert sum(ComputePath(backend).serialized for backend in Backend) == 1


def test_the_setting_takes_the_policies() -> None:
    assert tuple(KernelPolicy) == KERNELS


def test_it_crosses_to_the_front_whole() -> None:
    sent = msgspec.msgpack.encode(ON_CUDA)
    assert msgspec.msgpack.decode(sent, type=ComputePath) == ON_CUDA
