"""A whole worker: the gRPC server on a real port over the real engine client, an inline owner and a scripted runner,
and a channel to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import grpc
from smg_grpc_proto import mlx_engine_pb2, mlx_engine_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc

from tests.fronts.runner import FrontRunner
from tests.fronts.web.server import ANSWER, says
from tests.support.bytes_text import BytesTexts, bytes_text
from treadle.config import Settings
from treadle.core.messages import Submit
from treadle.engine.admission import AdmissionLimits
from treadle.engine.client import EngineClient
from treadle.engine.inline import InlineOwner
from treadle.engine.owner import OwnerLimits
from treadle.fronts.connections import Connections
from treadle.fronts.media.service import ImageService
from treadle.fronts.rpc.server import RpcServer
from treadle.fronts.served_models import ServedModel
from treadle.telemetry.metrics import Metrics
from treadle.text import TextModel

WIRES = ("mlx", "vllm")
PROMPT = tuple(b"hello")


@dataclass
class Wire:
    """One wire's messages and a stub of its service."""

    pb: ModuleType
    stub: Any

    def request(
        self,
        request_id: str = "r1",
        prompt: Sequence[int] | str = PROMPT,
        *,
        stream: bool = True,
        **params: Any,
    ) -> Any:
        given: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {}
        if not given:
            given = {"tokenized": self.pb.TokenizedInput(input_ids=prompt)}
        return self.pb.GenerateRequest(
            request_id=request_id, stream=stream, sampling_params=self.pb.SamplingParams(**params), **given
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.stub.Generate(self.request(*args, **kwargs))

    async def answer(self, *args: Any, **kwargs: Any) -> Answer:
        """The whole answer to one request."""
        return await read(self.generate(*args, **kwargs))

    async def abort(self, *request_ids: str) -> None:
        await self.stub.Abort(self.pb.AbortRequest(request_ids=request_ids))


@dataclass
class Answer:
    chunks: list[Any]
    completes: list[Any]

    @property
    def tokens(self) -> bytes:
        """What was streamed of the first choice."""
        return bytes(token for chunk in self.chunks if chunk.index == 0 for token in chunk.token_ids if token < 256)

    @property
    def end(self) -> Any:
        (complete,) = self.completes
        return complete


async def read(call: Any) -> Answer:
    answer = Answer([], [])
    async for message in call:
        if message.HasField("chunk"):
            answer.chunks.append(message.chunk)
        else:
            answer.completes.append(message.complete)
    return answer


async def refused(call: Any) -> Any:
    """The error that `call` ends with."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("it was not refused")


@dataclass
class Scene:
    engine: EngineClient
    runner: FrontRunner
    owner: InlineOwner
    texts: BytesTexts
    metrics: Metrics
    server: RpcServer
    address: str
    channel: Any
    mlx: Wire
    vllm: Wire

    def wire(self, name: str) -> Wire:
        return self.mlx if name == "mlx" else self.vllm

    def idle(self) -> bool:
        """Nothing is held anywhere."""
        if self.owner.loop is not None:
            self.owner.loop.scheduler.check_integrity()
        held = self.engine.gate.rows or self.engine.gate.tokens or self.runner.rows or len(self.server.calls)
        return not held


async def until(condition: Callable[[], bool]) -> None:
    """Returns once `condition` holds; the network takes its turns meanwhile. A test's own bound ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def worker(
    script: Callable[[Submit, int], int] | None = None,
    *,
    start: bool = True,
    pump: bool = True,
    running: int = 4,
    waiting: int = 4,
    max_wait_s: float = 60.0,
    context: int = 4096,
    default_sampling: dict[str, float] | None = None,
    prefix_cache: bool = False,
    block: int = 0,
    cache_tokens: int = 0,
    connections: Connections | None = None,
    text: TextModel | None = None,
    images: ImageService | None = None,
    **settings: Any,
) -> AsyncIterator[Scene]:
    """A worker. `text`: its text model, instead of one with `context` and `default_sampling`. With `images` it reads
    images."""
    text = bytes_text(context, default_sampling) if text is None else text
    runner = FrontRunner(
        script or says(ANSWER),
        vocabulary=text.vocabulary,
        context=text.context,
        prefix_cache=prefix_cache,
        block=block,
        cache_tokens=cache_tokens,
    )
    if images is not None:
        runner.see(("text", "image"))
    owner = InlineOwner(lambda progress: runner, OwnerLimits(max_running=running, prefill_tokens=64), pump=pump)
    engine = EngineClient(lambda: owner, AdmissionLimits(running, waiting, max_wait_s))
    texts = BytesTexts(text)
    metrics = Metrics()
    configured = Settings(grpc_port=0, **settings)
    model = ServedModel(("m",), engine, texts, configured.max_tokens, images=images)
    server = RpcServer(model, configured, metrics, connections=connections)
    url = await server.start()
    if start:
        await engine.start()
    address = url.rpartition("/")[2]
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            yield Scene(
                engine,
                runner,
                owner,
                texts,
                metrics,
                server,
                address,
                channel,
                Wire(mlx_engine_pb2, mlx_engine_pb2_grpc.MlxEngineStub(channel)),
                Wire(vllm_engine_pb2, vllm_engine_pb2_grpc.VllmEngineStub(channel)),
            )
        finally:
            await engine.stop()
            await server.stop(0.1)
            if images is not None:
                await images.close()
