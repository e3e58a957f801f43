"""`/`: model, state and first calls. A page for browsers, JSON for programs; neither asks the engine."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from ....core.capabilities import Capabilities
from ....core.compute_path import Backend
from ....engine.client import EngineClient
from ....errors import EngineUnavailable
from ....host_names import host_of
from ....units import size
from ...served_models import ServedModel
from .negotiate import wants_html
from .shell import HEADERS, MARK, fill, page, snippet
from .snippets import ROOT, FirstCall, Snippets

LINKS = {
    "docs": ("docs", "API docs", "routes and fields, with examples"),
    "openapi": ("openapi.json", "OpenAPI", "the same for programs"),
    "models": ("v1/models", "Models", "the served model and its context"),
    "status": ("v1/status", "Status", "admission, requests, engine, caches"),
    "metrics": ("metrics", "Metrics", "for Prometheus"),
    "ready": ("health/ready", "Readiness", "200 while new requests are taken"),
}
"""Path, title and description, by name."""
UNREADY = ("starting", "restarting", "draining", "stopping")
PLAIN = {name: HEADERS[name] for name in ("cache-control", "vary")}


class Home:
    """The page and its JSON form, for one model. `key_needed`: calls need an API key."""

    def __init__(self, served: ServedModel, version: str, *, key_needed: bool) -> None:
        self._served = served
        self._model = served.name
        self._version = version
        self._key_needed = key_needed

    def router(self) -> APIRouter:
        router = APIRouter(tags=["server"])
        # One route for both methods, so that a 405 names both; `openapi` describes them.
        router.add_api_route("/", self.show, methods=["GET", "HEAD"], include_in_schema=False)
        return router

    async def show(self, request: Request) -> Response:
        root = root_of(request.scope)
        if wants_html(request.scope):
            return HTMLResponse(self.html(root), headers=HEADERS)
        body = msgspec.json.encode(self.facts(root))
        return Response(body, media_type="application/json", headers=PLAIN)

    def facts(self, root: str) -> dict[str, Any]:
        """Return the JSON form. `root` is the server's address as the client wrote it."""
        health = self._served.health()
        return {
            "name": "treadle",
            "version": self._version,
            "model": self._model,
            "state": health.state,
            "ready": health.ready,
            "reason": health.reason,
            "base_url": f"{root}/v1",
            "links": {name: f"/{path}" for name, (path, *_) in LINKS.items()},
        }

    def html(self, root: str) -> str:
        """Return the page with all facts known now; its script updates them."""
        health = self._served.health()
        body = fill(
            "home.html",
            mark=MARK,
            version=escape(self._version),
            model=escape(self._model),
            state=escape(health.state),
            label="Loading" if health.state == "starting" else escape(health.state.capitalize()),
            why=escape(health.reason),
            silent="" if health.reason else " hidden",
            effect="" if health.state in UNREADY else " hidden",
            about=self._about(known=health.ready),
            connect=self._connect(root),
            links="".join(_link(*link) for link in LINKS.values()),
        )
        return page(f"{self._model} · Treadle", body, scripts=("common", "live"))

    def snippets(self, root: str) -> Snippets:
        """Return the snippets for this server."""
        return Snippets(self._model, self._key_needed, self._first_call(), root)

    def _first_call(self) -> FirstCall:
        """Return a call that the model answers: a chat, unless it is known that it can't chat."""
        capabilities = self._served.engine.capabilities
        if capabilities is not None and capabilities.embedding.only:
            return FirstCall.EMBEDDING
        try:
            return FirstCall.COMPLETION if self._served.text().no_chats else FirstCall.CHAT
        except EngineUnavailable:
            return FirstCall.CHAT

    def _about(self, *, known: bool) -> str:
        engine = self._served.engine
        capabilities = engine.capabilities
        facts = "" if capabilities is None else f'<dl class="facts">{_definitions(_facts(capabilities, engine))}</dl>'
        return (
            f'<div id="about" data-model="{escape(self._model)}" data-known="{"yes" if known else "no"}">{facts}</div>'
        )

    def _connect(self, root: str) -> str:
        snippets = self.snippets(root)
        url = snippet(snippets.html(f"{ROOT}/v1"), label="the base URL")
        key = "<p class='soft'>Calls need this server's API key, here in <code>$TREADLE_API_KEY</code>.</p>"
        free = "<p class='soft'>No API key is needed: any value will do where a client wants one.</p>"
        tabs = "".join(_tab(i, name, code) for i, (name, code) in enumerate(snippets.all().items()))
        return (
            '<section class="card" id="connect" aria-labelledby="call"><h2 id="call">Connect</h2>'
            f'<div class="url">{url}</div>{key if self._key_needed else free}'
            f'<div class="tabs" role="group" aria-label="Examples">{tabs}</div></section>'
        )


def root_of(scope: Scope) -> str:
    """Return the address of this server as the client wrote it, without a slash at its end: `http://127.0.0.1:8000`."""
    given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    if host_of(given) is None:
        host, port = scope.get("server") or ("127.0.0.1", 8000)
        given = f"{host}:{port}"
    return f"{scope['scheme']}://{given}"


def _tab(i: int, name: str, code: str) -> str:
    checked = " checked" if i == 0 else ""
    return (
        f'<input type="radio" name="tab" id="tab{i}"{checked}><label for="tab{i}">{name}</label>'
        f'<div class="panel">{snippet(code, label=f"the {name} example")}</div>'
    )


def _link(path: str, name: str, about: str) -> str:
    return f'<li><a href="{path}">{name}</a><small>{about}</small></li>'


def _definitions(facts: Iterable[tuple[str, str, str]]) -> str:
    return "".join(
        f"<div><dt>{name}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in facts
    )


def _facts(capabilities: Capabilities, engine: EngineClient) -> Iterable[tuple[str, str, str]]:
    """Yield facts about the model and the machine for a person: name, value, details."""
    parameters = f"{_count(capabilities.parameters)} parameters, " if capabilities.parameters else ""
    yield "Architecture", capabilities.architecture, f"{parameters}{capabilities.dtype}"
    covers = "one input" if capabilities.embedding.only else "prompt plus answer"
    yield "Context", f"{capabilities.context:,} tokens", covers
    details = capabilities.details
    software = f"mlx {details['mlx']}" if "mlx" in details else ""
    yield "Device", details.get("device", capabilities.device), ", ".join(filter(None, (capabilities.device, software)))
    yield "Compute path", capabilities.compute.backend.value, capabilities.compute.summary()
    yield "Memory", f"{size(capabilities.weight_bytes)} of weights", _cache(capabilities)
    admission = engine.admission.limits
    waiting = f"{admission.max_waiting} more wait up to {admission.max_wait_s:g} s"
    yield "Capacity", f"{admission.max_running} at once", waiting if admission.max_waiting else "others are refused"


def _cache(capabilities: Capabilities) -> str:
    if capabilities.compute.backend is Backend.ENCODER:
        return "no KV cache"
    budget = capabilities.kv.budget_bytes
    return f"KV cache up to {size(budget)}" if budget else "KV cache not limited"


def _count(count: float) -> str:
    return f"{count / 1e9:.3g} B" if count >= 999.5e6 else f"{count / 1e6:.3g} M"
