"""Limits of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from .capabilities import Sharing, SpecPrefillCapabilities, StepCost
from .image import VisionCapabilities


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of the scheduler.

    - `max_running`: slots.
    - `prefill_tokens`: most prompt tokens of a step.
    - `prefill_quantum`: chunks that do not end a prompt are multiples of it; 0 for any length.
    - `chunk_sizes`: allowed prompt tokens of a step, ascending; empty for any number.
    - `chunks`: seconds of prompts' chunks by themselves, if they are known.
    - `kv_blocks` of `kv_block` tokens: cache memory. With 0 blocks, sequences reserve up to `kv_tokens` tokens (0: no
      limit) instead.
    - `lookahead`: steps in flight beside the oldest one.
    - `draft_tokens`: most draft tokens of a decode row. `drafts_resolved`: a step may follow one that verifies drafts
      before that is applied.
    - `spec_prefill`: prompts that are prefilled in part.
    - `vision`: the tower that encodes images.
    - `prefix_cache`: the runner reuses prompts, those of running sequences as `sharing` says.
    """

    max_running: int
    prefill_tokens: int
    kv_tokens: int = 0
    prefill_quantum: int = 0
    chunk_sizes: tuple[int, ...] = ()
    chunks: tuple[StepCost, ...] = ()
    kv_block: int = 1
    kv_blocks: int = 0
    lookahead: int = 0
    draft_tokens: int = 0
    drafts_resolved: bool = False
    spec_prefill: SpecPrefillCapabilities = field(default_factory=SpecPrefillCapabilities)
    prefix_cache: bool = False
    sharing: Sharing = Sharing.COPIED
    vision: VisionCapabilities = field(default_factory=VisionCapabilities)

    @property
    def capacity(self) -> int:
        """Most tokens of one sequence; 0 for any number."""
        return self.kv_blocks * self.kv_block or self.kv_tokens
