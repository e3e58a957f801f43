"""The OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from .openai.schema import ChatRequest, CompletionRequest

REF = "#/components/schemas/"
FAILURES = {
    "400": "The request asks for something wrong: `error.param` names the field",
    "401": "The API key is missing or wrong",
    "403": "A browser sent this for another site",
    "404": "No such model or path",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "500": "The request failed in the server",
    "503": "No room, or not ready: try again after Retry-After seconds",
}
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def request_body(schema: str) -> dict[str, Any]:
    """The OpenAPI parts of a route that reads its body itself."""
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": REF + schema}}}},
        "responses": {"200": {"description": "The answer: JSON, or server-sent events with stream: true"}},
    }


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    """The document, with the request bodies' shapes and every route's failures."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    shapes = [(ChatRequest, "validation"), (CompletionRequest, "validation")]
    _, defined = models_json_schema(shapes, ref_template=REF + "{model}")  # type: ignore[arg-type]
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(defined.get("$defs", {}))
    schemas["Error"] = ERROR_SCHEMA
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    content = {"application/json": {"schema": {"$ref": REF + "Error"}}}
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            for status, text in FAILURES.items():
                operation["responses"].setdefault(status, {"description": text, "content": content})
    app.openapi_schema = document
    return document
