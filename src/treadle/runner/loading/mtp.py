"""Loader of a model's MTP head, out of the same folder, with a KV backend of its own in the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...core.compute_path import KernelPolicy
from ...errors import ConfigError, ModelError, one_line
from ...units import size
from ..base import Progress, RunnerBroken
from ..device.self_test import FAULTS
from ..kv.backend import KvConfig, Unsupported
from ..kv.planned_attention import prefill_quantum
from ..layers.choose import FasterLayers
from ..mlxlm import MtpHead, NoHead, family_of, finish_head
from . import candidates
from .backend_choice import BackendChoice, BackendRequest, Rejection
from .config_oddities import read_config
from .draft import ModelPair, divided
from .loader import LoadOptions
from .model import LoadedModel
from .probe import Probe, probe
from .weights import for_device, read_weights

_BACKENDS = ("paged", "contiguous")
_TOKENS = 4096
"""Tokens that the head's cache has room for in self-tests, before memory is divided."""


@dataclass(frozen=True)
class HeadedModel:
    """A model and its MTP head, each with its part of the memory for caches. States of the model are multiplied by
    `scale` before the head takes them, and its own by `own_scale` (None: not)."""

    target: LoadedModel
    head: LoadedModel
    scale: Any | None = None
    own_scale: Any | None = None


def may_have_head(model: LoadedModel) -> bool:
    """Whether MTP heads of a model's architecture are known, and could be used beside it."""
    return family_of(model.module) is not None and not _reason_against(model)


def load_head(
    target: LoadedModel, folder: Path, options: Mapping[str, Any], progress: Progress = lambda stage: None
) -> HeadedModel:
    """Load the MTP head in `folder`, that of `target`, which was loaded with `options`, and divide the memory for
    caches. Details of the target describe it. Raises NoHead where there is none that can be used."""
    if reason := _reason_against(target):
        raise NoHead(reason)
    progress("reading the MTP head")
    try:
        head, nbytes = _read(target, folder)
        found = probe(target.library, head.module, target.context, folder)
        choice = _choice(found, head, LoadOptions(**options).request(target.device))
    except (NoHead, ConfigError, RunnerBroken):
        raise
    except (*FAULTS, ModelError, Unsupported) as error:
        raise NoHead(f"its MTP weights can't be used: {one_line(error)}") from error
    finally:
        mx.clear_cache()
    own = replace(target, module=head.module, weight_bytes=nbytes, choice=choice, layers=found.reference.layers)
    try:
        pair = divided(target, own, asked=options.get("memory") is not None)
    except ConfigError as error:
        raise NoHead(f"its MTP weights take {size(nbytes)} and leave no memory for caches") from error
    return _described(pair, nbytes, head)


def _described(pair: ModelPair, nbytes: int, head: MtpHead) -> HeadedModel:
    config = pair.draft.choice.config
    cache = f", up to {size(pair.draft.kv_budget_bytes)} of KV cache" if pair.draft.kv_budget_bytes else ""
    about = f"{size(nbytes)} of weights{cache}; {config.name} KV backend"
    target = replace(
        pair.target,
        weight_bytes=pair.target.weight_bytes + nbytes,
        details={**pair.target.details, "MTP head": about},
    )
    return HeadedModel(target, pair.draft, head.scale, head.own_scale)


def _reason_against(target: LoadedModel) -> str:
    """Return why no head can be used beside a model; empty where one could."""
    config = target.choice.config
    if target.embedding.only:
        return "it generates no text"
    if config.name not in _BACKENDS or (config.name == "contiguous" and prefill_quantum(target.device)):
        return f"its KV backend, {config.name}, can't verify draft tokens"
    if config.selection is None or target.embedding.unavailable:
        return "its hidden states are not known"
    return ""


def _read(target: LoadedModel, folder: Path) -> tuple[MtpHead, int]:
    """Return the head in `folder`, in memory, and the bytes of its weights."""
    library = target.library
    module = library.load_head(folder, target.module, read_config(folder))
    module = for_device(module, library, library.parameters(module), target.device)
    nbytes = read_weights(module, folder, target.device)
    return finish_head(module, target.module), nbytes


def _choice(found: Probe, head: MtpHead, request: BackendRequest) -> BackendChoice:
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
