"""Picks reach the host through memory that a kernel writes, each as it was sent."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.cuda import ReferenceKernel, failing, is_left_out, works
from tests.support.emulated import EmulatedKernel
from treadle.runner.device.readback import MOST, PendingReadback, Readback, readback

KERNELS = [ReferenceKernel, EmulatedKernel]


def numbers(*values: int) -> Any:
    return mx.array(values, mx.int32)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("count", [1, 255, 256, 257, MOST])
def test_two_arrays_arrive_as_they_were(kernel: Any, count: int) -> None:
    first, second = mx.arange(count).astype(mx.int32), 7 - 3 * mx.arange(count).astype(mx.int32)
    landed = Readback(kernel).send(first, second)
    assert landed is not None
    assert landed.read() == (first.tolist(), second.tolist())
    assert landed.filled.tolist() == [*range(count)] + [0] * (MOST - count)


def test_one_array_arrives_alone() -> None:
    landed = Readback(ReferenceKernel).send(numbers(3, -1))
    assert landed is not None
    assert landed.read()[0] == [3, -1]


def test_what_was_sent_stays_while_steps_run_ahead() -> None:
    some = Readback(ReferenceKernel)
    for turn in range(5):
        sent = [some.send(numbers(turn, i), numbers(i, turn)) for i in range(8)]
        assert [one.read() for one in sent if one] == [([turn, i], [i, turn]) for i in range(8)]


def test_nothing_is_read_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    view = np.zeros((2, 4), np.int32)

    def arrive(ticket: Any) -> None:
        assert ticket == "ticket"
        view[:] = [[1, 2, 3, 4], [5, 6, 7, 8]]

    monkeypatch.setattr("mlx.core.eval", arrive)
    assert PendingReadback("ticket", view, 3).read() == ([1, 2, 3], [5, 6, 7])


def test_too_many_numbers_are_left_to_mlx() -> None:
    assert Readback(ReferenceKernel).send(mx.zeros(MOST + 1, mx.int32)) is None


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_landing_that_works_is_used(kernel: Any) -> None:
    assert works(readback(kernel))


class Idle(ReferenceKernel):
    """Says that all is there."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [mx.zeros(1)]


@pytest.mark.parametrize(
    ("kernel", "why"), [(failing("land").kernel, "no kernel land today"), (Idle, "not what was sent")]
)
def test_a_landing_that_fails_is_left_out_with_one_warning(
    kernel: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    is_left_out(lambda: readback(kernel), why, caplog)
