"""The OpenAPI document, and a page that shows it without asking anything of the network."""

from __future__ import annotations

from html import escape
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
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{background:#8882;padding:.1em .3em;border-radius:.2em}table{border-collapse:collapse;width:100%}"
    "td,th{border-bottom:1px solid #8884;padding:.3rem .5rem;text-align:left;vertical-align:top}"
    "summary{cursor:pointer}:root{color-scheme:light dark}"
)


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


def docs_page(document: dict[str, Any]) -> str:
    """The document as one plain HTML page."""
    parts = [f"<h1>{escape(document['info']['title'])} {escape(document['info']['version'])}</h1>"]
    parts.append("<p>The machine-readable form is <a href='openapi.json'>openapi.json</a>.</p>")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(operation.get('summary', ''))}</p>")
            parts.append(_fields(operation, document["components"]["schemas"]))
    rows = "".join(f"<tr><td>{status}</td><td>{escape(text)}</td></tr>" for status, text in FAILURES.items())
    parts.append(f"<h2>Failures</h2><table>{rows}</table>")
    title = escape(document["info"]["title"])
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>"
        f"<body>{''.join(parts)}</body></html>"
    )


def _fields(operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    body = operation.get("requestBody")
    if body is None:
        return ""
    name = body["content"]["application/json"]["schema"]["$ref"].removeprefix(REF)
    shape = schemas[name]
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{' (needed)' if field in shape.get('required', ()) else ''}</td>"
        f"<td>{escape(_type(about))}</td><td>{escape(about.get('description', ''))}</td></tr>"
        for field, about in shape["properties"].items()
    )
    return f"<details open><summary>Fields</summary><table>{rows}</table></details>"


def _type(about: dict[str, Any]) -> str:
    kinds = about.get("anyOf", [about])
    names = [kind.get("type") or kind.get("$ref", "").removeprefix(REF) or "any" for kind in kinds]
    return " or ".join(dict.fromkeys(name for name in names if name != "null"))
