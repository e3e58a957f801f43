"""The compute path of a loaded model: its KV backend and the state of each custom kernel, as the start found them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...core.compute_path import (
    Backend,
    ComputePath,
    KernelName,
    KernelPolicy,
    KernelState,
    KernelStatus,
)
from ...errors import ConfigError
from ..device.self_test import not_applicable
from ..kv.backend import KvConfig
from ..kv.encoder.backend import EncoderConfig
from ..kv.padded.backend import PaddedConfig
from ..kv.paged.backend import PagedConfig
from .backend_choice import BackendChoice
from .reference import Reference

_PAGED = (KernelName.DECODE_ATTENTION, KernelName.PREFILL_ATTENTION, KernelName.PAGE_WRITES)
_FUSED = (KernelName.FUSED_LAYERS, KernelName.COMPILED_PASSES)
_BACKENDS = ("fused layers", "narrowed last layer", "paged", "contiguous", "padded")
_ELSEWHERE = "for CUDA only"
_TURNED_OFF = "turned off by `kernels`"
_UNUSED = "this backend does not use it"


def compute_path(
    choice: BackendChoice, device: str, policy: KernelPolicy, own: Iterable[KernelStatus], reference: Reference
) -> ComputePath:
    """The path of a model with the backend of `choice` on `device`. `own` are the states of kernels that are not of a
    KV backend; `reference` judged the backend."""
    config = choice.config
    possible = _BACKENDS if device == "cuda" else (_BACKENDS[1], *_BACKENDS[3:])
    known = {status.name: status for status in own}
    known |= {status.name: status for status in choice.layers if status.state is not KernelState.NOT_APPLICABLE}
    if device == "cuda" and policy is not KernelPolicy.OFF:
        known |= {status.name: status for status in _of_backend(choice)}
    elif device == "cpu":
        known |= {status.name: status for status in choice.layers if status.state is not KernelState.NOT_APPLICABLE}
    return ComputePath(
        backend=Backend(config.name),
        best=_best(config, device),
        fused=config.fused,
        shared_prefill=not isinstance(config, PaddedConfig) or config.shared_prefill,
        kernels=tuple(known.get(name) or _missing(name, device, policy) for name in KernelName),
        why=tuple(f"{one.backend}: {one.reason}" for one in choice.rejected if one.backend in possible),
        tested_tokens=reference.tested_tokens,
        deviation=round(reference.deviation, 2),
    )


def _best(config: KvConfig, device: str) -> Backend:
    if isinstance(config, EncoderConfig):
        return Backend.ENCODER  # there is no other for it
    return Backend.PAGED if device == "cuda" else Backend.CONTIGUOUS


def check_required(path: ComputePath, name: str) -> None:
    """Raises ConfigError, in one line, where the path of model `name` falls short of `kernels` "require"."""
    if shortfalls := path.shortfalls():
        raise ConfigError(
            f"`kernels` is require, and {name} would run {path.backend} without all of them: {'; '.join(shortfalls)}; "
            "leave `kernels` out to serve it like this",
            param="kernels",
        )


def _of_backend(choice: BackendChoice) -> Iterable[KernelStatus]:
    """States of the kernels of a backend and its layers, as far as the choice tells them."""
    config = choice.config
    if isinstance(config, PagedConfig) and config.fused:
        yield from _fused(choice, config.decoder)
        return
    yield from choice.layers
    if not isinstance(config, PagedConfig):
        yield from _rejected(choice, "paged", *_PAGED, *_FUSED)
        return
    yield from (KernelStatus(name, KernelState.ACTIVE) for name in _PAGED)
    yield from _rejected(choice, "fused layers", KernelName.FUSED_LAYERS)
    if config.compiled:
        yield KernelStatus(KernelName.COMPILED_PASSES, KernelState.ACTIVE)
    yield from _rejected(choice, "compiled passes", KernelName.COMPILED_PASSES)


def _fused(choice: BackendChoice, decoder: Any) -> Iterable[KernelStatus]:
    yield from (KernelStatus(name, KernelState.ACTIVE) for name in (*_PAGED, *_FUSED))
    yield from choice.layers
    yield from decoder.product_kernels
    if not decoder.own_modules:
        yield not_applicable(KernelName.REPLACED_LAYERS, "all layers are fused")
        return
    reason = f"all but {decoder.own_parts}, which are the model's own"
    yield KernelStatus(KernelName.FUSED_LAYERS, KernelState.ACTIVE, reason)


def _rejected(choice: BackendChoice, backend: str, *names: KernelName) -> Iterable[KernelStatus]:
    """States of the kernels `names` of a better backend that was rejected."""
    rejection = choice.rejection(backend)
    if rejection is not None:
        state = KernelState.FAILED if rejection.failed else KernelState.NOT_APPLICABLE
        yield from (KernelStatus(name, state, rejection.reason) for name in names)


def _missing(name: KernelName, device: str, policy: KernelPolicy) -> KernelStatus:
    """The state of a kernel that was not tested."""
    if name is KernelName.BLAS:
        return not_applicable(name, "for Linux CPUs only")
    if device != "cuda":
        return not_applicable(name, _ELSEWHERE)
    return (
        KernelStatus(name, KernelState.OFF, _TURNED_OFF)
        if policy is KernelPolicy.OFF
        else not_applicable(name, _UNUSED)
    )
