"""Latency of a probe while clients send large hostile requests (R7: p99 of at most 20 ms).

    python benchmarks/hostile_bodies.py URL [--grpc HOST:PORT] [--clients 4] [--seconds 10] [--megabytes 8]

Each shape is sent by `--clients` processes without a pause for `--seconds`, over HTTP or gRPC, while a prober in a
process of its own asks for /health/live fifty times a second. "nothing, busy clients" is the same number of processes
that only compute, a baseline on a machine of few cores. The figures are the prober's, and the server's own event loop
lag from /v1/status. Needs the Python that Treadle is installed in; start the server with `--max-running 4`.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
import urllib.parse
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

PROBES_PER_S = 50


def padded(head: str, unit: str, tail: str, size: int) -> bytes:
    return (head + ",".join([unit] * (size // (len(unit) + 1))) + tail).encode()


SHAPES: dict[str, Callable[[int], bytes]] = {
    "lists [[1],[1],...]": lambda size: padded('{"prompt":[', "[1]", "]}", size),
    "ids": lambda size: padded('{"prompt":[', "65", '],"max_tokens":1}', size),
    "strings": lambda size: padded('{"prompt":[', '"a"', "]}", size),
    "objects": lambda size: padded('{"prompt":"a","metadata":[', '{"a":1}', "]}", size),
    "deep": lambda size: b'{"prompt":' + b"[" * (size // 2) + b"]" * (size // 2) + b"}",
    "escapes": lambda size: b'{"prompt":"' + b"\\u0041" * (size // 6) + b'"}',
    "text": lambda size: b'{"prompt":"' + b"lorem ipsum " * (size // 12) + b'"}',
    "62,000 lists in 250 KB": lambda size: padded('{"prompt":[', "[1]", "]}", 250_000),
}


def prober(host: str, port: int, stop: Any, results: Any) -> None:
    """Time probes until `stop` is set, at fixed times and not one after the other: a late answer delays no probe but
    its own."""
    times: list[float] = []
    connection = HTTPConnection(host, port, timeout=20)
    due = time.monotonic()
    while not stop.is_set():
        time.sleep(max(0.0, due - time.monotonic()))
        began = time.monotonic()
        try:
            connection.request("GET", "/health/live")
            connection.getresponse().read()
        except OSError:
            connection.close()
        times.append(time.monotonic() - began)
        due = max(due + 1 / PROBES_PER_S, time.monotonic())
    results.put(times)


def sender(host: str, port: int, body: bytes, stop: Any, results: Any) -> None:
    codes: collections.Counter[str] = collections.Counter()
    while not stop.is_set():
        connection = HTTPConnection(host, port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            codes[str(answer.status)] += 1
            if answer.status in (413, 503):
                time.sleep(0.02)
        except OSError as error:
            codes[type(error).__name__] += 1
        finally:
            connection.close()
    results.put(dict(codes))


def burner(stop: Any, results: Any) -> None:
    """Compute only, as a baseline of latency caused by a lack of CPU alone."""
    counted = 0
    while not stop.is_set():
        counted += len(bytes(8_000_000))
    results.put({"busy": 1})


def rpc_sender(address: str, shape: str, size: int, stop: Any, results: Any) -> None:
    import grpc
    from smg_grpc_proto import mlx_engine_pb2 as pb
    from smg_grpc_proto import mlx_engine_pb2_grpc

    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    codes: collections.Counter[str] = collections.Counter()
    with grpc.insecure_channel(address, options) as channel:
        stub = mlx_engine_pb2_grpc.MlxEngineStub(channel)
        request = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=[65] * size), sampling_params=pb.SamplingParams(max_tokens=1)
        )
        abort = pb.AbortRequest(request_ids=[f"n{i}" for i in range(size // 9)])
        while not stop.is_set():
            try:
                if shape == "ids":
                    request.request_id = f"{os.getpid()}.{random.random()}"
                    for _ in stub.Generate(request, timeout=30):
                        pass
                else:
                    stub.Abort(abort, timeout=30)
                codes["OK"] += 1
            except grpc.RpcError as error:
                codes[error.code().name] += 1
    results.put(dict(codes))


def measured(host: str, port: int, seconds: float, clients: list[tuple[Any, tuple[Any, ...]]]) -> dict[str, Any]:
    """Return the prober's figures while `clients` run, and their counts."""
    context = multiprocessing.get_context("spawn")
    stop, times, counts = context.Event(), context.Queue(), context.Queue()
    senders = [context.Process(target=work, args=(*args, stop, counts)) for work, args in clients]
    for process in senders:
        process.start()
    time.sleep(2.0)
    probing = context.Process(target=prober, args=(host, port, stop, times))
    probing.start()
    time.sleep(seconds)
    stop.set()
    found = sorted(times.get(timeout=60))
    total: collections.Counter[str] = collections.Counter()
    for _ in senders:
        total.update(counts.get(timeout=120))
    for process in (*senders, probing):
        process.join(60)
    at = {name: found[min(len(found) - 1, int(len(found) * part))] for name, part in (("p50", 0.5), ("p99", 0.99))}
    return {"probes": len(found), **at, "max": found[-1], "mean": statistics.fmean(found), "codes": dict(total)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--grpc", metavar="HOST:PORT")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--megabytes", type=float, default=8.0)
    parser.add_argument("--shape", action="append", help="only shapes whose name begins so; may be repeated")
    options = parser.parse_args()
    parts = urllib.parse.urlsplit(options.url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    size = int(options.megabytes * 1_000_000) - 1000
    runs: dict[str, list[tuple[Any, tuple[Any, ...]]]] = {
        "nothing": [],
        "nothing, busy clients": [(burner, ())] * options.clients,
    }
    for name, make in SHAPES.items():
        runs[name] = [(sender, (host, port, make(size)))] * options.clients
    for shape, label in (("ids", "gRPC Generate, ids"), ("abort", "gRPC Abort, ids")) if options.grpc else ():
        runs[label] = [(rpc_sender, (options.grpc, shape, size))] * options.clients
    print(f"{'shape':24} {'probes':>6} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}  answers")
    for name, clients in runs.items():
        if options.shape and not any(name.startswith(prefix) for prefix in options.shape):
            continue
        found = measured(host, port, options.seconds, clients)
        figures = " ".join(f"{1000 * found[key]:8.1f}" for key in ("p50", "p99", "max"))
        print(f"{name:24} {found['probes']:6} {figures}  {json.dumps(found['codes'])}", flush=True)
    connection = HTTPConnection(host, port, timeout=20)
    connection.request("GET", "/v1/status")
    lag = json.loads(connection.getresponse().read())["event_loop_lag"]
    print("the server's own lag:", json.dumps(lag), file=sys.stderr)


if __name__ == "__main__":
    main()
