"""Choice of a model's KV backend: the best one that supports it and passes its self-test, and its memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import mlx.core as mx

from ...core.compute_path import KernelPolicy
from ...errors import ConfigError
from ..device import memory as mem
from ..device.owner_thread import OutOfMemory
from ..kv.backend import Unsupported
from ..kv.padded.backend import PaddedConfig
from ..kv.paged.backend import PagedConfig
from ..kv.paged.kernels import Kernels
from ..kv.planned_attention import pad_to
from ..layers.choose import FasterLayers
from . import candidates
from .backend_choice import BackendChoice, BackendRequest, Rejection
from .backend_self_test import SelfTestFailed
from .padded_self_test import reason_not_batched, shares_prefill
from .probe import Probe
from .profile_run import step_bytes

_log = logging.getLogger(__name__)
T = TypeVar("T")
ENOUGH = 0.4
"""Of the memory that the weights leave: less for caches means shorter steps."""
LEAST_STEP = 256
_FIX = "leave `kv_bits` out, and lower `context` or `max_running` where memory is short"


def check_bits(kv_bits: int | None, device: str) -> None:
    """Raises ConfigError for keys and values of so many bits where nothing reads them at a gain."""
    if kv_bits == 4:
        raise ConfigError(
            f"keys and values of 4 bits change what a model says (docs/performance.md has figures): use 8, or {_FIX}",
            param="kv_bits",
        )
    if kv_bits and device != "cuda":
        raise ConfigError(
            f"only the CUDA kernels read keys and values of {kv_bits} bits at a gain, and this is {device}: {_FIX}",
            param="kv_bits",
        )


def choose(found: Probe, request: BackendRequest, kernels: type[Kernels] = Kernels) -> BackendChoice:
    """The backend for the model of which `found` has the reference: paged on CUDA, with fused layers if possible, else
    contiguous, else padded, else serial.

    Raises ConfigError where `kv_bits` were asked for and can't be had, or where there is no memory for a step.
    """
    reference = found.reference
    layers = reference.layers = FasterLayers(reference.module, request.device, request.kernels, kernels.kernel)
    choosing = _Choosing(found, request, kernels)
    choice = choosing.asked() if request.padded else choosing.best()
    return replace(choice, rejected=tuple(choosing.rejected), layers=tuple(layers.statuses))


class _Choosing:
    """One choice: a method for each backend, which returns None where it is rejected."""

    def __init__(self, found: Probe, request: BackendRequest, kernels: type[Kernels]) -> None:
        self.rejected: list[Rejection] = []
        self._found = found
        self._request = request
        self._kernels = kernels

    def paged(self) -> BackendChoice | None:
        request = self._request
        if request.device != "cuda":
            self._reject("paged", f"its kernels are for CUDA, and this is {request.device}")
            return None
        if request.kernels is KernelPolicy.OFF:
            self._off()
            return None
        budget = mem.kv_budget(request.memory, request.device, mem.PAGES_SHARE)
        make = partial(
            candidates.paged,
            self._found.reference,
            budget,
            self.rejected,
            max_running=request.max_running,
            step_tokens=request.prefill_tokens,
        )
        bits, keep_prefixes = request.kv_bits or 16, request.keep_prefixes
        config = self._tried("paged", partial(make, keep_prefixes=keep_prefixes, bits=bits, kernels=self._kernels))
        if config is not None:
            return _sized(config, self._found.reference.module, budget, request)
        reason = self.rejected[-1].reason
        if request.kv_bits:
            raise ConfigError(
                f"no keys and values of {request.kv_bits} bits for this model: {reason}. {_FIX}", param="kv_bits"
            )
        _log.warning("attention kernels are not used: %s; decoding is slower for several requests at once", reason)
        return None

    def best(self) -> BackendChoice:
        return self.paged() or self.contiguous() or self.padded()

    def asked(self) -> BackendChoice:
        """mlx-lm's caches, as they were asked for."""
        for backend in ("paged", "contiguous"):
            self._reject(backend, "not asked for")
        return self.padded()

    def contiguous(self) -> BackendChoice | None:
        request, cost, budget = self._request, self._found.kv, self._budget
        make = partial(candidates.contiguous, self._found.reference, cost, budget, request, self.rejected)
        config = self._tried("contiguous", make)
        return None if config is None else BackendChoice(config, config.cost, budget)

    def padded(self) -> BackendChoice:
        request, cost, reference = self._request, self._found.kv, self._found.reference
        not_batched = self._reason_not_batched()
        if not_batched:
            self._reject("padded", not_batched)
        config = PaddedConfig(
            reference.library,
            request.device,
            cost,
            self._budget,
            batched=not not_batched,
            shared_prefill=not not_batched and shares_prefill(reference, pad_to(request.device)),
            keep_prefixes=request.keep_prefixes,
            selection=reference.library.selection(reference.module),
        )
        return BackendChoice(config, cost, self._budget)

    def _reason_not_batched(self) -> str:
        """Return the reason against batches; empty if there is none. Where only faster layers are at fault, they are
        not used."""
        reference = self._found.reference
        layers = reference.layers
        layers.install()
        reason = reason_not_batched(reference)
        if not reason or not len(layers):
            return reason
        with layers.originals():
            own = reason_not_batched(reference)
        if not own:
            layers.reject(reason)
        return own

    @cached_property
    def _budget(self) -> int:
        """Bytes for sequences outside of pages."""
        return mem.kv_budget(self._request.memory, self._request.device)

    def _tried(self, backend: str, make: Callable[[], T]) -> T | None:
        try:
            return make()
        except Unsupported as error:
            self._reject(backend, str(error), isinstance(error, SelfTestFailed))
            return None

    def _off(self) -> None:
        """No custom kernels, as the user wants it."""
        if self._request.kv_bits:
            raise ConfigError(
                f"only custom kernels read keys and values of {self._request.kv_bits} bits, and they are off: {_FIX}",
                param="kv_bits",
            )
        self._reject("paged", "custom kernels are off (`kernels`)")

    def _reject(self, backend: str, reason: str, failed: bool = False) -> None:
        self.rejected.append(Rejection(backend, reason, failed))


def _sized(config: PagedConfig, module: Any, budget: int, request: BackendRequest) -> BackendChoice:
    """`config` with as many pages as the profiled steps leave memory for, unless a budget was given. Where steps of the
    requested length leave too little, shorter ones are profiled."""
    cost = config.cost
    if request.memory is not None:
        return BackendChoice(config, cost, budget)
    tokens = request.prefill_tokens
    while (left := _left(config, module, tokens, request.device)) < ENOUGH * budget and tokens > LEAST_STEP:
        tokens = max(LEAST_STEP, tokens // 2)
    if not left:
        raise ConfigError(
            f"the weights leave no memory for a step of {tokens} tokens of prompts: use a smaller or a quantized model",
            param="prefill_tokens",
        )
    if tokens < request.prefill_tokens:
        _log.info(
            "memory is short: a step computes up to %d prompt tokens, not %d, and long prompts take longer",
            tokens,
            request.prefill_tokens,
        )
    budget = min(budget, left)
    return BackendChoice(replace(config, step_tokens=tokens).with_memory(budget), cost, budget, tokens)


def _left(config: PagedConfig, module: Any, tokens: int, device: str) -> int:
    """Bytes that steps of `tokens` tokens leave; 0 where not even these fit."""
    try:
        steps = step_bytes(config, module, tokens)
    except OutOfMemory:
        return 0
    finally:
        mx.clear_cache()
    return mem.left_by(steps, device)
