"""OpenAPI document of this server's requests and answers, with the limits of the model that it serves.

A request that the document allows is answered, and one that it does not allow is refused; conditions beyond JSON Schema
(a prompt's length in tokens, refusals of a model's template) are in the descriptions of status 400.
Routes of Ollama's API are named in its description alone. `benchmarks/conformance.py` holds a server to it.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ...errors import TreadleError
from .anthropic.document import anthropic_schemas
from .dialects import ANTHROPIC_PATH
from .image_schemas import with_images, without_images
from .json_schemas import COUNT, STRING, Schema, either, listed, or_null, ref, shape
from .openai.answer_schemas import ANSWERS, MESSAGES
from .responses.documents import EXAMPLES as RESPONSE_EXAMPLES
from .responses.documents import RESPONSES
from .schema_limits import ServerFacts, limit_spec_prefill, request_schemas

JSON = "application/json"
EVENTS = "text/event-stream"
PLAIN = "text/plain"
HTML = "text/html"
CHAT, TEXT, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
COUNT_TOKENS = f"{ANTHROPIC_PATH}/count_tokens"
RESPONSE, COMPACT, STORED = "/v1/responses", "/v1/responses/compact", "/v1/responses/{response_id}"
INPUT_TOKENS = "/v1/responses/input_tokens"
GENERATING = (CHAT, TEXT, ANTHROPIC_PATH, RESPONSE)
"""Beginnings of the paths that only models which generate text answer."""
DESCRIPTION = """\
Also served:

- `POST /v1/tokenize` and `/v1/detokenize`, and `GET /v1/tokenizer_info`, the same as without `/v1`.
- Ollama's API, with its own fields: `POST /api/chat`, `/api/generate`, `/api/embed`, `/api/embeddings` and `/api/show`;
  `GET /api/tags`, `/api/ps` and `/api/version`.
"""
EMBEDS_ONLY = """\
This model makes embeddings and generates no text: routes that generate answer 400, and they and their counts of tokens
are not listed here.
"""
FAILURES = {
    "400": "The request asks for something wrong: `error.param` names the field. Also: a prompt longer than the "
    "model's context, messages that the model's chat template refuses, more sequences than the server has places",
    "401": "The API key is missing or wrong",
    "403": "A browser sent this for another site, or the API key does not have the scope that this needs",
    "404": "No such model, request or path",
    "405": "The path takes other methods: `Allow` names them",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "415": "The body has a content coding that is not supported: `Accept-Encoding` lists those that are",
    "422": "The engine died or hung whenever it ran this request: it is refused for an hour",
    "429": "The API key's own limit is reached, or too many wrong keys came from this address: try again after "
    "Retry-After seconds",
    "431": "The headers are too large",
    "499": "It was cancelled by its id before its answer began",
    "500": "The request failed in the server",
    "503": "No room, or not ready: try again after Retry-After seconds",
}
ALWAYS = ("401", "403", "405", "429", "431", "500")
BODY_FAILURES = ("400", "404", "408", "413", "415", "422", "499", "503")


def openapi_schema(app: FastAPI) -> Schema:
    """Return the document of `app`, rebuilt when the facts in `app.state.facts()` have changed."""
    facts: ServerFacts = app.state.facts()
    if app.openapi_schema is None or getattr(app.state, "documented", None) != facts:
        app.openapi_schema, app.state.documented = _document(app, facts), facts
    return app.openapi_schema


def request_body(schema: str) -> Schema:
    """Return the OpenAPI parts of a route that reads its body itself."""
    return {"requestBody": {"required": True, "content": {JSON: {"schema": ref(schema)}}}}


def _document(app: FastAPI, facts: ServerFacts) -> Schema:
    description = f"{EMBEDS_ONLY}\n{DESCRIPTION}" if facts.embeds_only else DESCRIPTION
    document = get_openapi(title=app.title, version=app.version, description=description, routes=app.routes)
    components = document.setdefault("components", {})
    components_kept = {
        name: definition for name, definition in components.get("schemas", {}).items() if name not in VALIDATION
    }
    requests = request_schemas(facts) | anthropic_schemas()
    limit_spec_prefill(requests, facts)
    requests = (with_images if facts.images else without_images)(requests | MESSAGES)
    components["schemas"] = components_kept | requests | ANSWERS | RESPONSES | SERVER
    paths = document["paths"]
    paths |= {path: _get_and_head(path, summary) for path, summary in (HOME | HEALTH).items()}
    for path in READABLE:
        get = paths[path]["get"]
        paths[path]["head"] = get | {"operationId": f"{get['operationId']}_head", "responses": {}}
    for path, operations in paths.items():
        for method, operation in operations.items():
            _complete(path, operation, bodies=method != "head")
    _add_examples(paths, facts)
    _add_model_names(paths, facts)
    if facts.embeds_only:
        document["paths"] = {path: of for path, of in paths.items() if not path.startswith(GENERATING)}
    if facts.needs_key:
        components["securitySchemes"] = KEY_SCHEMES
        document["security"] = [{name: []} for name in KEY_SCHEMES]
        for operation in paths["/health/live"].values():
            operation["security"] = []
    return document


# Operations -----------------------------------------------------------------------------------------------------

VALIDATION = ("HTTPValidationError", "ValidationError")
KEY_SCHEMES: Schema = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
REQUEST_ID: Schema = {"x-request-id": {"description": "The request's own, or a new one.", "schema": STRING}}
RETRY: Schema = {
    "retry-after": {"description": "Seconds.", "required": True, "schema": {"type": "integer", "minimum": 1}},
    "retry-after-ms": {"description": "Milliseconds.", "required": True, "schema": {"type": "integer", "minimum": 1}},
    "x-treadle-ticket": {"description": "Names the place that is kept until then.", "schema": STRING},
}
HEADERS: dict[str, Schema] = {
    "401": {"www-authenticate": {"required": True, "schema": {"type": "string", "const": "Bearer"}}},
    "405": {"allow": {"required": True, "schema": STRING}},
    "415": {"accept-encoding": {"required": True, "schema": STRING}},
    "422": {"x-should-retry": {"required": True, "schema": {"type": "string", "const": "false"}}},
    "429": RETRY,
    "503": RETRY,
}
HOME = {"/": "This server in brief: JSON, or a page for browsers"}
HEALTH = {
    "/health/live": "The process answers",
    "/health/ready": "New requests are taken",
    "/health": "The same as /health/ready",
}
READABLE = ("/v1/models", "/v1/models/{model}", "/tokenizer_info", "/v1/status", "/metrics")
ANSWER = "The whole answer, or with `stream: true` server-sent events: chunks, then `data: [DONE]`, or one `error`."
RESPONDED = "The whole response, or with `stream: true` server-sent events, the last with the whole response."
SHORT_POEM = [{"role": "user", "content": "Write a short poem about weaving."}]


def _events(chunk: str) -> Schema:
    """Describe a stream's events. OpenAPI 3.1 cannot describe the shape of one; 3.2 calls it `itemSchema`. Tools read
    `schema` as that of the whole body or of each event: it allows both."""
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": either(ref(chunk), ref("Error"))}
    done = {"type": "string", "const": "[DONE]"}
    return {
        "schema": {"description": "Server-sent events."},
        "x-itemSchema": shape("One event.", {"data": either(done, data)}),
    }


EVENTS_ANSWER = "The whole answer, or with `stream: true` server-sent events from `message_start` to `message_stop`."
MESSAGE_EVENTS: Schema = {
    "schema": {"description": "Server-sent events."},
    "x-itemSchema": shape("One event.", {"event": STRING, "data": {**STRING, "contentSchema": ref("AnthropicEvent")}}),
}


def _named_events(name: str) -> Schema:
    """Describe a stream's events that have a type each."""
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": ref(name)}
    return {
        "schema": {"description": "Server-sent events."},
        "x-itemSchema": shape("One event.", {"event": STRING, "data": data}),
    }


GOOD: dict[str, tuple[str, Schema]] = {
    CHAT: (ANSWER, {JSON: {"schema": ref("ChatCompletion")}, EVENTS: _events("ChatCompletionChunk")}),
    TEXT: (ANSWER, {JSON: {"schema": ref("Completion")}, EVENTS: _events("CompletionChunk")}),
    "/tokenize": ("The tokens", {JSON: {"schema": ref("Tokens")}}),
    "/detokenize": ("The text", {JSON: {"schema": ref("TokenText")}}),
    "/tokenizer_info": ("The description", {JSON: {"schema": ref("TokenizerInfo")}}),
    "/v1/requests/{request_id}/cancel": ("It is cancelled", {JSON: {"schema": ref("Cancelled")}}),
    EMBEDDINGS: ("One embedding for each input, in their order", {JSON: {"schema": ref("Embeddings")}}),
    ANTHROPIC_PATH: (EVENTS_ANSWER, {JSON: {"schema": ref("AnthropicAnswer")}, EVENTS: MESSAGE_EVENTS}),
    COUNT_TOKENS: ("The tokens", {JSON: {"schema": ref("TokenCount")}}),
    RESPONSE: (RESPONDED, {JSON: {"schema": ref("Response")}, EVENTS: _named_events("ResponseEvent")}),
    COMPACT: ("The summary", {JSON: {"schema": ref("Compaction")}}),
    INPUT_TOKENS: ("The tokens", {JSON: {"schema": ref("InputTokens")}}),
    STORED: ("The response", {JSON: {"schema": either(ref("Response"), ref("DeletedResponse"))}}),
    f"{STORED}/cancel": ("The response", {JSON: {"schema": ref("Response")}}),
    f"{STORED}/input_items": ("A page of items", {JSON: {"schema": ref("InputItems")}}),
    "/v1/models": ("The model list", {JSON: {"schema": ref("ModelList")}}),
    "/v1/models/{model}": ("The model", {JSON: {"schema": ref("Model")}}),
    "/v1/status": ("The server's state", {JSON: {"schema": ref("Status")}}),
    "/v1/prefix_cache/reset": ("How much was dropped", {JSON: {"schema": ref("Dropped")}}),
    "/": ("In brief", {JSON: {"schema": ref("Home")}, HTML: {"schema": STRING}}),
    "/metrics": ("Prometheus' text format", {PLAIN: {"schema": STRING}}),
    **dict.fromkeys(HEALTH, ("It is so", {JSON: {"schema": ref("Health")}})),
}
MORE_FAILURES: dict[str, tuple[str, ...]] = {
    CHAT: BODY_FAILURES,
    TEXT: BODY_FAILURES,
    **dict.fromkeys(("/tokenize", "/detokenize"), ("400", "404", "408", "413", "415", "503")),
    "/tokenizer_info": ("503",),
    EMBEDDINGS: BODY_FAILURES,
    ANTHROPIC_PATH: BODY_FAILURES,
    COUNT_TOKENS: BODY_FAILURES,
    RESPONSE: BODY_FAILURES,
    COMPACT: BODY_FAILURES,
    INPUT_TOKENS: BODY_FAILURES,
    STORED: ("400", "404"),
    f"{STORED}/cancel": ("400", "404"),
    f"{STORED}/input_items": ("400", "404"),
    "/v1/models/{model}": ("404",),
    "/v1/requests/{request_id}/cancel": ("404",),
    "/v1/prefix_cache/reset": ("503",),
    **dict.fromkeys(HEALTH, ("503",)),
}


def _get_and_head(path: str, summary: str) -> Schema:
    """Return the two operations of a path that one route answers."""
    name = path.strip("/").replace("/", "_") or "home"
    return {
        method: {"tags": ["server"], "summary": summary, "operationId": f"{name}_{method}", "responses": {}}
        for method in ("get", "head")
    }


def _complete(path: str, operation: Schema, *, bodies: bool) -> None:
    """Add answers and failures, which the route's code does not declare."""
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own
    if path in GOOD:
        description, content = GOOD[path]
        responses["200"] = {"description": description, "content": content}
    for status in (*ALWAYS, *MORE_FAILURES.get(path, ())):
        responses[status] = _failure(status, _error_name(path, status))
    for response in responses.values():
        response["headers"] = REQUEST_ID | response.get("headers", {})
        if not bodies:
            del response["content"]
    operation["responses"] = dict(sorted(responses.items()))


def _error_name(path: str, status: str) -> str:
    """Return the name of the schema of a failure."""
    if path.startswith(ANTHROPIC_PATH):
        return "AnthropicError"
    return "Unhealthy" if path in HEALTH and status == "503" else "Error"


def _failure(status: str, name: str) -> Schema:
    failure: Schema = {"description": FAILURES[status], "content": {JSON: {"schema": ref(name)}}}
    if status == "401":
        failure["content"][HTML] = {"schema": STRING}  # a page that asks browsers for the key
    return failure | ({"headers": HEADERS[status]} if status in HEADERS else {})


TITLES = {"answer": "A whole answer", "stream": "The same as a stream"}


def _add_examples(paths: Schema, facts: ServerFacts) -> None:
    shared = {"model": facts.names[0], "max_tokens": min(64, facts.max_tokens or 64)}
    examples: dict[str, dict[str, Any]] = {
        CHAT: {
            "answer": {"messages": SHORT_POEM, **shared},
            "stream": {"messages": SHORT_POEM, **shared, "stream": True},
        },
        TEXT: {"answer": {"prompt": "The loom stood by the window, and", **shared}},
        EMBEDDINGS: {"answer": {"input": ["The loom stood by the window.", "Weaving"], "model": facts.names[0]}},
        ANTHROPIC_PATH: {
            "answer": {"messages": SHORT_POEM, **shared},
            "stream": {"messages": SHORT_POEM, **shared, "stream": True},
        },
        COUNT_TOKENS: {"answer": {"messages": SHORT_POEM, "model": facts.names[0]}},
    }
    limit = {"model": facts.names[0], "max_output_tokens": shared["max_tokens"]}
    for path, bodies in RESPONSE_EXAMPLES.items():
        examples[path] = {name: {**body, **limit} for name, body in bodies.items()}
    for path, bodies in examples.items():
        content = paths[path]["post"]["requestBody"]["content"][JSON]
        content["examples"] = {name: {"summary": TITLES[name], "value": body} for name, body in bodies.items()}


def _add_model_names(paths: Schema, facts: ServerFacts) -> None:
    for operation in paths["/v1/models/{model}"].values():
        (parameter,) = operation["parameters"]
        parameter["schema"] = {"type": "string", "enum": list(facts.names)}


# Schemas --------------------------------------------------------------------------------------------------------

ERROR = shape(
    "OpenAI's envelope of an error.",
    {
        "error": shape(
            "What went wrong.",
            {
                "message": {**STRING, "description": "Cause and cure."},
                "type": {**STRING, "examples": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {**STRING, "examples": ["invalid_request", TreadleError.code, "text_generation_busy"]},
            },
        )
    },
)
HEALTH_FIELDS: Schema = {"status": STRING, "state": STRING, "reason": STRING}
MODEL: Schema = {"id": STRING, "object": {"type": "string", "const": "model"}, "created": COUNT, "owned_by": STRING}
OBJECT: Schema = {"type": "object"}
OBJECT_OR_NULL: Schema = {"type": ["object", "null"]}
SERVER: dict[str, Schema] = {
    "Error": ERROR,
    "Home": shape(
        "The server in brief.",
        {
            **dict.fromkeys(("name", "version", "model", "state", "reason"), STRING),
            "ready": {"type": "boolean"},
            "base_url": {**STRING, "description": "For clients; from the `Host` header."},
            "links": {"type": "object", "additionalProperties": STRING},
        },
    ),
    "Health": shape("Live, or ready.", HEALTH_FIELDS),
    "Unhealthy": shape("Why not.", {**HEALTH_FIELDS, **ERROR["properties"]}),
    "Model": shape(
        "A served model.",
        MODEL,
        context_length=COUNT,
        max_model_len=COUNT,
        modalities=listed({"enum": ["text", "image"]}),
    ),
    "ModelList": shape(
        "The served models.", {"object": {"type": "string", "const": "list"}, "data": listed(ref("Model"))}
    ),
    "Tokens": shape(
        "Tokens of a text or a chat.",
        {
            "count": COUNT,
            "max_model_len": COUNT,
            "tokens": listed(COUNT),
            "token_strs": either(listed(STRING), {"type": "null"}),
        },
    ),
    "TokenText": shape("The text of token ids.", {"prompt": STRING}),
    "TokenizerInfo": shape(
        "What clients need of the tokenizer to write prompts of chats themselves.",
        {
            "tokenizer_class": {**STRING, "description": "Its class in transformers."},
            **dict.fromkeys(("bos_token", "eos_token", "pad_token"), or_null(STRING)),
            "chat_template": {**or_null(STRING), "description": "Its text, in Jinja."},
        },
    ),
    "Cancelled": shape("A cancelled request.", {"request_id": STRING, "status": {"const": "cancelled"}}),
    "Dropped": shape("Dropped prompts.", {"dropped_tokens": COUNT}),
    "Status": shape(
        "Admission, running requests and the engine.",
        {
            "model": STRING,
            "state": STRING,
            "ready": {"type": "boolean"},
            "reason": STRING,
            "path": STRING,
            "compute": OBJECT_OR_NULL,
            "speculation": OBJECT_OR_NULL,
            "spec_prefill": OBJECT_OR_NULL,
            "uptime_s": {"type": "number", "minimum": 0},
            "admission": OBJECT,
            "requests": listed(OBJECT),
            "engine": OBJECT,
            "capabilities": OBJECT_OR_NULL,
            "event_loop_lag": {"type": "object", "additionalProperties": {"type": "number"}},
            "text": OBJECT,
            "images": OBJECT,
            "prefix_cache": OBJECT,
            "keys": listed(OBJECT),
            "connections": {"type": "object", "additionalProperties": OBJECT},
            "bodies": OBJECT,
            "responses": OBJECT,
            "log": OBJECT,
        },
    ),
}
