"""Routes of Ollama's API about models: /api/version, /api/tags, /api/ps and /api/show."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ....core.capabilities import Capabilities
from ....errors import EngineUnavailable, InvalidRequest
from ...served_models import IMAGE, Models, ServedModel
from ...strict_json import parse_json
from ..body import Body, BodyBudget, read_body
from ..guard import caller_of
from .answers import timestamp
from .requests import LATEST

OLLAMA = "0.12.6"
"""Version of Ollama whose API these routes follow. Some clients refuse old ones (Copilot in VS Code: before 0.6.4)."""
MAX_SHOW_BYTES = 64 * 1024
NEVER_S = 100 * 365.25 * 86400
"""Seconds until the served model is unloaded: it stays for as long as the server runs."""


class OllamaModels:
    """Routes that describe the served models. `version` is this server's."""

    def __init__(self, models: Models, version: str) -> None:
        self._models = models
        self._version = version
        self._started = time.time()

    def router(self) -> APIRouter:
        router = APIRouter(tags=["ollama"])
        reads = (("/api/version", self.version), ("/api/tags", self.tags), ("/api/ps", self.running))
        for path, answer in reads:
            router.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)
        router.add_api_route("/api/show", self.show, methods=["POST"], include_in_schema=False)
        return router

    async def version(self) -> Response:
        return _json({"version": OLLAMA, "treadle": self._version})

    async def tags(self) -> Response:
        return _json({"models": [self._card(model) for model in self._models]})

    async def running(self) -> Response:
        expires = {"expires_at": timestamp(self._started + NEVER_S)}
        loaded = [model for model in self._models if model.engine.capabilities is not None]
        return _json({"models": [self._card(model) | expires | _memory(model) for model in loaded]})

    async def show(self, request: Request) -> Response:
        model = self._models.get(await _name(request))
        can = model.engine.capabilities
        found: dict[str, Any] = {"license": "", "modelfile": f"FROM {model.name}\n", "parameters": "", "template": ""}
        found |= {"details": _details(can), "model_info": _info(model, can), "capabilities": _abilities(model)}
        return _json(found | {"modified_at": timestamp(self._started)})

    def _card(self, model: ServedModel) -> dict[str, Any]:
        can = model.engine.capabilities
        return {
            "name": model.name,
            "model": model.name,
            "modified_at": timestamp(self._started),
            "size": 0 if can is None else can.weight_bytes,
            "digest": hashlib.sha256(model.name.encode()).hexdigest(),
            "details": _details(can),
        }


async def _name(request: Request) -> str | None:
    """Return the model that a request for its description names, as `model` or, in older clients, `name`."""
    with Body(BodyBudget(MAX_SHOW_BYTES), caller_of(request.scope).tenant) as body:
        await read_body(request.receive, request.scope["headers"], body, limit=MAX_SHOW_BYTES)
        value = parse_json(body.data)
    name = value.get("model") or value.get("name")
    if not isinstance(name, str):
        raise InvalidRequest("model is missing: give the name of a model that /api/tags lists", param="model")
    return name.removesuffix(LATEST)


def _details(can: Capabilities | None) -> dict[str, Any]:
    family = "" if can is None else can.architecture
    return {
        "parent_model": "",
        "format": "mlx",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "" if can is None else _size(can.parameters),
        "quantization_level": "" if can is None else can.dtype,
    }


def _size(parameters: int) -> str:
    """Return a number of parameters as Ollama writes it: 8.2B, 268.10M."""
    if parameters >= 10**9:
        return f"{parameters / 10**9:.1f}B"
    return f"{parameters / 10**6:.2f}M"


def _info(model: ServedModel, can: Capabilities | None) -> dict[str, Any]:
    """Return facts under the names of GGUF, which clients look for."""
    if can is None:
        return {}
    family = can.architecture
    return {
        "general.architecture": family,
        "general.basename": model.name,
        "general.parameter_count": can.parameters,
        f"{family}.context_length": can.context,
        f"{family}.vocab_size": can.vocabulary,
    }


def _abilities(model: ServedModel) -> list[str]:
    can = model.engine.capabilities
    found = ["embedding"] if can is not None and not can.embedding.unavailable else []
    if can is not None and can.embedding.only:
        return found
    found.insert(0, "completion")
    try:
        formats = model.text().formats
    except EngineUnavailable:
        return found
    vision = ["vision"] if IMAGE in model.modalities else []
    return [*found, *vision, "tools", *(["thinking"] if formats.reasoning else [])]


def _memory(model: ServedModel) -> dict[str, Any]:
    can = model.engine.capabilities
    assert can is not None
    on_device = 0 if can.device == "cpu" else can.weight_bytes
    return {"size_vram": on_device, "context_length": can.context}


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
