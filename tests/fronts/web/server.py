"""A whole front over the real engine client, an inline owner and a scripted runner, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from tests.fronts.runner import FrontRunner
from tests.support.asgi import Client, get, post
from tests.support.bytes_text import EOS, BytesTexts, bytes_text
from treadle.config import Settings
from treadle.core.compute_path import Backend
from treadle.core.messages import Submit
from treadle.engine.admission import AdmissionLimits
from treadle.engine.client import EngineClient
from treadle.engine.inline import InlineOwner
from treadle.engine.owner import OwnerLimits
from treadle.fronts.media.service import ImageService
from treadle.fronts.served_models import Models, ServedModel, alias_names, model_names
from treadle.fronts.web.app import create_app
from treadle.fronts.web.serving import WebServer
from treadle.telemetry import Telemetry
from treadle.text import TextModel

ANSWER = "The answer."


def says(text: str) -> Callable[[Submit, int], int]:
    """A script: this text, then the end."""
    data = text.encode()
    return lambda request, position: data[position] if position < len(data) else EOS


def forever(request: Submit, position: int) -> int:
    return ord("x")


@dataclass
class Front:
    """Everything of one server. Without `pump`, `step()` is what makes it move."""

    app: Any
    model: ServedModel
    engine: EngineClient
    runner: FrontRunner
    owner: InlineOwner
    texts: BytesTexts
    telemetry: Telemetry

    async def post(self, path: str, value: Any, **options: Any) -> Client:
        return await post(path, value, **options).run(self.app)

    async def get(self, path: str, **options: Any) -> Client:
        return await get(path, **options).run(self.app)

    async def chat(self, **fields: Any) -> Client:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})

    async def complete(self, **fields: Any) -> Client:
        return await self.post("/v1/completions", {"prompt": "hi", **fields})

    async def step(self, times: int = 1) -> None:
        for _ in range(times):
            await settle()
            self.owner.run_once()
        await settle()

    def idle(self) -> bool:
        """Nothing is held anywhere."""
        if self.owner.loop is not None:
            self.owner.loop.scheduler.check_integrity()
        return self.engine.gate.rows == 0 and self.engine.gate.tokens == 0 and not self.runner.rows


def embeds_only(f: Front) -> None:
    """Make the model one of embeddings alone, computed by an encoder."""
    can = f.engine.capabilities
    assert can is not None
    embedding, compute = replace(can.embedding, only=True), replace(can.compute, backend=Backend.ENCODER)
    f.engine.admission.capabilities = replace(can, embedding=embedding, compute=compute)


@contextlib.asynccontextmanager
async def on_port(app: Any) -> AsyncIterator[str]:
    """Serve `app` on a port of its own; gives the URL, for clients such as the official SDK."""
    sock = socket.create_server(("127.0.0.1", 0))
    web = WebServer(app)
    task = asyncio.create_task(web.serve([sock]))
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        web.stop()
        await task


async def settle(turns: int = 30) -> None:
    """Let everything that can run now, run."""
    for _ in range(turns):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def front(
    script: Callable[[Submit, int], int] | None = None,
    *,
    pump: bool = True,
    running: int = 4,
    waiting: int = 4,
    max_wait_s: float = 60.0,
    context: int = 4096,
    default_sampling: dict[str, float] | None = None,
    prefix_cache: bool = False,
    cache_tokens: int = 0,
    text: TextModel | None = None,
    images: ImageService | None = None,
    modalities: tuple[str, ...] = ("text", "image"),
    **settings: Any,
) -> AsyncIterator[Front]:
    """A started front. `text`: its text model, instead of one with `context` and `default_sampling`. With `images` it
    reads images, and its engine has `modalities`."""
    text = bytes_text(context, default_sampling) if text is None else text
    runner = FrontRunner(
        script or says(ANSWER),
        vocabulary=text.vocabulary,
        context=text.context,
        prefix_cache=prefix_cache,
        cache_tokens=cache_tokens,
    )
    if images is not None:
        runner.see(modalities)
    owner = InlineOwner(lambda progress: runner, OwnerLimits(max_running=running, prefill_tokens=64), pump=pump)
    telemetry = Telemetry()
    engine = EngineClient(lambda: owner, AdmissionLimits(running, waiting, max_wait_s), observers=[telemetry.metrics])
    texts = BytesTexts(text)
    configured = Settings(**{"served_model_name": "m", **settings})
    model = ServedModel(model_names(configured), engine, texts, configured.max_tokens, alias_names(configured), images)
    telemetry.metrics.watch(model)
    app = create_app(Models(model, require_name=configured.require_model), configured, telemetry)
    await engine.start()
    try:
        yield Front(app, model, engine, runner, owner, texts, telemetry)
    finally:
        await engine.stop()
        if images is not None:
            await images.close()
