"""Embeddings beside generation, over HTTP: what running streams lose, and texts a second.

    python benchmarks/embeddings.py --url http://127.0.0.1:8000 [--texts 64] [--streams 8] [--words 64] [--tokens 300]

It measures in turn, each on a fresh set of texts, so that no cached prompt helps:

streams alone    their tokens a second, and the longest gap between two tokens of a stream
one at a time    texts sent one after the other, with nothing beside them
together         all texts in one request, with nothing beside them
beside streams   all texts in one request, while the streams run: gaps from its sending to its answer
again            the same once more: the first time the scheduler learns what such prompts cost beside streams

Start a server first, such as `treadle serve demo --max-running 16`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field

import httpx

WORDS = ("loom", "warp", "weft", "thread", "shuttle", "cloth", "pattern", "treadle", "heddle", "yarn", "dye", "wool")


@dataclass
class Stream:
    """One running stream: the times of its tokens. It has begun after the first few."""

    at: list[float] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def token(self) -> None:
        self.at.append(time.perf_counter())
        if len(self.at) > 8:
            self.begun.set()

    def gaps(self, start: float, end: float) -> list[float]:
        """Return the gaps that lie at least in part between two times."""
        pairs = zip(self.at, self.at[1:], strict=False)
        return [later - earlier for earlier, later in pairs if later > start and earlier < end]

    def rate(self, start: float, end: float) -> float:
        return sum(start <= at <= end for at in self.at) / (end - start)


def texts_of(count: int, words: int, dice: random.Random) -> list[str]:
    return [" ".join(dice.choice(WORDS) for _ in range(words)) + f" {dice.random()}" for _ in range(count)]


async def run_stream(client: httpx.AsyncClient, tokens: int, number: int, stream: Stream) -> None:
    body = {"prompt": f"Story {number}:", "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                stream.token()


async def embed(client: httpx.AsyncClient, texts: list[str]) -> float:
    """Embed all texts in one request. Return its seconds."""
    began = time.perf_counter()
    answer = await client.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"})
    answer.raise_for_status()
    assert len(answer.json()["data"]) == len(texts)
    return time.perf_counter() - began


async def streams_with(
    client: httpx.AsyncClient, options: argparse.Namespace, texts: list[str]
) -> tuple[list[Stream], float, float]:
    """Run the streams, and embed `texts` once all have begun. Return the streams, and the start and the end of the
    texts' request; without texts, of the time in which all streams ran."""
    streams = [Stream() for _ in range(options.streams)]
    tasks = [asyncio.create_task(run_stream(client, options.tokens, i, stream)) for i, stream in enumerate(streams)]
    await asyncio.gather(*(stream.begun.wait() for stream in streams))
    start = time.perf_counter()
    if texts:
        await embed(client, texts)
        end = time.perf_counter()
    await asyncio.gather(*tasks)
    return streams, start, end if texts else min(stream.at[-1] for stream in streams)


def report(name: str, streams: list[Stream], start: float, end: float) -> dict[str, float]:
    gaps = sorted(gap for stream in streams for gap in stream.gaps(start, end))
    found = {
        "tokens_per_s": sum(stream.rate(start, end) for stream in streams),
        "longest_gap_ms": 1000 * gaps[-1],
        "median_gap_ms": 1000 * statistics.median(gaps),
    }
    shown = ", ".join(f"{key} {value:.1f}" for key, value in found.items())
    print(f"{name:16}{shown}", flush=True)
    return found


async def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    dice = random.Random(options.seed)
    found: dict[str, dict[str, float]] = {}
    async with httpx.AsyncClient(base_url=options.url, timeout=600) as client:
        await embed(client, texts_of(4, options.words, dice))
        alone = await streams_with(client, options, [])
        found["streams alone"] = report("streams alone", *alone)
        seconds = [await embed(client, texts_of(1, options.words, dice)) for _ in range(options.texts)]
        together = await embed(client, texts_of(options.texts, options.words, dice))
        rates = {"one at a time": options.texts / sum(seconds), "together": options.texts / together}
        for name, rate in rates.items():
            found[name] = {"texts_per_s": rate}
            print(f"{name:16}texts_per_s {rate:.1f}", flush=True)
        for name in ("beside streams", "again"):
            streams, start, end = await streams_with(client, options, texts_of(options.texts, options.words, dice))
            found[name] = report(name, streams, start, end)
            found[name]["texts_per_s"] = options.texts / (end - start)
            print(f"{'':16}texts_per_s {options.texts / (end - start):.1f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--words", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON at the end")
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
