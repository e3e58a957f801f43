"""Types of the requests' fields: strict, and with the ranges that the OpenAPI document names.

The ranges here are documentation: `fronts.validate` checks them, for every front, with messages of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from ..cache_salts import CONTROLS
from ..cache_salts import MAX_CHARS as MAX_SALT_CHARS
from ..service_tiers import TIERS
from ..validate import (
    MAX_LOGIT_BIAS,
    MAX_PRIORITY,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TIMEOUT_S,
    MAX_TOKENS,
)

Schema: TypeAlias = dict[str, Any]

TOKEN_ID_PATTERN = "^(0|[1-9][0-9]{0,17})$"


@dataclass(frozen=True, eq=False)
class Documented:
    """Annotation that adds keywords to a type's JSON schema and checks nothing."""

    keywords: Mapping[str, Any]

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        return {**handler(core), **self.keywords}


def span(low: float | None = None, high: float | None = None, *, above: bool = False) -> Documented:
    """Document a number from `low` (exclusive, with `above`) to `high`."""
    bounds = {"exclusiveMinimum" if above else "minimum": low, "maximum": high}
    return Documented({name: bound for name, bound in bounds.items() if bound is not None})


def size(**keywords: Any) -> Documented:
    """Document limits of a string, an array or an object, by their JSON Schema names."""
    return Documented(keywords)


def whole(value: Any) -> Any:
    """Return 2.0 as 2, as JSON does not distinguish them, and other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def all_whole(values: Any) -> Any:
    """Return the list with its integral floats as ints; the same list if it has none."""
    if isinstance(values, list) and float in set(map(type, values)):
        return [whole(value) for value in values]
    return values


Whole = Annotated[int, BeforeValidator(whole)]
TokenCount = Annotated[Whole, span(1, MAX_TOKENS)]
Unit = Annotated[float, span(0, 1)]
Penalty = Annotated[float, span(-2, 2)]
TopK = Annotated[Whole, span(-1, 2**31 - 1)]
Seed = Annotated[Whole, span(-(2**63), 2**63 - 1)]
Priority = Annotated[Whole, span(-MAX_PRIORITY, MAX_PRIORITY)]
ServiceTier = Annotated[str, Documented({"enum": list(TIERS)})]
Timeout = Annotated[float, span(0, MAX_TIMEOUT_S, above=True)]
Temperature = Annotated[float, span(0, 2)]
TopP = Annotated[float, span(0, 1, above=True)]
RepetitionPenalty = Annotated[float, span(0, 10, above=True)]

Text = Annotated[str, size(minLength=1)]
StopString = Annotated[str, size(minLength=1, maxLength=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True), size(maxItems=MAX_STOPS)]
TokenId = Annotated[int, span(0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), BeforeValidator(all_whole)]
StopTokenIds = Annotated[TokenIds, size(maxItems=MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[
    dict[str, Annotated[float, span(-100, 100)]],
    size(maxProperties=MAX_LOGIT_BIAS, propertyNames={"pattern": TOKEN_ID_PATTERN}),
]
CacheSalt = Annotated[str, size(minLength=1, maxLength=MAX_SALT_CHARS, pattern=f"^[^{CONTROLS}]+$")]


def neutral_only(description: str, *allowed: Any) -> Any:
    """Define a field that accepts only null and the values `allowed`."""
    return Field(None, description=description, json_schema_extra={"enum": [None, *allowed]})


def optional(description: str, **extra: Any) -> Any:
    """Define an optional field; `extra` are keywords of its JSON schema (`examples`)."""
    return Field(None, description=description, json_schema_extra=extra or None)
