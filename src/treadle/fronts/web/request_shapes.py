"""Base of the requests' shapes, the fields that several dialects have, and fields that are known and not acted on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, create_model

from .fields import (
    CacheSalt,
    LogitBias,
    Penalty,
    Priority,
    RepetitionPenalty,
    Seed,
    ServiceTier,
    StopString,
    StopStrings,
    Temperature,
    TopK,
    TopP,
    Unit,
    Whole,
    neutral_only,
    optional,
    span,
)

ALIASED = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    "seed",
)
"""Fields of `Sampling` that the validator takes as they are, and that other servers have under other names too."""
UNALIASED = ("min_tokens", "ignore_eos", "logit_bias", "priority", "cache_salt", "speculate", "spec_prefill")
"""Further fields of `Sampling` that the validator takes as they are."""


class Strict(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class Sampling(Strict):
    """Fields of sampling, of ends and of order that chats, completions and responses share."""

    temperature: Temperature | None = optional("0 (greedy) to 2. Default: the model's, else 1.")
    top_p: TopP | None = optional(
        "Sample from the likeliest tokens of this total probability. Default: the model's, else 1."
    )
    top_k: TopK | None = optional("Sample from the likeliest k tokens; 0 or -1 is off.")
    min_p: Unit | None = optional("Sample from tokens at least this likely, relative to the likeliest; 0 is off.")
    stop: StopString | StopStrings | None = optional("Up to 16 strings that end the answer; they are not shown.")
    min_tokens: Annotated[Whole, span(0, 2**31 - 1)] | None = optional(
        "The model's end tokens and stop strings do not end the answer before so many tokens; its limit does."
    )
    ignore_eos: bool | None = optional("True: the model's own end tokens and stop strings do not end the answer.")
    seed: Seed | None = optional("64 bits, signed. The same seed gives the same choice.")
    presence_penalty: Penalty | None = optional("-2 to 2; 0 is off.")
    frequency_penalty: Penalty | None = optional("-2 to 2; 0 is off.")
    repetition_penalty: RepetitionPenalty | None = optional(
        "Above 0, at most 10; 1 is off. Looks at prompt and answer."
    )
    logit_bias: LogitBias | None = optional("Token id to bias, -100 to 100.")
    priority: Priority | None = optional("Lower goes first; 0 is normal.")
    service_tier: ServiceTier | None = optional(
        "A priority by OpenAI's names: flex goes behind others, priority before them. The answer names the tier used."
    )
    cache_salt: CacheSalt | None = optional(
        "Only requests of the same key and salt reuse each other's cached prompts. 1 to 256 characters."
    )
    speculate: bool | None = optional("False drafts no tokens for this answer, which is the same with and without.")
    spec_prefill: bool | None = optional(
        "False prefills the whole prompt, where the server has SpecPrefill; true needs that. See `--spec-prefill`."
    )
    close_at_limit: bool | None = optional(
        "True: where the limit of tokens comes near, only tokens are allowed that complete the JSON or the calls."
    )


def extended(
    name: str, base: type[BaseModel], neutral: Mapping[str, tuple[Any, ...]], free: tuple[str, ...], **more: Any
) -> type[Any]:
    """Return `base` with the fields that are known and not acted on, and with `more`."""
    fields: dict[str, Any] = {
        key: (Any, neutral_only(_accepted(allowed), *allowed)) for key, allowed in neutral.items()
    }
    fields |= {key: (Any, optional("Accepted and not used.")) for key in free}
    return create_model(name, __base__=base, __doc__=base.__doc__, **fields, **more)


def _accepted(allowed: tuple[Any, ...]) -> str:
    return "Accepted only at a value that asks for nothing." if allowed else "Accepted only at null."
