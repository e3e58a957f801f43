"""What MLX's runtime raises, and what it means (B7)."""

from __future__ import annotations

import pytest

from treadle.runner.base import RunnerBroken
from treadle.runner.device.owner_thread import OutOfMemory, mlx_runtime


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("all 16 pages of cache memory are held"),
        RuntimeError("[malloc] Unable to allocate 1099511627776 bytes."),
        RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"),
    ],
)
def test_an_allocation_that_failed_is_a_fault_of_the_step_alone(error: Exception) -> None:
    with (
        pytest.raises(OutOfMemory, match="no memory while computing a step: ") as raised,
        mlx_runtime("computing a step"),
    ):
        raise error
    assert not isinstance(raised.value, RunnerBroken)
    assert str(error) in str(raised.value)


def test_it_goes_through_what_surrounds_it_as_it_is() -> None:
    with pytest.raises(OutOfMemory, match="no memory while inside"), mlx_runtime("outside"), mlx_runtime("inside"):
        raise MemoryError


def test_any_other_fault_of_the_runtime_means_that_nothing_can_be_trusted() -> None:
    with pytest.raises(RunnerBroken, match="There is no Stream"), mlx_runtime("computing a step"):
        raise RuntimeError("There is no Stream(gpu, 1) in current thread.")


@pytest.mark.parametrize("error", [ValueError("shapes"), NotImplementedError("sinks"), RecursionError("deep")])
def test_wrong_arguments_are_the_rows_own_fault(error: Exception) -> None:
    with pytest.raises(type(error)), mlx_runtime("computing a step"):
        raise error
