"""Abort many gRPC requests at random phases, and count the resources still held afterwards.

    python benchmarks/abort_storm.py [--grpc HOST:PORT] [--http URL] [--count 500] [--seed 0]

Against a running `treadle serve --grpc-port 50051`. A third of the requests is aborted by an Abort, a third by
cancelling the call, a third by an Abort that comes first; both wires take turns. Prints the ends, the times of Aborts,
and the rows that `/v1/status` still holds when all are over: these must be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
import urllib.request
from collections import Counter
from typing import Any

import grpc
from smg_grpc_proto import mlx_engine_pb2, mlx_engine_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc

AT_ONCE = 24


class Storm:
    def __init__(self, channel: Any, seed: int) -> None:
        self._wires = [
            (mlx_engine_pb2, mlx_engine_pb2_grpc.MlxEngineStub(channel)),
            (vllm_engine_pb2, vllm_engine_pb2_grpc.VllmEngineStub(channel)),
        ]
        self._rng = random.Random(seed)
        self._open = asyncio.Semaphore(AT_ONCE)
        self.ends: Counter[str] = Counter()
        self.abort_s: list[float] = []

    async def one(self, index: int) -> None:
        pb, stub = self._wires[index % 2]
        kind = ("abort", "cancel", "early")[index % 3]
        request_id = f"storm-{index}"
        prompt = [self._rng.randrange(3, 200) for _ in range(self._rng.choice((4, 40, 400)))]
        delay_s = self._rng.random() * 1.5
        async with self._open:
            if kind == "early":
                await self._abort(pb, stub, request_id)
            call = stub.Generate(
                pb.GenerateRequest(
                    request_id=request_id,
                    tokenized=pb.TokenizedInput(input_ids=prompt),
                    sampling_params=pb.SamplingParams(max_tokens=2000, ignore_eos=True, temperature=0.0),
                    stream=bool(index % 5),
                )
            )
            reading = asyncio.ensure_future(self._read(call))
            await asyncio.wait([reading], timeout=delay_s)
            if kind == "cancel":
                call.cancel()
            elif kind == "abort":
                await self._abort(pb, stub, request_id)
            self.ends[f"{kind}: {await reading}"] += 1

    async def _abort(self, pb: Any, stub: Any, request_id: str) -> None:
        began = time.perf_counter()
        await stub.Abort(pb.AbortRequest(request_ids=[request_id]))
        self.abort_s.append(time.perf_counter() - began)

    async def _read(self, call: Any) -> str:
        reason = "no Complete"
        try:
            async for message in call:
                if message.HasField("complete"):
                    reason = message.complete.finish_reason
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        except asyncio.CancelledError:
            return "call cancelled"
        return reason


def held(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/status", timeout=5) as answer:
        return int(json.load(answer)["admission"]["rows"])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grpc", default="127.0.0.1:50051", metavar="HOST:PORT")
    parser.add_argument("--http", default="http://127.0.0.1:8000", metavar="URL")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    async with grpc.aio.insecure_channel(options.grpc) as channel:
        storm = Storm(channel, options.seed)
        await asyncio.gather(*(storm.one(i) for i in range(options.count)))
    began, rows = time.perf_counter(), held(options.http)
    while rows and time.perf_counter() - began < 10:
        await asyncio.sleep(0.05)
        rows = held(options.http)
    for end, count in sorted(storm.ends.items()):
        print(f"{count:5}  {end}")
    print(f"Abort: p50 {1000 * statistics.median(storm.abort_s):.1f} ms, max {1000 * max(storm.abort_s):.1f} ms")
    print(f"rows still held: {rows} (after {time.perf_counter() - began:.2f} s)")


if __name__ == "__main__":
    asyncio.run(main())
