"""Clients of both gRPC wires, well-behaved and not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from smg_grpc_proto import mlx_engine_pb2, mlx_engine_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc

from .bad import RPC as BAD
from .engine import RAISES
from .outcome import End, Outcome
from .plan import Manner, Request

WIRES = {
    "mlx": (mlx_engine_pb2, mlx_engine_pb2_grpc.MlxEngineStub),
    "vllm": (vllm_engine_pb2, vllm_engine_pb2_grpc.VllmEngineStub),
}
REFUSALS = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")
REJECTIONS = ("INVALID_ARGUMENT", "NOT_FOUND", "UNAUTHENTICATED", "PERMISSION_DENIED", "FAILED_PRECONDITION")
PAUSE_S = 0.01
CHANNELS = 4
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500))
WRONG_KEY = (("authorization", "Bearer wrong"),)
STATUS_CALLS = ("HealthCheck", "GetModelInfo", "GetServerInfo")


class RpcClient:
    """Player of planned requests over a few channels. `close` ends them."""

    def __init__(self, port: int, run: str, key: str | None = None, host: str = "127.0.0.1") -> None:
        """`run` is a prefix of request ids, different in each run."""
        self._target = f"{host}:{port}"
        self._run = run
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._channels = [self._channel() for _ in range(CHANNELS)]

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def play(self, request: Request) -> list[Outcome]:
        """Send a request in its manner. A server's faults never raise."""
        outcome = Outcome(began=time.monotonic())
        own = self._channel() if request.manner is Manner.HANG_UP else None
        channel = own or self._channels[request.number % CHANNELS]
        try:
            await self._play(channel, request, outcome)
        except grpc.aio.AioRpcError as error:
            _failed(outcome, error)
        except asyncio.CancelledError:
            if own is None and request.manner is not Manner.CANCEL:
                raise
            outcome.end = End.LEFT
        finally:
            if own is not None:
                await own.close()
            outcome.ended = time.monotonic()
        return [outcome]

    def _channel(self) -> Any:
        return grpc.aio.insecure_channel(self._target, options=OPTIONS)

    async def _play(self, channel: Any, request: Request, outcome: Outcome) -> None:
        messages, stub = WIRES[request.wire]
        wire = stub(channel)
        message = self._message(messages, request)
        if request.manner is Manner.ASK:
            name = STATUS_CALLS[request.variant % len(STATUS_CALLS)]
            await getattr(wire, name)(getattr(messages, f"{name}Request")(), metadata=self._metadata)
            outcome.end = End.COMPLETE
            return
        if request.manner is Manner.EARLY_ABORT:
            await self._abort(messages, wire, message, outcome)
        timeout = 0.01 + 0.3 * request.after if request.manner is Manner.DEADLINE else None
        metadata = WRONG_KEY if request.manner is Manner.WRONG_KEY else self._metadata
        call = wire.Generate(message, timeout=timeout, metadata=metadata)
        if request.manner is Manner.TWICE:
            await self._twice(wire, message, call, outcome)
            return
        await self._read(call, messages, wire, message, request, outcome)

    async def _read(
        self, call: Any, messages: Any, wire: Any, message: Any, request: Request, outcome: Outcome
    ) -> None:
        """Read to the end, or act after some messages as the manner requires."""
        after = int(request.after * min(20, request.recipe.max_tokens))
        count = 0
        async for answer in call:
            _take(answer, outcome)
            count += 1
            if count == after + 1:
                if request.manner is Manner.ABORT:
                    await self._abort(messages, wire, message, outcome)
                elif request.manner in (Manner.CANCEL, Manner.HANG_UP):
                    call.cancel()
                    outcome.end = End.LEFT
                    return
            if request.manner is Manner.SLOW_READ:
                await asyncio.sleep(PAUSE_S)
        outcome.dones += 1
        ends = [end for found in outcome.finishes.values() for end in found]
        if ends:
            outcome.end = End.ABORTED if "abort" in ends else End.COMPLETE

    async def _abort(self, messages: Any, wire: Any, message: Any, outcome: Outcome) -> None:
        """Abort the request. A refusal of the Abort does not end the request itself."""
        try:
            await wire.Abort(messages.AbortRequest(request_ids=[message.request_id]), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if "treadle-error" in dict(error.trailing_metadata() or ()):
                outcome.abort_refused = f"{error.code().name}: {error.details()}"

    async def _twice(self, wire: Any, message: Any, call: Any, outcome: Outcome) -> None:
        """Send a second request with the same id, which is refused while the first runs; the first is not affected."""
        began = aiter(call)
        first = await anext(began, None)
        second = wire.Generate(message, metadata=self._metadata)
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in second:
                pass
        async for answer in _chained(first, began):
            _take(answer, outcome)
        outcome.dones += 1
        if outcome.finishes:
            outcome.end = End.COMPLETE

    def _message(self, messages: Any, request: Request) -> Any:
        recipe = request.recipe
        sampling: dict[str, Any] = {
            "temperature": recipe.temperature,
            "seed": recipe.seed,
            "max_tokens": recipe.max_tokens,
            "ignore_eos": True,
        }
        if recipe.logprobs:
            sampling["logprobs"] = 1
        if request.wire == "vllm":
            sampling |= {"n": recipe.n, "skip_special_tokens": True}
            sampling |= {"stop": [recipe.stop]} if recipe.stop else {}
        fields: dict[str, Any] = {"request_id": f"{self._run}-{request.number}", "stream": request.stream}
        ids: list[int] | None = recipe.ids
        if request.manner is Manner.BAD:
            _, wrong, _ = BAD[request.variant % len(BAD)]
            ids = wrong.get("ids", ids)
            fields |= {name: value for name, value in wrong.items() if name in fields}
            sampling |= {name: value for name, value in wrong.items() if name not in fields and name != "ids"}
        elif request.manner is Manner.TOO_LONG:
            ids = [65] * 5000
        elif request.manner is Manner.RAISES:
            ids = [*RAISES, *recipe.ids]
        if ids is not None:
            fields["tokenized"] = messages.TokenizedInput(input_ids=ids)
        return messages.GenerateRequest(sampling_params=messages.SamplingParams(**sampling), **fields)


async def _chained(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    if first is not None:
        yield first
    async for one in rest:
        yield one


def _take(answer: Any, outcome: Outcome) -> None:
    outcome.first_s = outcome.first_s or time.monotonic()
    if answer.HasField("chunk"):
        part = answer.chunk
        outcome.add(part.index, list(part.token_ids), None, part.output_logprobs.token_logprobs)
    else:
        done = answer.complete
        outcome.add(done.index, list(done.output_ids), done.finish_reason, done.output_logprobs.token_logprobs)


def _failed(outcome: Outcome, error: Any) -> None:
    """Record a status other than OK."""
    metadata = dict(error.trailing_metadata() or ())
    outcome.status = error.code().name
    outcome.code = metadata.get("treadle-error", "")
    outcome.message = error.details() or ""
    retry = metadata.get("retry-after-ms")
    outcome.retry_after_s = None if retry is None else float(retry) / 1000
    outcome.errors += 1
    if outcome.status in REFUSALS:
        if not outcome.code:
            outcome.end = End.UNREACHABLE
        elif outcome.code == "engine_died":
            outcome.end = End.ERROR
        else:
            outcome.end = End.REFUSED
    elif outcome.status in ("DEADLINE_EXCEEDED", "CANCELLED"):
        outcome.end = End.LEFT
    else:
        outcome.end = End.REJECTED if outcome.status in REJECTIONS else End.ERROR
