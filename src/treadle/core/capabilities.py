"""Capabilities of a runner and its model: what its owner says of itself when it is ready, in plain values."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .compute_path import ComputePath
from .image import VisionCapabilities
from .pooling import EmbeddingCapabilities


class Sharing(StrEnum):
    """Ways to reuse a running sequence's prefix."""

    MARKED = "marked"  # a copy, where a plan asked for one to be kept
    COPIED = "copied"  # a copy of all that it has computed
    HELD = "held"  # the same blocks: those count once
    HELD_MARKED = "held-marked"  # the same blocks, up to positions that a plan asked to keep

    @property
    def holds(self) -> bool:
        """Whether sequences with a common prefix hold the same blocks."""
        return self in (Sharing.HELD, Sharing.HELD_MARKED)

    @property
    def marks(self) -> bool:
        """Whether only the positions that plans ask to keep can be reused."""
        return self in (Sharing.MARKED, Sharing.HELD_MARKED)


class KvCapabilities(msgspec.Struct, frozen=True, omit_defaults=True):
    """Cache memory of a runner.

    A running sequence of n tokens holds about `row_bytes + n * token_bytes` bytes, all of them together at most
    `budget_bytes` (0: no limit). Memory is given out in `blocks` blocks of `block` tokens (0 blocks: no limit). `dtype`
    is the type in which keys and values are stored. `prefix_block`: tokens of a block whose events WatchBlocks reports
    (0: it reports none).
    """

    token_bytes: int = 0
    row_bytes: int = 0
    budget_bytes: int = 0
    block: int = 1
    blocks: int = 0
    dtype: str = ""
    prefix_block: int = 0


class StepCost(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """Seconds of a step in which `rows` sequences decode, and compute `tokens` tokens in all."""

    rows: int
    tokens: int
    seconds: float


class SpeculationCapabilities(msgspec.Struct, frozen=True, omit_defaults=True):
    """Speculative decoding of a runner.

    - `drafters`: what proposes tokens, such as "lookup"; empty where nothing does, for the `reason`.
    - `draft_tokens`: most draft tokens that a decode row may verify.
    - `lookahead`: a step may be started while one that verifies drafts is in flight.
    - `plain`, `verifying`: measured costs of decode steps that follow each other as `StepCapabilities.lookahead` says,
      and of steps that verify drafts, from their start to their result.
    """

    drafters: tuple[str, ...] = ()
    reason: str = ""
    draft_tokens: int = 0
    lookahead: bool = False
    plain: tuple[StepCost, ...] = ()
    verifying: tuple[StepCost, ...] = ()


class SpecPrefillCapabilities(msgspec.Struct, frozen=True, omit_defaults=True):
    """SpecPrefill of a runner.

    - `scorer`: the model that scores prompts; empty where there is none.
    - `keep`: share of the scored tokens that is prefilled.
    - `min_tokens`: least tokens of a prompt, behind its cached prefix, for which that is done.
    - `longest`: most tokens of a prompt that the scorer takes.
    - `rows`, `blocks`: prompts that are scored at the same time at most, and blocks of `block` tokens of the scorer's
      cache for all of them (0: no limit).
    - `prefill_tokens`: most tokens that a step scores (0: as many as it may compute of prompts).
    - `prefill_quantum`, `chunk_sizes`, `chunks`: of the scorer, as those of StepCapabilities.
    """

    scorer: str = ""
    keep: float = 1.0
    min_tokens: int = 0
    longest: int = 0
    rows: int = 1
    block: int = 1
    blocks: int = 0
    prefill_tokens: int = 0
    prefill_quantum: int = 0
    chunk_sizes: tuple[int, ...] = ()
    chunks: tuple[StepCost, ...] = ()


class StepCapabilities(msgspec.Struct, frozen=True, omit_defaults=True):
    """Steps of a runner: the facts that its scheduler needs.

    - `lookahead`: steps that may be started before the oldest one is finished, beyond one.
    - `prefill_tokens`: most prompt tokens of a step (0: no limit).
    - `prefill_quantum`: chunks of prompts are best multiples of it (0: any length).
    - `chunk_sizes`: best numbers of prompt tokens of a step, ascending (empty: any number).
    - `speculation`: tokens of a sequence that are drafted and verified in one step.
    - `spec_prefill`: prompts that are prefilled in part.
    - `prefix_cache`: prompts are reused; `sharing` says what can be reused of running sequences.
    - `decode_step_s`, `prompt_token_s`: seconds of a decode step with all slots taken and of a prompt token, measured
      in the warm-up (0: not measured).
    - `chunks`: seconds of chunks of prompts by themselves, shortest first (empty: not measured).
    """

    lookahead: int = 0
    prefill_tokens: int = 0
    prefill_quantum: int = 0
    chunk_sizes: tuple[int, ...] = ()
    speculation: SpeculationCapabilities = SpeculationCapabilities()
    spec_prefill: SpecPrefillCapabilities = SpecPrefillCapabilities()
    prefix_cache: bool = False
    sharing: Sharing = Sharing.COPIED
    decode_step_s: float = 0.0
    prompt_token_s: float = 0.0
    chunks: tuple[StepCost, ...] = ()


class Capabilities(msgspec.Struct, frozen=True, omit_defaults=True):
    """Description of a runner and its model, in plain values. `context` is the longest sequence in tokens;
    `compute` are the backend and kernels that run the model, with reasons against better ones. `grammars`: constraints
    can be enforced. `fast_forward`: tokens that one leaves no choice about can be taken several a step. `modalities`
    are what prompts may hold, such as "image", encoded by `vision`; `no_images` says why images are none of them, where
    the model has a tower. `embedding`: what sequences with `pooling` give."""

    model: str
    architecture: str
    vocabulary: int
    context: int
    device: str
    dtype: str
    parameters: int = 0
    weight_bytes: int = 0
    kv: KvCapabilities = KvCapabilities()
    steps: StepCapabilities = StepCapabilities()
    modalities: tuple[str, ...] = ("text",)
    no_images: str = ""
    vision: VisionCapabilities = VisionCapabilities()
    path: str = "batched"  # or serialized
    grammars: bool = True
    fast_forward: bool = False
    compute: ComputePath = ComputePath()
    embedding: EmbeddingCapabilities = EmbeddingCapabilities(unavailable="this engine makes no embeddings")
    details: dict[str, str] = {}  # for people: which BLAS answered, how many threads
