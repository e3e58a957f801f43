"""Hostile requests, each a file in `requests/` with the answer that it must get.

A file has `why`, and one or both of two tables:

    [http]    `body` for a POST to `path` (/v1/completions), with `headers`; or `bytes`, a body of which each character
              is one byte; or `raw`, everything that goes over the connection. The answer's `status` (one, or a list;
              0: the connection ends without an answer), its error's `code`, and words that its message `says`; with
              `answers`, how many answers come over the connection until it ends. `keyed` is the status from a server
              that asks for a key, where any host name is answered.
    [grpc]    `message` as protobuf's JSON for the method `call` (Generate), or `bytes`, on `wires` (both), with
              `metadata`, a line `name: value` each (a name that ends in -bin has bytes). A `call` may be a whole path,
              of another service. The answer's `status`, and words that its details `says`.

`<3 x ab>` in a request stands for ababab.
"""

from __future__ import annotations

import contextlib
import re
import socket
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import msgspec
from google.protobuf import json_format
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto import mlx_engine_pb2, mlx_engine_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc

FOLDER = Path(__file__).with_name("requests")
WIRES = {
    "mlx": (mlx_engine_pb2, mlx_engine_pb2_grpc.MlxEngineStub, "mlx.grpc.engine.MlxEngine"),
    "vllm": (vllm_engine_pb2, vllm_engine_pb2_grpc.VllmEngineStub, "vllm.grpc.engine.VllmEngine"),
}
_KINDS = {
    "/grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest,
    "/grpc.health.v1.Health/Watch": health_pb2.HealthCheckRequest,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": reflection_pb2.ServerReflectionRequest,
}
ANSWER_S = 60.0
MOST_BYTES = 64 * 1024 * 1024
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] \d{3} ")
_STREAMS = ("Generate", "GetTokenizer", "Watch", "SubscribeKvEvents")
_ENDLESS = ("Watch", "SubscribeKvEvents")
_REPEATED = re.compile(r"<(\d+) x ([^>]*)>")


@dataclass(frozen=True)
class Answer:
    """What came back: an HTTP status or the name of a gRPC status, the error's code, its words, and how many answers
    the connection had."""

    status: int | str
    code: str = ""
    message: str = ""
    count: int = 1


@dataclass(frozen=True)
class Poison:
    """One hostile request over one protocol: `front` is http, or the name of a gRPC wire."""

    name: str
    why: str
    front: str
    table: Mapping[str, Any]

    def send(self, host: str, http_port: int, channel: Any = None, *, key: str = "") -> Answer:
        """Send it over a connection of its own, with `key` if any, or the gRPC `channel`; what came back."""
        if self.front == "http":
            return _over_http(host, http_port, self.table, key)
        return _over_grpc(channel, self.front, self.table)

    def wrong(self, answer: Answer, *, keyed: bool = False) -> str:
        """What is wrong with an answer, for a client that had to bring a key with `keyed`; empty where nothing is."""
        wanted = self.table.get("keyed", self.table["status"]) if keyed else self.table["status"]
        if answer.status not in (wanted if isinstance(wanted, list) else [wanted]):
            return f"{answer.status} ({answer.message[:200]}), wanted {wanted}"
        if answer.count != self.table.get("answers", answer.count):
            return f"{answer.count} answers, wanted {self.table['answers']}"
        refused = answer.status not in (200, "OK", 0)
        if refused and self.table.get("code", answer.code) != answer.code:
            return f"code {answer.code!r}, wanted {self.table['code']!r}"
        lacking = [word for word in self.table.get("says", ()) if refused and word not in answer.message]
        return f"its message does not say {lacking}: {answer.message[:200]}" if lacking else ""


def corpus(fronts: Sequence[str] = ("http", "mlx", "vllm")) -> list[Poison]:
    """Every request of the corpus over every one of `fronts` that it is for."""
    found = []
    for file in sorted(FOLDER.glob("*.toml")):
        case = tomllib.loads(file.read_text(encoding="utf-8"))
        if "http" in case and "http" in fronts:
            found.append(Poison(file.stem, case["why"], "http", case["http"]))
        wires = case["grpc"].get("wires", WIRES) if "grpc" in case else ()
        found += [Poison(file.stem, case["why"], wire, case["grpc"]) for wire in wires if wire in fronts]
    return found


def expanded(text: str) -> str:
    """`text` with every `<N x ...>` written out."""
    return _REPEATED.sub(lambda match: int(match[1]) * match[2], text)


# Over HTTP ------------------------------------------------------------------------------------------------------------


def _over_http(host: str, port: int, table: Mapping[str, Any], key: str) -> Answer:
    data = _request(table)
    if key and b"\r\nAuthorization:" not in data:
        data = data.replace(b"\r\nHost:", b"\r\nAuthorization: Bearer %s\r\nHost:" % key.encode(), 1)
    with socket.create_connection((host, port), timeout=ANSWER_S) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused early: the answer can still be read
            sock.sendall(data)
        return _answer(_read(sock, whole="answers" not in table))


def _request(table: Mapping[str, Any]) -> bytes:
    if "raw" in table:
        return expanded(table["raw"]).encode("latin-1")
    body = expanded(table["body"]).encode() if "body" in table else expanded(table["bytes"]).encode("latin-1")
    head = [
        f"POST {table.get('path', '/v1/completions')} HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(body)}",
        *table.get("headers", ()),
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def _read(sock: socket.socket, *, whole: bool) -> bytes:
    """Everything up to the end of the connection, or with `whole` to the length that the first answer names."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while len(data) < MOST_BYTES and not (whole and _whole(data)) and (part := sock.recv(65536)):
            data += part
    return data


def _whole(data: bytes) -> bool:
    head, found, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return bool(found and length and len(body) >= int(length[1]))


def _answer(data: bytes) -> Answer:
    if not data:
        return Answer(0)
    head, _, body = data.partition(b"\r\n\r\n")
    status, count = int(head.split()[1]), len(_STATUS_LINE.findall(data))
    try:
        error = msgspec.json.decode(body)["error"]
        return Answer(status, str(error.get("code", "")), str(error["message"]), count)
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return Answer(status, message=body[:200].decode("utf-8", "replace"), count=count)


# Over gRPC ------------------------------------------------------------------------------------------------------------


def _over_grpc(channel: Any, wire: str, table: Mapping[str, Any]) -> Answer:
    messages, _, service = WIRES[wire]
    method = table.get("call", "Generate")
    path = method if method.startswith("/") else f"/{service}/{method}"
    try:
        answers = _call(channel, path, _message(messages, method, table), _metadata(table))
    except grpc.RpcError as error:
        return Answer(error.code().name, message=error.details() or "", count=0)
    return Answer("OK", count=answers)


def _call(channel: Any, path: str, message: bytes, metadata: Sequence[tuple[str, str | bytes]]) -> int:
    """How many messages came back; of an endless stream one is read."""
    name = path.rpartition("/")[2]
    raw: dict[str, Any] = {"request_serializer": None, "response_deserializer": None}
    sent: dict[str, Any] = {"timeout": ANSWER_S, "metadata": metadata}
    if name == "ServerReflectionInfo":
        return len(list(channel.stream_stream(path, **raw)(iter([message]), **sent)))
    if name not in _STREAMS:
        channel.unary_unary(path, **raw)(message, **sent)
        return 1
    stream = channel.unary_stream(path, **raw)(message, **sent)
    if name not in _ENDLESS:
        return len(list(stream))
    next(stream)
    stream.cancel()
    return 1


def _metadata(table: Mapping[str, Any]) -> list[tuple[str, str | bytes]]:
    lines = expanded(table.get("metadata", "")).splitlines()
    pairs = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
    return [(name, value.encode("latin-1") if name.endswith("-bin") else value) for name, value in pairs]


def _message(messages: Any, method: str, table: Mapping[str, Any]) -> bytes:
    if "bytes" in table:
        return expanded(table["bytes"]).encode("latin-1")
    kind = _KINDS[method] if method.startswith("/") else getattr(messages, f"{method}Request")
    message: bytes = json_format.Parse(expanded(table["message"]), kind()).SerializeToString()
    return message
