"""Limits of requests as they are sent to text workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..validate import Limits

if TYPE_CHECKING:
    from ...text import TextModel


class WorkerLimits(msgspec.Struct, frozen=True):
    """`Limits` without the facts that a worker's own text model has."""

    vocabulary: int
    context: int
    max_tokens: int | None
    spec_prefill: bool

    @classmethod
    def of(cls, limits: Limits) -> WorkerLimits:
        return cls(limits.vocabulary, limits.context, limits.max_tokens, limits.spec_prefill)

    def with_model(self, model: TextModel) -> Limits:
        """Return the whole limits, in the worker."""
        return Limits(
            vocabulary=self.vocabulary,
            context=self.context,
            max_tokens=self.max_tokens,
            eos_token_ids=model.eos_token_ids,
            sampling=model.default_sampling,
            spec_prefill=self.spec_prefill,
        )
