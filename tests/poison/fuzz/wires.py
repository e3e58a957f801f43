"""Requests for a server over HTTP and gRPC, mutated from valid ones, and what an answer must not be."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec

from tests.poison.corpus import WIRES, corpus, expanded
from tests.poison.fuzz.mutate import NUMBERS, TEXTS, changed, torn, words, written

ANSWER_S = 60.0
COMPLETION = {"prompt": "hi", "max_tokens": 3, "temperature": 0.7, "seed": 1, "stop": ["x"], "logprobs": 2, "n": 2}
CHAT = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "hu"},
    ],
    "max_tokens": 3,
    "logprobs": True,
    "top_logprobs": 2,
    "stop": "x",
}
KEYS = words(
    "model prompt messages max_tokens max_completion_tokens min_tokens temperature top_p top_k min_p seed n stop "
    "stream stream_options logprobs top_logprobs logit_bias echo suffix best_of user presence_penalty "
    "frequency_penalty repetition_penalty stop_token_ids ignore_eos return_token_ids cache_salt priority "
    "response_format tools tool_choice chat_template chat_template_kwargs add_generation_prompt "
    "continue_final_message role content name type text tool_calls tool_call_id include_usage truncate_prompt_tokens "
    "metadata store"
)
RAW = [expanded(poison.table["raw"]).encode("latin-1") for poison in corpus(("http",)) if "raw" in poison.table]
WELL_FORMED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 33\r\n\r\n"
    b'{"prompt": "hi", "max_tokens": 2}',
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'21\r\n{"prompt": "hi", "max_tokens": 2}\r\n0\r\n\r\n',
    b"GET /v1/models?a=b HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n" * 2,
)
TELLING = re.compile(r"Traceback|object at 0x|site-packages|File \"/")
FINE = frozenset(
    [
        "OK",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "UNIMPLEMENTED",
        "OUT_OF_RANGE",
        "ALREADY_EXISTS",
        "RESOURCE_EXHAUSTED",
        "PERMISSION_DENIED",
    ]
)
_STATUS = re.compile(rb"(?:^|\r\n\r\n.*?)HTTP/1\.[01] (\d{3}) ", re.DOTALL)


@dataclass(frozen=True)
class Target:
    """Where the requests go."""

    host: str
    port: int
    grpc_port: int
    channel: Any


Case = Callable[[Target], str]
"""Sends one request; what is wrong with its answer, empty where nothing is."""


def json_case(rng: random.Random) -> Case:
    """A body for one of the two routes that generate."""
    path, valid = rng.choice((("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)))
    body = written(rng, changed(rng, valid, KEYS))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    data = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    return lambda target: judged(data, exchanged(target.host, target.port, data))


def http_case(rng: random.Random) -> Case:
    """Bytes that are nearly HTTP."""
    data = torn(rng, rng.choice((*RAW, *WELL_FORMED, *WELL_FORMED)))
    return lambda target: judged(data, exchanged(target.host, target.port, data, half_close=True), silence=True)


def http2_case(rng: random.Random) -> Case:
    """Bytes that are nearly HTTP/2, for the gRPC port."""
    frames = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", _frame(rng, 4, 0, 0, b"")]
    frames += [
        _frame(rng, rng.randrange(12), rng.randrange(256), rng.choice((0, 1, 3, 2**31 - 1)), None) for _ in range(5)
    ]
    data = torn(rng, b"".join(frames)) if rng.random() < 0.5 else b"".join(frames)
    return lambda target: _took_in_time(target, data)


def _frame(rng: random.Random, kind: int, flags: int, stream: int, payload: bytes | None) -> bytes:
    payload = rng.randbytes(rng.choice((0, 4, 5, 8, 100))) if payload is None else payload
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _took_in_time(target: Target, data: bytes) -> str:
    try:
        exchanged(target.host, target.grpc_port, data, half_close=True)
    except TimeoutError:
        return f"the connection stays open for {ANSWER_S:g} s: {data[:300]!r}"
    return ""


def grpc_case(rng: random.Random) -> Case:
    """A message of either wire, as changed fields or changed bytes."""
    wire = rng.choice(tuple(WIRES))
    messages, _, service = WIRES[wire]
    method = rng.choice(("Generate", "Generate", "Generate", "Generate", "Abort", "GetTokenizer", "HealthCheck"))
    data = _generate(rng, messages.GenerateRequest()) if method in ("Generate", "GetTokenizer") else b"\n\x01a"
    if rng.random() < 0.3:
        data = torn(rng, data)
    return lambda target: _called(target.channel, f"/{service}/{method}", data, method in ("Generate", "GetTokenizer"))


def _generate(rng: random.Random, message: Any) -> bytes:
    message.request_id = f"fuzz-{rng.random()}"
    message.tokenized.input_ids.extend([5, 6, 7])
    message.sampling_params.max_tokens = 3
    for _ in range(rng.randint(1, 3)):
        _set(rng, rng.choice((message, message.sampling_params, message.tokenized)))
    found: bytes = message.SerializeToString()
    return found


def _set(rng: random.Random, message: Any) -> None:
    """Give one field of a message an odd value; one that it can't hold changes nothing."""
    field = rng.choice(message.DESCRIPTOR.fields)
    odd = rng.choice(
        (*NUMBERS, *(-n for n in NUMBERS), 0.5, -1.0, float("nan"), float("inf"), 1e-40, 3e38, *TEXTS, b"\xff")
    )
    with contextlib.suppress(TypeError, ValueError, AttributeError, OverflowError):
        place = getattr(message, field.name)
        if hasattr(place, "extend"):
            place.extend([odd] * rng.choice((1, 3, 5000)))
        elif hasattr(place, "DESCRIPTOR"):
            place.SetInParent()
            _set(rng, place)
        else:
            setattr(message, field.name, odd)


def _called(channel: Any, path: str, data: bytes, streams: bool) -> str:
    kind = channel.unary_stream if streams else channel.unary_unary
    call = kind(path, request_serializer=None, response_deserializer=None)
    try:
        list(call(data, timeout=ANSWER_S)) if streams else call(data, timeout=ANSWER_S)
    except grpc.RpcError as error:
        name, words = error.code().name, error.details() or ""
        told = TELLING.search(words)
        return f"{path} {name}: {words[:300]} for {data[:300]!r}" if name not in FINE or told else ""
    return ""


def exchanged(host: str, port: int, data: bytes, *, half_close: bool = False) -> bytes:
    """What comes back until the connection ends. Raises TimeoutError where it does not."""
    found, end = b"", time.monotonic() + ANSWER_S
    with socket.create_connection((host, port), timeout=ANSWER_S) as sock, contextlib.suppress(ConnectionError):
        with contextlib.suppress(OSError):  # closed early: its answer can still be read
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
        while part := sock.recv(65536):
            found += part
            if time.monotonic() > end:
                raise TimeoutError
    return found


def judged(sent: bytes, answer: bytes, *, silence: bool = False) -> str:
    """What is wrong with the first answer of a connection; with `silence` none may come."""
    if not answer:
        return "" if silence else f"no answer to {sent[:600]!r}"
    head, _, body = answer.partition(b"\r\n\r\n")
    match = re.match(rb"HTTP/1\.[01] (\d{3}) ", head)
    if match is None:
        return f"no HTTP: {answer[:200]!r} for {sent[:600]!r}"
    status = int(match[1])
    if status >= 500 and status not in (501, 505):
        return f"{status}: {body[:300]!r} for {sent[:600]!r}"
    if TELLING.search(body[:20_000].decode("utf-8", "replace")) or b'"type":"server_error"' in body:
        return f"it tells of the server's inside: {body[:600]!r} for {sent[:600]!r}"
    return "" if status < 400 or silence else _judged_error(body, sent)


def _judged_error(body: bytes, sent: bytes) -> str:
    try:
        error = msgspec.json.decode(body)["error"]
        whole = error["code"] and error["type"] and 0 < len(error["message"]) < 3000
    except (msgspec.MsgspecError, KeyError, TypeError):
        whole = False
    return "" if whole else f"an error without its envelope: {body[:300]!r} for {sent[:600]!r}"


KINDS: dict[str, Callable[[random.Random], Case]] = {
    "json": json_case,
    "http": http_case,
    "http2": http2_case,
    "grpc": grpc_case,
}
