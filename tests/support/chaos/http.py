"""HTTP clients, well-behaved and not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from .bad import HTTP as BAD
from .connection import DISCONNECTED, Connection, Door
from .outcome import End, Outcome
from .plan import Manner, Request

PAUSE_S = 0.002
STATUS_PATHS = ("/v1/status", "/metrics", "/v1/models", "/health/ready", "/health/live")
BYTE_BY_BYTE = 200  # of a slow writer's request; the rest comes in ten pieces


class Left(Exception):
    """The client leaves now, on purpose."""


class HttpClient:
    """Player of planned requests."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def play(self, request: Request) -> list[Outcome]:
        """Send a request in its manner; return an outcome for each of its recipes. A server's faults never raise."""
        outcomes = [Outcome(began=time.monotonic()) for _ in request.recipes]
        connection: Connection | None = None
        try:
            connection = await self._door.open(slow=request.manner is Manner.SLOW_READ)
            await self._play(connection, request, outcomes)
        except Left:
            outcomes[-1].end = End.LEFT
        except DISCONNECTED as error:
            _cut(outcomes, error)
        except ValueError as error:
            outcomes[-1].message = f"unreadable: {error!r}"
        finally:
            if connection is not None:
                connection.rst() if request.manner in (Manner.RST, Manner.DEADLINE) else connection.fin()
            for outcome in outcomes:
                outcome.ended = outcome.ended or time.monotonic()
        return outcomes

    async def _play(self, connection: Connection, request: Request, outcomes: list[Outcome]) -> None:
        match request.manner:
            case Manner.KEEP_ALIVE:
                for i, outcome in enumerate(outcomes):
                    outcome.began = time.monotonic()
                    connection.writer.write(self._door.of(request, i, close=False))
                    await self._answer(connection, outcome)
            case Manner.PIPELINE:
                for i in range(len(outcomes)):
                    connection.writer.write(self._door.of(request, i, close=False))
                for outcome in outcomes:
                    await self._answer(connection, outcome)
            case Manner.TORN:
                data = self._door.of(request)
                connection.writer.write(data[: 1 + int(request.after * (len(data) - 2))])
                await connection.writer.drain()
                raise Left
            case Manner.DEADLINE:
                connection.writer.write(self._door.of(request))
                try:
                    async with asyncio.timeout(0.3 * request.after):
                        await self._answer(connection, outcomes[0])
                except TimeoutError:
                    raise Left from None
            case Manner.HALF_CLOSE:
                connection.writer.write(self._door.of(request))
                connection.writer.write_eof()
                await self._answer(connection, outcomes[0])
            case _:
                await self._one(connection, request, outcomes[0])

    async def _one(self, connection: Connection, request: Request, outcome: Outcome) -> None:
        """Send a request of its own, and read to its end or until its client leaves."""
        await self._send(connection, request)
        leave = request.after if request.manner in (Manner.RST, Manner.FIN) else None
        pause_s = PAUSE_S if request.manner is Manner.SLOW_READ else 0.0
        if leave is not None and leave < 0.1:
            raise Left
        await self._answer(connection, outcome, pause_s, None if leave is None else _events(request))
        if leave is not None:
            raise Left
        outcome.surplus += await connection.rest()

    async def _send(self, connection: Connection, request: Request) -> None:
        data = self._data(request)
        if request.manner is not Manner.SLOW_WRITE:
            connection.writer.write(data)
            return
        head, tail = data[:BYTE_BY_BYTE], data[BYTE_BY_BYTE:]
        step = max(1, len(tail) // 10)
        for part in [*(bytes([byte]) for byte in head), *(tail[i : i + step] for i in range(0, len(tail), step))]:
            connection.writer.write(part)
            await connection.writer.drain()
            await asyncio.sleep(PAUSE_S / 2)

    def _data(self, request: Request) -> bytes:
        match request.manner:
            case Manner.BAD:
                path, body, _ = BAD[request.variant % len(BAD)]
                return self._door.request(path, body, close=True)
            case Manner.WRONG_KEY:
                path, fields = request.recipe.http(stream=request.stream)
                return self._door.request(path, json.dumps(fields).encode(), close=True, key="wrong")
            case Manner.ASK:
                return self._door.request(STATUS_PATHS[request.variant % len(STATUS_PATHS)], None, close=True)
            case _:
                return self._door.of(request)

    async def _answer(
        self, connection: Connection, outcome: Outcome, pause_s: float = 0.0, events: int | None = None
    ) -> None:
        """Read one response into `outcome`; raises Left after `events` events of a stream."""
        status, headers = await connection.head()
        outcome.status = str(status)
        outcome.end = End.NOTHING
        retry = headers.get("retry-after")
        outcome.retry_after_s = None if retry is None else float(retry)
        if "text/event-stream" in headers.get("content-type", ""):
            await _read_stream(connection.body(headers, pause_s), outcome, events)
        else:
            body = b"".join([part async for part in connection.body(headers, pause_s)])
            _read_whole(status, body, outcome)
        outcome.ended = time.monotonic()


def _events(request: Request) -> int:
    return 1 + int(request.after * min(20, request.recipe.max_tokens))


async def _read_stream(parts: AsyncIterator[bytes], outcome: Outcome, events: int | None) -> None:
    """Read server-sent events to their end."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                _event(line[6:].strip(), outcome)
                if events is not None and (events := events - 1) <= 0:
                    raise Left
    if outcome.errors:
        outcome.end = End.ERROR
    elif outcome.dones:
        outcome.end = End.COMPLETE


def _event(data: bytes, outcome: Outcome) -> None:
    outcome.first_s = outcome.first_s or time.monotonic()
    if data == b"[DONE]":
        outcome.surplus += bool(outcome.dones)
        outcome.dones += 1
        return
    event = json.loads(data)
    if "error" in event:
        outcome.errors += 1
        outcome.code, outcome.message = event["error"]["code"], event["error"]["message"]
        return
    _choices(event["choices"], outcome)


def _choices(choices: Sequence[Any], outcome: Outcome) -> None:
    for choice in choices:
        tokens, scores = choice.get("token_ids") or [], choice.get("logprobs") or {}
        entries = scores.get("token_logprobs") or [entry["logprob"] for entry in scores.get("content") or ()]
        outcome.add(choice["index"], tokens, choice["finish_reason"], entries)


def _read_whole(status: int, body: bytes, outcome: Outcome) -> None:
    """Read an answer in one piece, or a refusal."""
    if status == 200:
        if body.startswith(b'{"') and (answer := json.loads(body)).get("choices") is not None:
            _choices(answer["choices"], outcome)
            outcome.dones = 1
        outcome.end = End.COMPLETE
        return
    error = json.loads(body)["error"]
    outcome.code, outcome.message = error["code"], error["message"]
    if status == 503:
        outcome.end = End.REFUSED
    else:
        outcome.end = End.REJECTED if status < 500 else End.ERROR


def _cut(outcomes: Sequence[Outcome], error: BaseException) -> None:
    """Record the end of the connection in outcomes that have no end yet."""
    for outcome in outcomes:
        if outcome.end is End.NOTHING:
            outcome.end = End.NOTHING if outcome.status else End.UNREACHABLE
            outcome.message = type(error).__name__
