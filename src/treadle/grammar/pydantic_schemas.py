"""JSON Schemas of Pydantic's types, for the library. Pydantic is imported on the first call."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidRequest, one_line


def schema_of(model: Any) -> dict[str, Any]:
    """Return the JSON Schema of a BaseModel class, a TypeAdapter, or any type that a TypeAdapter takes, such as a
    dataclass, a TypedDict or `list[Model]`. Raises InvalidRequest where Pydantic has no schema for it."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError

    try:
        adapter = model if isinstance(model, TypeAdapter) else TypeAdapter(model)
        return adapter.json_schema()
    except (PydanticUserError, PydanticInvalidForJsonSchema) as error:
        raise InvalidRequest(f"Pydantic has no JSON Schema for {model!r}: {one_line(error)}") from error
