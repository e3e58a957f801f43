"""A model and a head that drafts for it, which reads its hidden states: a KV backend of the head's own in the same
memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ...core.compute_path import KernelPolicy
from ...errors import ConfigError, ModelError, one_line
from ...units import size
from ..base import RunnerBroken
from ..device.self_test import FAULTS
from ..kv.backend import KvConfig, Unsupported
from ..kv.planned_attention import prefill_quantum
from ..layers.choose import FasterLayers
from ..mlxlm import DraftHead, NoHead
from . import candidates
from .backend_choice import BackendChoice, BackendRequest, Rejection
from .draft import divided
from .loader import LoadOptions
from .model import LoadedModel
from .probe import Probe, probe

_BACKENDS = ("paged", "contiguous")
_TOKENS = 4096
"""Tokens that the head's cache has room for in self-tests, before memory is divided."""


class HeadKind(NamedTuple):
    """A kind of heads: the name of its `drafter`, and for people that of a head and of its `weights`."""

    drafter: str
    title: str
    weights: str


@dataclass(frozen=True)
class HeadedModel:
    """A model and its head, each with its part of the memory for caches. States of the model are multiplied by
    `scale` before the head takes them, and its own by `own_scale` (None: not). The head's logits are for tokens `ids`
    of the model (None: for all, in order)."""

    kind: HeadKind
    target: LoadedModel
    head: LoadedModel
    scale: Any | None = None
    own_scale: Any | None = None
    ids: Any | None = None

    @property
    def about(self) -> str:
        """Describe the head in one line."""
        head = self.head
        cache = f", up to {size(head.kv_budget_bytes)} of KV cache" if head.kv_budget_bytes else ""
        return f"{size(head.weight_bytes)} of weights{cache}; {head.choice.config.name} KV backend"


def reason_against(target: LoadedModel) -> str:
    """Return why no head can be used beside a model; empty where one could."""
    config = target.choice.config
    if target.embedding.only:
        return "it generates no text"
    if config.name not in _BACKENDS or (config.name == "contiguous" and prefill_quantum(target.device)):
        return f"its KV backend, {config.name}, can't verify draft tokens"
    if config.selection is None or target.embedding.unavailable:
        return "its hidden states are not known"
    return ""


def with_head(
    kind: HeadKind,
    target: LoadedModel,
    folder: Path,
    options: Mapping[str, Any],
    read: Callable[[], tuple[DraftHead, int]],
) -> HeadedModel:
    """Return `target`, which was loaded with `options`, with the head that `read` gives, and the bytes of its weights,
    out of `folder`, and divide the memory for caches. Raises NoHead where it can't be used."""
    try:
        head, nbytes = read()
        found = probe(target.library, head.module, target.context, folder)
        choice = _choice(found, head, LoadOptions(**options).request(target.device))
    except (NoHead, ConfigError, RunnerBroken):
        raise
    except (*FAULTS, ModelError, Unsupported) as error:
        raise NoHead(f"{kind.weights} can't be used: {one_line(error)}") from error
    finally:
        mx.clear_cache()
    own = replace(
        target,
        module=head.module,
        vocabulary=found.vocabulary,
        weight_bytes=nbytes,
        choice=choice,
        layers=found.reference.layers,
    )
    try:
        pair = divided(target, own, asked=options.get("memory") is not None)
    except ConfigError as error:
        raise NoHead(f"{kind.weights} take {size(nbytes)} and leave no memory for caches") from error
    both = replace(pair.target, weight_bytes=target.weight_bytes + nbytes, details={**target.details})
    return HeadedModel(kind, both, pair.draft, head.scale, head.own_scale, head.ids)


def _choice(found: Probe, head: DraftHead, request: BackendRequest) -> BackendChoice:
    """Return the KV backend of the head: pages on CUDA, without fused layers or compiled passes, as these have no place
    for its hidden states; else buffers of each row's own. Its prefixes can't be reused: they have no hidden states."""
    reference, rejected = found.reference, list[Rejection]()
    layers = reference.layers = FasterLayers(reference.module, request.device, request.kernels)
    layers.restrict(head.own)
    request = replace(request, keep_prefixes=False, kv_bits=None)
    budget = _TOKENS * max(1, found.kv.token_bytes) + request.max_running * found.kv.row_bytes
    config: KvConfig
    if request.device == "cuda" and request.kernels is not KernelPolicy.OFF:
        config = candidates.plain_pages(reference, budget, max_running=request.max_running)
        cost = config.cost
    else:
        config, cost = candidates.contiguous(reference, found.kv, budget, request, rejected), found.kv
    return BackendChoice(config, cost, budget, rejected=tuple(rejected), layers=tuple(layers.statuses))
