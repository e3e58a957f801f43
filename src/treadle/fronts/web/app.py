"""Assembly of the HTTP application: routes and middleware."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from ...config import Settings
from ...errors import TreadleError
from ...installation import version
from ...telemetry import Telemetry
from ..authentication import Authenticator
from ..connections import Connections
from ..served_models import Models, ServedModel
from .access_log import AccessLog, RouteTemplates
from .answer import Answer, RouteContext
from .anthropic.messages import ParsedCount, ParsedMessages
from .body import BODIES_BYTES, SHARES, BodyBudget
from .cors import Cors, Origins
from .counting import CountAnswer
from .dialects import ANTHROPIC_PATH
from .early_reject import EarlyReject
from .errors import ErrorEnvelope, MethodNotAllowed, RouteNotFound, send_error
from .guard import Guard, HostNames
from .ollama.embeddings import EMBED, OLDER, OlderEmbedAnswer, OllamaEmbedAnswer
from .ollama.models import OllamaModels
from .ollama.requests import OllamaChat, OllamaGenerate
from .ollama.routes import OllamaAnswer
from .openai.chat import ParsedChat
from .openai.completions import ParsedCompletion
from .openai.embeddings import EMBEDDINGS, EmbeddingsAnswer
from .openapi import openapi_schema, request_body
from .parsed import Shape
from .request_routes import RequestRoutes
from .responses.compaction import ParsedCompaction
from .responses.parsed import ParsedResponse
from .responses.routes import InputTokensAnswer, ResponsesAnswer, StoredRoutes
from .responses.sessions import Sessions
from .responses.store import ResponseStore
from .schema_limits import ServerFacts
from .site.docs import Docs
from .site.home import Home, root_of
from .site.shell import HEADERS
from .sse import AsgiResponse
from .status import GET_AND_HEAD, ModelRoutes, StatusRoutes
from .token_routes import TOKEN_ROUTES, TOKENIZER_INFO, TokenizerInfo, TokenRoute

VERSION = version()
GENERATION: dict[str, tuple[Shape, str, str]] = {
    "/v1/chat/completions": (ParsedChat, "ChatRequest", "Answer a conversation"),
    "/v1/completions": (ParsedCompletion, "CompletionRequest", "Continue a text"),
    ANTHROPIC_PATH: (ParsedMessages, "MessagesRequest", "Answer a conversation, in Anthropic's dialect"),
    "/v1/responses": (ParsedResponse, "ResponseRequest", "Answer a conversation of items"),
    "/v1/responses/compact": (ParsedCompaction, "CompactRequest", "Summarize a conversation of items"),
}
COUNT_TOKENS = f"{ANTHROPIC_PATH}/count_tokens"
INPUT_TOKENS = "/v1/responses/input_tokens"
OLLAMA: dict[str, Shape] = {"/api/chat": OllamaChat, "/api/generate": OllamaGenerate}
"""Ollama's routes that generate. The OpenAPI document only names them: Ollama's own documentation describes them."""


def create_app(
    models: Models,
    settings: Settings,
    telemetry: Telemetry,
    authenticator: Authenticator | None = None,
    connections: Mapping[str, Connections] | None = None,
) -> FastAPI:
    """Build the whole HTTP front. `authenticator` is shared with the server's other fronts, where it has some.
    `connections` of each front are shown in the status. Nothing is started: serve it with `serving.WebServer`."""
    model = models.default
    refuse = model.engine.gate.refuse
    authenticator = authenticator or Authenticator.of(settings, refuse)
    bodies = BodyBudget(max(BODIES_BYTES, SHARES * (settings.max_body_bytes or 0)), refuse)
    server = RouteContext(models, settings, _fingerprint, authenticator, bodies=bodies, lines=telemetry.access)
    app = FastAPI(title="Treadle", version=VERSION, docs_url=None, redoc_url=None, redirect_slashes=False)
    sessions = Sessions(ResponseStore(settings.response_store))
    telemetry.metrics.watch_responses(sessions.store)
    _add_generation(app, server, sessions)
    home = Home(model, VERSION, key_needed=settings.has_keys)
    probes = StatusRoutes(model, telemetry, authenticator, connections or {}, bodies, sessions.store)
    ollama = OllamaModels(models, VERSION)
    _add_token_routes(app, server)
    requests = RequestRoutes(server.live)
    stored = StoredRoutes(sessions, settings)
    routers = (
        *(requests.router(), ModelRoutes(models).router(), home.router(), probes.router()),
        *(ollama.router(), stored.router()),
    )
    for router in routers:
        app.include_router(router)
    _add_docs(app, home, lambda: _facts(models, settings))
    app.add_exception_handler(HTTPException, _http_exception)
    routes = [*app.routes, *(route for router in routers for route in router.routes)]
    app.add_middleware(ErrorEnvelope)  # within EarlyReject, which adds x-ratelimit-* to all answers
    app.add_middleware(
        EarlyReject,
        authenticator=authenticator,
        check_room=model.engine.check_room,
        arrival_of=server.arrival_of,
        paths={*GENERATION, *OLLAMA, EMBEDDINGS, EMBED, OLDER},
    )
    hosts = HostNames(settings.allowed_host, host=settings.host, any_name=settings.has_keys)
    origins = Origins(settings.cors_origin)
    app.add_middleware(Guard, authenticator=authenticator, hosts=hosts, origins=origins)
    app.add_middleware(ErrorEnvelope)
    app.add_middleware(Cors, origins=origins)
    app.add_middleware(AccessLog, metrics=telemetry.metrics, lines=telemetry.access, routes=RouteTemplates(routes))
    return app


def _add_generation(app: FastAPI, server: RouteContext, sessions: Sessions) -> None:
    for path, (shape, schema, summary) in GENERATION.items():
        app.add_api_route(
            path,
            _endpoint(_answer(server, shape, sessions)),
            methods=["POST"],
            summary=summary,
            tags=["generation"],
            operation_id=schema,
            openapi_extra=request_body(schema),
        )
    app.add_api_route(
        COUNT_TOKENS,
        _endpoint(CountAnswer(server, ParsedCount)),
        methods=["POST"],
        summary="Count the tokens of a conversation's prompt",
        tags=["generation"],
        operation_id="CountTokensRequest",
        openapi_extra=request_body("CountTokensRequest"),
    )
    app.add_api_route(
        INPUT_TOKENS,
        _endpoint(InputTokensAnswer(server, sessions)),
        methods=["POST"],
        summary="Count the tokens of a response's input",
        tags=["generation"],
        operation_id="InputTokensRequest",
        openapi_extra=request_body("ResponseRequest"),
    )
    for path, shape in OLLAMA.items():
        app.add_api_route(path, _endpoint(OllamaAnswer(server, shape)), methods=["POST"], include_in_schema=False)
    for path, answer in ((EMBED, OllamaEmbedAnswer), (OLDER, OlderEmbedAnswer)):
        app.add_api_route(path, _endpoint(answer(server)), methods=["POST"], include_in_schema=False)
    app.add_api_route(
        EMBEDDINGS,
        _endpoint(EmbeddingsAnswer(server)),
        methods=["POST"],
        summary="Make embeddings of texts, images and chats",
        tags=["embeddings"],
        operation_id="EmbeddingRequest",
        openapi_extra=request_body("EmbeddingRequest"),
    )


def _answer(server: RouteContext, shape: Shape, sessions: Sessions) -> Answer:
    return ResponsesAnswer(server, shape, sessions) if issubclass(shape, ParsedResponse) else Answer(server, shape)


def _add_token_routes(app: FastAPI, server: RouteContext) -> None:
    for path, (job, schema, summary) in TOKEN_ROUTES.items():
        endpoint = _endpoint(TokenRoute(server, job))
        for prefix in ("", "/v1"):
            app.add_api_route(
                prefix + path,
                endpoint,
                methods=["POST"],
                summary=summary,
                tags=["tokens"],
                operation_id=schema + prefix,
                openapi_extra=request_body(schema),
                include_in_schema=not prefix,  # documented once
            )
    info = _endpoint(TokenizerInfo(server))
    for prefix in ("", "/v1"):
        app.add_api_route(prefix + TOKENIZER_INFO, info, methods=GET_AND_HEAD, include_in_schema=False)
    app.add_api_route(TOKENIZER_INFO, info, summary="The tokenizer's special tokens and the template", tags=["tokens"])


def _endpoint(answer: Answer | TokenRoute | TokenizerInfo | EmbeddingsAnswer) -> Callable[[], Any]:
    async def endpoint() -> Response:
        return AsgiResponse(answer)

    return endpoint


def _add_docs(app: FastAPI, home: Home, facts: Callable[[], ServerFacts]) -> None:
    app.state.facts = facts
    app.openapi = lambda: openapi_schema(app)  # type: ignore[method-assign]

    async def docs(request: Request) -> HTMLResponse:
        return HTMLResponse(Docs(app.openapi(), home.snippets(root_of(request.scope))).html(), headers=HEADERS)

    async def docs_with_slash(request: Request) -> Response:
        return RedirectResponse("../docs", headers=HEADERS)  # relative: a proxy may have put a prefix before it

    app.add_api_route("/docs", docs, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/docs/", docs_with_slash, methods=["GET", "HEAD"], include_in_schema=False)


async def _http_exception(request: Request, error: Exception) -> Response:
    """Convert Starlette's own refusals: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    path, method = request.scope["path"][:200], request.scope["method"]
    refusal: TreadleError
    if error.status_code == 404:
        refusal = RouteNotFound(f"there is no {path} here: {_route_cure(path)}")
    elif error.status_code == 405:
        refusal = MethodNotAllowed(f"{path} does not take {method}: /docs lists what it takes")
    else:
        refusal = TreadleError(str(error.detail))

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(send, refusal, scope, error.headers)

    return AsgiResponse(answer)


def _route_cure(path: str) -> str:
    """Return the path to call instead of `path`: clients append endpoints to a base URL that may lack /v1, or have it
    twice."""
    below = path
    while below.startswith("/v1/"):
        below = below.removeprefix("/v1")
    intended = f"/v1{below}"
    if intended in (ANTHROPIC_PATH, COUNT_TOKENS) and intended != path:
        return f"call {intended}; Anthropic's clients append /v1 themselves, so their base URL ends before it"
    known = intended in (*GENERATION, INPUT_TOKENS, EMBEDDINGS, "/v1/models") or intended.startswith("/v1/models/")
    if intended != path and known:
        return f"the base URL ends in /v1, call {intended}"
    return "/docs lists what there is"


def _facts(models: Models, settings: Settings) -> ServerFacts:
    """Facts about this server for the OpenAPI document."""
    model = models.default
    can = model.engine.capabilities
    return ServerFacts(
        names=model.names,
        places=model.engine.gate.limits.places,
        max_tokens=model.max_tokens,
        needs_key=settings.has_keys,
        needs_model=models.require_name,
        vocabulary=None if can is None else can.vocabulary,
        context=None if can is None else can.context,
        dimensions=None if can is None else can.embedding.dimensions,
        spec_prefill=can is not None and bool(can.steps.spec_prefill.scorer),
        images="image" in model.modalities,
        embeds_only=can is not None and can.embedding.only,
    )


def _fingerprint(model: ServedModel) -> str:
    """Return the `system_fingerprint` of answers. It changes when the same seed may give another answer: with the
    model, its number formats or this software."""
    capabilities = model.engine.capabilities
    formats = (
        ()
        if capabilities is None
        else (capabilities.architecture, capabilities.dtype, capabilities.device, capabilities.kv.dtype)
    )
    return "fp_" + hashlib.sha256("|".join((VERSION, model.name, *formats)).encode()).hexdigest()[:12]
