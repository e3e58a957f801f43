"""Parts of JSON schemas for the OpenAPI document, and types of fields that are documented by a schema."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

Schema = dict[str, Any]

REF = "#/components/schemas/"
STRING: Schema = {"type": "string"}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
FLAG: Schema = {"type": ["boolean", "null"]}
NULL: Schema = {"type": "null"}
COUNT: Schema = {"type": "integer", "minimum": 0}


def ref(name: str) -> Schema:
    """Return a reference to a named schema of the document."""
    return {"$ref": REF + name}


def listed(items: Schema, **limits: Any) -> Schema:
    """Return the schema of an array of `items`."""
    return {"type": "array", "items": items, **limits}


def shape(description: str, needed: Schema, /, **optional: Any) -> Schema:
    """Return the schema of an object with the properties `needed`, and `optional` ones."""
    return {
        "type": "object",
        "description": description,
        "properties": {**needed, **optional},
        "required": list(needed),
    }


def either(*schemas: Schema) -> Schema:
    """Return the schema of a value that fits any of `schemas`."""
    return {"anyOf": list(schemas)}


def or_null(*schemas: Schema) -> Schema:
    """Return the schema of a value that fits any of `schemas`, or is null."""
    return either(*schemas, NULL)


def object_of(needed: Schema, **optional: Schema) -> Schema:
    """Return the schema of an object with the properties `needed`, and `optional` ones, without a description."""
    return {"type": "object", "properties": {**needed, **optional}, "required": list(needed)}


def typed(schema: Schema) -> Any:
    """Return the type of a field that may have any value here, and whose `schema` is documentation."""
    return Annotated[Any, WithJsonSchema(schema)]
