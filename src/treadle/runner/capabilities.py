"""Capabilities of a runner, as its scheduler, its fronts and people see them."""

from __future__ import annotations

import msgspec

from ..core.capabilities import (
    Capabilities,
    KvCapabilities,
    SpecPrefillCapabilities,
    SpeculationCapabilities,
    StepCapabilities,
)
from ..core.pooling import EmbeddingCapabilities
from .device.programs import programs_so_far
from .kv.backend import KvBackend
from .loading.model import LoadedModel
from .loading.step_costs import StepCosts
from .pooling import Embedding
from .verification import Speculation


def capabilities_of(
    model: LoadedModel,
    backend: KvBackend,
    costs: StepCosts,
    speculation: Speculation,
    spec_prefill: SpecPrefillCapabilities,
    *,
    grammars: bool,
) -> Capabilities:
    """Return the facts about `model`, and the limits of the runner that serves it with `backend`. `grammars`: it can
    follow those of structured output."""
    return Capabilities(
        model=model.name,
        architecture=model.architecture,
        vocabulary=model.vocabulary,
        context=model.context,
        device=model.device,
        dtype=model.dtype,
        parameters=model.parameters,
        weight_bytes=model.weight_bytes,
        kv=_kv_capabilities(model, backend),
        steps=_step_capabilities(model, backend, costs, speculation, spec_prefill),
        path="serialized" if backend.name == "serial" else "batched",
        grammars=grammars,
        fast_forward=grammars and backend.least_forced(1) > 0,
        compute=msgspec.structs.replace(model.compute, lookahead=backend.lookahead, programs=programs_so_far()),
        embedding=_embedding_capabilities(model.embedding),
        details=model.details,
    )


def _embedding_capabilities(embedding: Embedding) -> EmbeddingCapabilities:
    return EmbeddingCapabilities(
        dimensions=embedding.dimensions,
        poolings=embedding.poolings,
        only=embedding.only,
        unavailable=embedding.unavailable,
    )


def _kv_capabilities(model: LoadedModel, backend: KvBackend) -> KvCapabilities:
    return KvCapabilities(
        token_bytes=model.kv.token_bytes,
        row_bytes=model.kv.row_bytes,
        budget_bytes=model.kv_budget_bytes,
        block=backend.block,
        blocks=backend.blocks,
        dtype=model.kv_dtype,
        prefix_block=0 if backend.index is None else backend.index.block,
    )


def _step_capabilities(
    model: LoadedModel,
    backend: KvBackend,
    costs: StepCosts,
    speculation: Speculation,
    spec_prefill: SpecPrefillCapabilities,
) -> StepCapabilities:
    return StepCapabilities(
        lookahead=backend.lookahead,
        prefill_tokens=model.prefill_tokens,
        prefill_quantum=backend.prefill_quantum,
        chunk_sizes=backend.chunk_sizes,
        speculation=SpeculationCapabilities(
            drafters=() if speculation.drafter is None else speculation.drafter.names,
            reason=speculation.reason,
            draft_tokens=speculation.draft_tokens,
            plain=costs.plain,
            verifying=costs.verifying,
        ),
        spec_prefill=spec_prefill,
        prefix_cache=model.choice.config.keep_prefixes,
        sharing=backend.sharing,
        decode_step_s=costs.decode_step_s,
        prompt_token_s=costs.prompt_token_s,
        chunks=costs.chunks,
    )
