"""Faster layers for a model on its device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ...core.compute_path import KernelName, KernelPolicy, KernelState, KernelStatus
from ..device.cuda import CudaKernel, NewKernel
from ..device.self_test import not_applicable
from . import dense_experts, norms_cpu
from .compiled_cpu import CompiledBlocks
from .experts import ExpertMakers
from .linear import LinearMakers
from .linear_cpu import CpuLinearMakers
from .mixtures import MixtureMakers
from .plain_linear_cpu import PlainLinearMakers
from .replace import Maker, Makers, ReplacedLayers
from .rotary_cpu import RotaryMakers


class FasterLayers(ReplacedLayers):
    """The faster layers of `module` on `device`: with kernels as `policy` says, made by `kernel`.

    Another class of layers gets a row in `_makers`. On Metal, MLX lays rows side by side by itself.
    """

    def __init__(
        self, module: Any, device: str, policy: KernelPolicy = KernelPolicy.AUTO, kernel: NewKernel = CudaKernel
    ) -> None:
        self._linear = LinearMakers(module, None if policy is KernelPolicy.OFF else kernel)
        none = device != "cuda" or policy is KernelPolicy.OFF
        dtype = mx.float32 if none else self._linear.dtype
        self._experts = ExpertMakers(dtype, None if none else kernel)
        self._mixtures = MixtureMakers(dtype, None if none else kernel, self._experts, self._linear.tools_for)
        self._module = module
        self._blocks = CompiledBlocks(module) if device == "cpu" else None
        super().__init__(module, self._makers_for(device))

    def _makers_for(self, device: str) -> Makers:
        if device == "cuda":
            return {**self._linear.makers, **self._experts.makers, **self._mixtures.makers}
        if device == "cpu":
            return {
                **CpuLinearMakers().makers,
                **PlainLinearMakers(self._module).makers,
                **dense_experts.makers(),
                **norms_cpu.makers(),
                **RotaryMakers().makers,
            }
        return {}

    def _maker_of(self, layer: Any) -> Maker | None:
        return super()._maker_of(layer) or (None if self._blocks is None else self._blocks.maker_of(layer))

    def restrict(self, modules: Sequence[Any] | None) -> None:
        super().restrict(modules)
        self._linear.reset()

    @contextmanager
    def traced(self) -> Iterator[None]:
        orders = self._linear.orders
        for order in orders:
            order.restart()
        try:
            yield
        finally:
            for order in orders:
                order.restart()

    @property
    def statuses(self) -> list[KernelStatus]:
        """State of the replaced layers, and of the kernels that they use."""
        return [self._status(), *self._linear.statuses(), *self._experts.statuses(self.rejected)]

    def _status(self) -> KernelStatus:
        name = KernelName.REPLACED_LAYERS
        if self.rejected:
            reasons = "; ".join(f"{label}: {reason}" for label, reason in self.rejected.items())
            return KernelStatus(name, KernelState.FAILED, reasons)
        if not len(self):
            return not_applicable(name, "no layer of the model would be faster")
        return KernelStatus(name, KernelState.ACTIVE, ", ".join(f"{n} {label}" for label, n in self.labels.items()))
