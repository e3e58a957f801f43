"""Request for a KV backend, and the choice for a model with the reasons against better ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ...config import Settings
from ...core.compute_path import KernelPolicy, KernelStatus
from ..kv.backend import KvConfig
from ..kv.cost import KvCost


@dataclass(frozen=True)
class BackendRequest:
    """A device, and what its KV backend has to do.

    `memory` is the byte budget of all sequences (None: a share of what is free), for up to `max_running` sequences,
    beside steps of `prefill_tokens` tokens of prompts. `keep_prefixes` asks for the prefix cache, `kv_bits` 8 for int8
    keys and values, `padded` for mlx-lm's caches whatever the model, and `kernels` which custom kernels may be used.
    """

    device: str
    memory: int | None
    max_running: int
    keep_prefixes: bool
    kv_bits: int | None = None
    prefill_tokens: int = Settings.prefill_tokens
    padded: bool = False
    kernels: KernelPolicy = KernelPolicy.AUTO


class Rejection(NamedTuple):
    """A better `backend` that was not chosen, and the reason, in words for an operator.

    `backend` is "fused layers", "compiled passes", "narrowed last layer", "paged", "contiguous" or "padded"; `failed`
    says whether its self-test failed, where it should have served the model.
    """

    backend: str
    reason: str
    failed: bool = False


@dataclass(frozen=True)
class BackendChoice:
    """The KV backend of a model, as it was chosen.

    A sequence takes `cost`, and all together have `budget` bytes (0: unknown). A step may compute `prefill_tokens`
    tokens of prompts (0: as many as are asked for). `rejected` are the better backends, best first. `layers` are the
    states of faster layers and their kernels, for parts that are not fused.
    """

    config: KvConfig
    cost: KvCost
    budget: int
    prefill_tokens: int = 0
    rejected: tuple[Rejection, ...] = ()
    layers: tuple[KernelStatus, ...] = ()

    def with_memory(self, budget: int) -> BackendChoice:
        """This choice with `budget` bytes of cache memory."""
        return replace(self, config=self.config.with_memory(budget), budget=budget)

    def for_rows(self, max_running: int) -> BackendChoice:
        """This choice for `max_running` sequences."""
        return replace(self, config=self.config.for_rows(max_running))

    def rejection(self, backend: str) -> Rejection | None:
        """The rejection of `backend`; None where it was not rejected."""
        return next((rejection for rejection in self.rejected if rejection.backend == backend), None)

    def reason_against(self, backend: str) -> str:
        """The reason why `backend` was not chosen; empty where it was not rejected."""
        found = self.rejection(backend)
        return "" if found is None else found.reason
