"""`/docs`: the OpenAPI document as one page for people, with examples that run unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from html import escape
from typing import Any
from urllib.parse import quote

from ....errors import (
    Busy,
    ContextLengthExceeded,
    EngineDied,
    EngineUnavailable,
    InsufficientScope,
    InvalidGrammar,
    InvalidRequest,
    ModelNotFound,
    NotAuthenticated,
    Quarantined,
    RateLimited,
    RequestCancelled,
    RequestTooLarge,
    ServerStopping,
    StepFailed,
    ThreadUnsupported,
    TooManyWrongKeys,
    TreadleError,
    UnsupportedParameter,
)
from ..content_coding import UnsupportedCoding
from ..error_shapes import openai_error
from ..errors import BodyTimeout, ForeignSite, MethodNotAllowed, RouteNotFound, headers_of
from ..request_routes import RequestNotFound
from ..responses.store import ResponseNotFound
from .examples import ANSWERS, FIELDS, REQUESTS, STREAM
from .fields import Fields, prose, row, slug
from .shapes import REF, Schema
from .shell import MARK, block, fill, page, snippet
from .snippets import ROOT, Snippets, pretty

JSON = "application/json"
EVENTS = "text/event-stream"
HALF = 44  # characters of a code block's line, beside an answer
ERRORS: dict[type[TreadleError], str] = {
    InvalidRequest: "The request is malformed, or a value is out of range: `param` names the field.",
    UnsupportedParameter: "A known field asks for something that this server does not do.",
    ThreadUnsupported: "No conversation is held between requests of Anthropic's Messages: send all messages.",
    InvalidGrammar: "The engine can't follow the request's grammar, or follows none: use another, or leave it out.",
    ContextLengthExceeded: "The prompt, or prompt plus completion, is longer than the model's context.",
    NotAuthenticated: "The API key is missing or wrong.",
    InsufficientScope: "The API key does not have the scope that this needs: `admin`.",
    RateLimited: "The API key has used up its requests or tokens of this minute, or runs all that it may.",
    TooManyWrongKeys: "Too many wrong API keys came from this address.",
    ForeignSite: "A web site that `--cors-origin` does not name, or a host that `--allowed-host` does not name.",
    RequestNotFound: "No running request has the id.",
    ModelNotFound: "The request names a model that is not served here.",
    ResponseNotFound: "No such response or item is stored for this API key.",
    RouteNotFound: "There is no such path.",
    MethodNotAllowed: "The path does not take this method: `Allow` says which it takes.",
    BodyTimeout: "The request's body did not arrive in time.",
    RequestTooLarge: "The request's body is over the server's limit.",
    StepFailed: "The engine could not compute this request; others go on.",
    EngineDied: "The engine was lost while the request ran, and can't go on with it. Don't repeat it unseen.",
    UnsupportedCoding: "The request's body has a content coding that is not supported.",
    RequestCancelled: "The request was cancelled by its id before its answer began.",
    Quarantined: "The engine died or hung whenever it ran this request: it is refused for an hour.",
    TreadleError: "A fault of the server: its log says which.",
    Busy: "No room: every slot and every place in the queue is taken, or the wait was too long.",
    EngineUnavailable: "The model is loading, or the engine is being restarted.",
    ServerStopping: "The server is shutting down.",
}
HEADERS_TOO_LARGE = (431, InvalidRequest.code, "The request's headers are too large.", False)
EXAMPLE_ERROR = Busy("every slot and every place in the queue is taken: try again in 2 s", retry_after_s=1.4)


@dataclass(frozen=True)
class Operation:
    """One method of one path, with its description in the document."""

    method: str
    path: str
    about: Mapping[str, Any]

    @property
    def body(self) -> Mapping[str, Any] | None:
        """The request body's media type object; None for operations without a body."""
        found: Mapping[str, Any] | None = self.about.get("requestBody", {}).get("content", {}).get(JSON)
        return found

    @property
    def has_answer(self) -> bool:
        """Whether the document has an example of a good answer."""
        media = self.answer(JSON)
        return "example" in media or bool(media.get("examples"))

    def answer(self, kind: str) -> Mapping[str, Any]:
        """Return the media type object of a good answer."""
        found: Mapping[str, Any] = self.about.get("responses", {}).get("200", {}).get("content", {}).get(kind, {})
        return found


class Docs:
    """Page of one OpenAPI `document`; `snippets` formats its examples."""

    def __init__(self, document: Mapping[str, Any], snippets: Snippets) -> None:
        self._document = document
        self._snippets = replace(snippets, width=HALF)
        self._schemas: Mapping[str, Schema] = document.get("components", {}).get("schemas", {})
        operations = list(operations_of(document))
        self._calls = [operation for operation in operations if operation.body is not None]
        self._routes = [operation for operation in operations if operation.body is None]

    def html(self) -> str:
        info = self._document["info"]
        body = fill(
            "docs.html",
            mark=MARK,
            version=escape(info["version"]),
            calls="".join(map(self._call, self._calls)),
            routes="".join(map(self._route, self._routes)),
            errors=self._errors(),
            contents=self._contents(),
            url=snippet(self._snippets.html(f"{ROOT}/v1"), label="the base URL"),
            key=KEY_NEEDED if self._snippets.key_needed else KEY_FREE,
            about=about(info.get("description", "")),
        )
        return page(f"{info['title']} HTTP API", body, scripts=("common",))

    # Parts of the page -------------------------------------------------------------------------------------------

    def _contents(self) -> str:
        calls = "".join(
            f'<li><a href="#{slug(call.path)}">{escape(short(call.path))}</a><ul>{self._parts(call)}</ul></li>'
            for call in self._calls
        )
        routes = "".join(f'<li><a href="#{anchor(route)}">{escape(route.path)}</a></li>' for route in self._routes)
        return (
            f'{calls}<li><a href="#routes">Other routes</a><ul>{routes}</ul></li><li><a href="#errors">Errors</a></li>'
        )

    def _parts(self, call: Operation) -> str:
        fields = self._fields(call)
        anchors = [(fields.anchor(name), name) for name in fields.main_fields()]
        anchors += [(f"{slug(call.path)}-{slug(title)}", title) for title in fields.groups()]
        return "".join(f'<li><a href="#{target}">{escape(name)}</a></li>' for target, name in anchors)

    def _call(self, call: Operation) -> str:
        request, answer, further = self._examples(call)
        pair = self._pair(self._snippets.post(call.path, request), answer)
        more = "".join(
            f"<details><summary>{escape(title)}</summary>{snippet(self._html(call, value))}</details>"
            for title, value in further
        )
        return (
            f'<section class="card" id="{slug(call.path)}"><h2>{heading(call)}</h2>{paragraphs(call)}'
            f"{pair}{more}{self._stream(call)}{self._fields(call).html()}</section>"
        )

    def _html(self, call: Operation, value: Mapping[str, Any]) -> str:
        return self._snippets.html(self._snippets.post(call.path, value))

    def _route(self, route: Operation) -> str:
        path = route.path.replace("{model}", quote(self._snippets.model, safe="/"))
        parameters = "".join(
            row(
                one["name"],
                {"description": one.get("description", ""), **one.get("schema", {})},
                needed=bool(one.get("required")),
                anchor=f"{anchor(route)}-{slug(one['name'])}",
            )
            for one in route.about.get("parameters", ())
        )
        table = f'<table class="fields"><tbody>{parameters}</tbody></table>' if parameters else ""
        return (
            f'<div class="route" id="{anchor(route)}"><h3>{heading(route)}</h3>{paragraphs(route)}{table}'
            f"{self._pair(self._snippets.without_body(path, route.method.upper()), self._example_answer(route))}</div>"
        )

    def _pair(self, request: str, answer: str) -> str:
        request_html = f"<div><h4>Request</h4>{snippet(self._snippets.html(request))}</div>"
        answer_html = f"<div><h4>Answer</h4>{block(escape(answer))}</div>" if answer else ""
        return f'<div class="pair">{request_html}{answer_html}</div>'

    def _stream(self, call: Operation) -> str:
        given = next(examples_of(call.answer(EVENTS), self._schemas), None)
        chunks = STREAM.get(call.path)
        text = given[1] if given else "".join(f"data: {json.dumps(one)}\n\n" for one in chunks or ())
        if not text:
            return ""
        end = "" if given else "data: [DONE]"
        return (
            "<details><summary>The answer as a stream</summary><p>With <code>stream: true</code> the answer comes as "
            "server-sent events, here abridged. A failure after the first event ends the stream with one "
            f'<code>data: {{"error": …}}</code>.</p>{block(escape(str(text) + end))}</details>'
        )

    def _errors(self) -> str:
        lines = [(kind.http_status, kind.code, meaning, kind.retryable) for kind, meaning in ERRORS.items()]
        rows = "".join(
            f"<tr><td>{status}</td><td><code>{code}</code></td><td>{prose(meaning)}"
            f"{' <small>Try again after Retry-After seconds.</small>' if again else ''}</td></tr>"
            for status, code, meaning, again in sorted([*lines, HEADERS_TOO_LARGE])
        )
        head = [f"HTTP/1.1 {EXAMPLE_ERROR.http_status} Service Unavailable", f"content-type: {JSON}"]
        head += [f"{name.decode()}: {value.decode()}" for name, value in headers_of(EXAMPLE_ERROR)]
        example = "\n".join([*head, "", pretty(openai_error(EXAMPLE_ERROR))])
        return (
            f"{block(escape(example))}<table><thead><tr><th scope='col'>status</th><th scope='col'>code</th>"
            f"<th scope='col'>meaning</th></tr></thead><tbody>{rows}</tbody></table>"
        )

    # Contents of the document --------------------------------------------------------------------------------------

    def _fields(self, call: Operation) -> Fields:
        assert call.body is not None
        request, _, _ = self._examples(call)
        body = self._merged(resolved(call.body.get("schema", {}), self._schemas))
        return Fields(call.path, body, self._schemas, request | FIELDS)

    def _merged(self, body: Schema) -> Schema:
        """Return a body of several forms as one with the fields of all; those are required that all forms require."""
        forms = [resolved(one, self._schemas) for one in body.get("anyOf", [body])]
        fields: dict[str, Schema] = {}
        for form in forms:
            fields = {**form.get("properties", {}), **fields}
        required = [name for name in fields if all(name in form.get("required", ()) for form in forms)]
        return {"properties": fields, "required": required}

    def _examples(self, call: Operation) -> tuple[dict[str, Any], str, list[tuple[str, dict[str, Any]]]]:
        """Return a request with its answer, and further requests with their titles. The pair is the document's if it
        has an answer: a request beside an answer to another one would mislead."""
        given = [one for one in examples_of(call.body or {}, self._schemas) if isinstance(one[1], dict)]
        if not call.has_answer and call.path in REQUESTS:
            given.insert(0, ("", REQUESTS[call.path]))
        requests = [(title, self._with_served_model(value)) for title, value in given]
        return (requests[0][1] if requests else {}), self._example_answer(call), requests[1:]

    def _example_answer(self, operation: Operation) -> str:
        found = next(examples_of(operation.answer(JSON), self._schemas), None)
        value = found[1] if found else ANSWERS.get((operation.method, operation.path), "")
        if isinstance(value, Mapping):
            value = self._with_served_model(value)
        return value if isinstance(value, str) else pretty(value, width=HALF)

    def _with_served_model(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Return an example with the served model's name."""
        return {**value, "model": self._snippets.model} if "model" in value else dict(value)


KEY_FREE = "<p>No API key is needed.</p>"
KEY_NEEDED = (
    "<p>Every route but <code>/health/live</code> needs the API key: <code>Authorization: Bearer KEY</code> or "
    "<code>x-api-key: KEY</code>. The examples read it from <code>$TREADLE_API_KEY</code>.</p>"
)


def operations_of(document: Mapping[str, Any]) -> Iterator[Operation]:
    """Yield every operation, in the document's order, without a HEAD beside a GET."""
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            if method != "head" or "get" not in methods:
                yield Operation(method, path, about)


def resolved(schema: Schema, schemas: Mapping[str, Schema]) -> Schema:
    """Return the schema that a reference names, or `schema` itself."""
    return schemas.get(schema["$ref"].removeprefix(REF), {}) if "$ref" in schema else schema


def examples_of(media: Mapping[str, Any], schemas: Mapping[str, Schema]) -> Iterator[tuple[str, Any]]:
    """Yield examples of a media type object with their titles: its own, else those of its schema."""
    if "example" in media:
        yield "", media["example"]
    elif media.get("examples"):
        for name, example in media["examples"].items():
            yield example.get("summary", f"Another request: {name}"), example.get("value")
    else:
        schema = resolved(media.get("schema", {}), schemas)
        for value in schema.get("examples", ()):
            yield "Another request", value


def heading(operation: Operation) -> str:
    """Format method and path."""
    method = escape(operation.method)
    return f'<span class="verb {method}">{method.upper()}</span><code>{escape(operation.path)}</code>'


def paragraphs(operation: Operation) -> str:
    """Format summary and description as paragraphs."""
    found = (operation.about.get(key, "") for key in ("summary", "description"))
    return "".join(f"<p>{prose(text)}</p>" for text in found if text)


def anchor(route: Operation) -> str:
    """Return the id of a route on the page."""
    return f"{route.method}-{slug(route.path)}"


def about(description: str) -> str:
    """Format the document's description: paragraphs, and lists of lines that begin with "- "."""
    parts = []
    for block_of_text in filter(None, description.strip().split("\n\n")):
        lines = block_of_text.replace("\n  ", " ").split("\n")
        items = "".join(f"<li>{prose(line.removeprefix('- '))}</li>" for line in lines)
        parts.append(f"<ul>{items}</ul>" if lines[0].startswith("- ") else f"<p>{prose(' '.join(lines))}</p>")
    return "".join(parts)


def short(path: str) -> str:
    return path.removeprefix("/v1/")
