"""Routes about the server: health, status, metrics and the served models, none of which asks the engine; and the reset
of the prefix cache."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...core.refusals import Refusal
from ...engine.client import Health
from ...engine.status import status_of
from ...errors import EngineUnavailable, InsufficientScope
from ...telemetry import Telemetry
from ...telemetry.logs import log_statistics
from ..authentication import Authenticator, Caller
from ..connections import Connections
from ..prefixes import prefix_status, reset_prefixes
from ..served_models import Models, ServedModel, unready_error
from .anthropic.models import anthropic_card, anthropic_list, named_model
from .body import BodyBudget
from .dialects import is_anthropic
from .error_shapes import openai_error
from .errors import headers_of
from .guard import caller_of
from .responses.store import ResponseStore

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GET_AND_HEAD = ["GET", "HEAD"]


class StatusRoutes:
    """Liveness, readiness, status and metrics of one server."""

    def __init__(
        self,
        model: ServedModel,
        telemetry: Telemetry,
        authenticator: Authenticator,
        connections: Mapping[str, Connections],
        bodies: BodyBudget,
        responses: ResponseStore,
    ) -> None:
        """`connections` are those of each front."""
        self._responses = responses
        self._bodies = bodies
        self._authenticator = authenticator
        self._connections = connections
        self._scrape = asyncio.Lock()
        self._telemetry = telemetry
        self._model = model
        self._started = time.monotonic()

    def router(self) -> APIRouter:
        router = APIRouter(tags=["server"])
        add = router.add_api_route
        probes = (("/health/live", self.live), ("/health/ready", self.ready), ("/health", self.ready))
        for path, answer in probes:
            add(path, answer, methods=GET_AND_HEAD, include_in_schema=False)  # `openapi` describes both
        _add_readable(router, "/v1/status", self.status, "Admission, running requests, engine")
        _add_readable(router, "/metrics", self.metrics, "Prometheus metrics")
        add("/v1/prefix_cache/reset", self.reset_prefixes, methods=["POST"], summary="Drop all cached prompts")
        return router

    async def live(self) -> Response:
        health = self._model.health()
        return _health(health, health.live)

    async def ready(self) -> Response:
        health = self._model.health()
        return _health(health, health.ready)

    async def status(self, request: Request) -> Response:
        caller, health = caller_of(request.scope), self._model.health()
        status = status_of(self._model.engine, None if caller.admin else caller.tenant)
        status.update(state=health.state, ready=health.ready, reason=health.reason)
        status["model"] = self._model.name
        status["uptime_s"] = round(time.monotonic() - self._started, 3)
        status["event_loop_lag"] = self._telemetry.lag.summary()
        status["text"] = self._model.texts.statistics() | _formats(self._model)
        status["images"] = _images(self._model)
        status["prefix_cache"] = prefix_status(self._model.engine)
        status["connections"] = {front: of.statistics() for front, of in self._connections.items()}
        status["bodies"] = self._bodies.statistics()
        status["responses"] = self._responses.statistics()
        status["log"] = dataclasses.asdict(log_statistics())
        status["keys"] = [dataclasses.asdict(usage) for usage in self._authenticator.usage()]
        return _json(status if caller.admin else _redacted(status, caller))

    async def reset_prefixes(self, request: Request) -> Response:
        self._check_admin(request, "emptying the prefix cache")
        return _json({"dropped_tokens": await reset_prefixes(self._model.engine)})

    async def metrics(self, request: Request) -> Response:
        """Send one scrape at a time, in parts: the whole takes the event loop milliseconds."""
        self._check_admin(request, "reading metrics")
        parts = []
        async with self._scrape:
            for part in self._telemetry.metrics.parts():
                parts.append(part)
                await asyncio.sleep(0)
        return Response(b"".join(parts), media_type=METRICS_TYPE)

    def _check_admin(self, request: Request, action: str) -> None:
        try:
            caller_of(request.scope).check_admin(action)
        except InsufficientScope:
            self._authenticator.refused(Refusal.INSUFFICIENT_SCOPE)
            raise


class ModelRoutes:
    """Routes of the model list: each model under its served name and its aliases, in OpenAI's shape, or in Anthropic's
    for its clients."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._created = int(time.time())

    def router(self) -> APIRouter:
        router = APIRouter(tags=["models"])
        _add_readable(router, "/v1/models", self.list_all, "The models served here")
        _add_readable(router, "/v1/models/{model:path}", self.one, "One model")
        return router

    async def list_all(self, request: Request) -> Response:
        listed = [(model, name) for model in self._models for name in (model.name, *model.aliases)]
        if is_anthropic(request.scope):
            return _json(anthropic_list(listed, self._created))
        return _json({"object": "list", "data": [self._card(model, name) for model, name in listed]})

    async def one(self, model: str, request: Request) -> Response:
        if is_anthropic(request.scope):
            return _json(anthropic_card(named_model(self._models, model), model, self._created))
        return _json(self._card(self._models.get(model), model))

    def _card(self, model: ServedModel, name: str) -> dict[str, Any]:
        card: dict[str, Any] = {"id": name, "object": "model", "created": self._created, "owned_by": "treadle"}
        capabilities = model.engine.capabilities
        return (
            card
            if capabilities is None
            else card
            | {"context_length": capabilities.context, "max_model_len": capabilities.context}
            | {"modalities": list(model.modalities)}
        )


def _redacted(status: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """Return the status, which has the caller's requests alone, for one without the scope admin: without counters that
    would reveal other tenants' prompts."""
    own = {
        "engine": {**status["engine"], "pid": None, "statistics": None},
        "prefix_cache": {"enabled": status["prefix_cache"]["enabled"]},
        "bodies": {},
        "responses": {},
        "keys": [usage for usage in status["keys"] if usage["key"] == caller.name],
    }
    return status | own


def _formats(model: ServedModel) -> dict[str, Any]:
    """Return the formats of tool calls and reasoning; nothing until the model's text side is loaded."""
    try:
        formats = model.text().formats
    except EngineUnavailable:
        return {}
    described = "template" if formats.by_template else "server"
    return {"tool_parser": formats.tools, "tools_described_by": described, "reasoning_parser": formats.reasoning}


def _images(model: ServedModel) -> dict[str, Any]:
    """Return whether images are read, with the reason where they aren't, and what reads them."""
    try:
        reason = model.limits().no_images
    except EngineUnavailable:
        reason = "the model is loading"
    read = {"read": not reason, "reason": reason}
    return read if reason or model.images is None else read | model.images.statistics()


def _add_readable(router: APIRouter, path: str, answer: Callable[..., Any], summary: str) -> None:
    """Add a route for GET and HEAD. OpenAPI's names of operations must differ: the second route is there for its GET,
    and `openapi` derives the HEAD."""
    router.add_api_route(path, answer, methods=GET_AND_HEAD, include_in_schema=False)
    router.add_api_route(path, answer, summary=summary)


def _health(health: Health, good: bool) -> Response:
    body: dict[str, Any] = {"status": "ok" if good else "unavailable", "state": health.state, "reason": health.reason}
    if good:
        return _json(body)
    error = unready_error(health)
    return _json(body | openai_error(error), error.http_status, {k.decode(): v.decode() for k, v in headers_of(error)})


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
