"""Reference implementation of the CUDA kernels on the host, in NumPy, one launch at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest

from tests.support.cuda_launches import LAUNCHES, Launch
from tests.support.expert_launches import EXPERT_LAUNCHES
from tests.support.mixer_launches import MIXER_LAUNCHES
from treadle.core.compute_path import KernelState
from treadle.runner.device.cuda import CudaKernel
from treadle.runner.device.properties import DeviceProperties
from treadle.runner.device.self_test import SelfTested
from treadle.runner.kv.paged.kernels import Kernels
from treadle.runner.kv.paged.tiling import PREFILL_ROWS


class ReferenceKernel(CudaKernel):
    """Stand-in for the kernel of that name."""

    def __init__(
        self, name: str, inputs: Sequence[str], outputs: Sequence[str], source: str, *, shared_memory: int = 0, **_: Any
    ) -> None:
        assert shared_memory <= DeviceProperties().shared
        self.name = name
        self._inputs = inputs
        self._outputs = outputs

    def __call__(
        self,
        inputs: Sequence[Any],
        template: Sequence[tuple[str, Any]],
        *,
        blocks: tuple[int, int],
        threads: int,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[Any],
    ) -> list[Any]:
        arrays = dict(zip(self._inputs, inputs, strict=True))
        launch = Launch(arrays, dict(template), blocks, threads, shapes)
        assert self.name != "attend_prefill" or threads == (
            256 if max(launch.template["D"], launch.template["DV"]) > 128 else 128
        )
        assert self.name != "attend_prefill" or launch.template["ROWS"] == PREFILL_ROWS
        with np.errstate(invalid="ignore"):  # tokens of nobody are NaN from the first layer's attention on
            made = (LAUNCHES | EXPERT_LAUNCHES | MIXER_LAUNCHES)[self.name](launch)
        assert [tuple(one.shape) for one in made] == [tuple(shape) for shape in shapes]
        assert len(made) == len(self._outputs)
        return [mx.array(one.astype(np.float32)).astype(dtype) for one, dtype in zip(made, dtypes, strict=True)]


class Outputs:
    """Outputs of a program, which runs when they are unpacked: one whose outputs are not used has no effect, as with
    lazy arrays."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run

    def __iter__(self) -> Iterator[Any]:
        return iter(self._run())


def run_late(program: Callable[..., Any]) -> Callable[..., Any]:
    """Stand-in for `mx.compile`: the program runs anew in each call, when its outputs are unpacked."""
    return lambda *args: Outputs(partial(program, *args))


class ReferenceKernels(Kernels):
    """The paged cache's kernels on the host, in float32 too. They run when they are called: nothing can be traced."""

    kernel: ClassVar[type[CudaKernel]] = ReferenceKernel
    dtypes: ClassVar[tuple[Any, ...]] = (mx.float32, mx.float16)
    compile: ClassVar[Callable[..., Any]] = staticmethod(run_late)


def works(tested: SelfTested[Any]) -> bool:
    """Whether a kernel passed its self-test."""
    return tested.kernel is not None and tested.status.state is KernelState.ACTIVE


def is_left_out(make: Callable[[], SelfTested[Any]], why: str, caplog: pytest.LogCaptureFixture) -> None:
    """Check that a kernel failed its self-test, and that one warning and its status give the reason."""
    with caplog.at_level(logging.WARNING):
        tested = make()
    assert tested.kernel is None
    assert tested.status.state is KernelState.FAILED
    assert why in tested.status.reason
    (record,) = caplog.records
    assert why in record.message


def failing(*names: str) -> type[ReferenceKernels]:
    """Return kernels of which the compiler refuses `names`."""

    class Refused(ReferenceKernel):
        def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
            if self.name in names:
                raise RuntimeError(f"nvrtc: no kernel {self.name} today")
            return super().__call__(*args, **kwargs)

    return type("Failing", (ReferenceKernels,), {"kernel": Refused})


def wrongly_bounded() -> type[ReferenceKernels]:
    """Return kernels that are right only where what tokens see follows from their index."""

    class Wrong(ReferenceKernel):
        def __call__(self, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
            made = super().__call__(inputs, *args, **kwargs)
            return [one[..., ::-1] for one in made] if "visible" in self._inputs else made

    return type("WronglyBounded", (ReferenceKernels,), {"kernel": Wrong})
