"""All dialects at once against a server that is full: each request is answered, or refused at once in its own shape.

    python benchmarks/mixed_overload.py --url http://127.0.0.1:8000 [--clients 64] [--seconds 20]

Clients of OpenAI's chats, responses and embeddings, of Anthropic's Messages and of Ollama's chats and embeddings send
one request after the other, half of them as streams, and do not wait after a refusal. An answer must be whole and in
its dialect's form, a refusal must be a 503 or 429 with Retry-After in its dialect's shape. Prints the counts and the
times of each dialect; exit code 1 for anything else. Start the server with few slots (`--max-running 4`).

Needs httpx alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

TURNS = [{"role": "user", "content": "Write about weaving."}]
REFUSED = (429, 503)


@dataclass(frozen=True)
class Dialect:
    """One dialect: its path and body, and the checks of whole answers, of the end of a stream, and of errors."""

    path: str
    body: dict[str, Any]
    whole: Callable[[dict[str, Any]], bool]
    refused: Callable[[dict[str, Any]], bool]
    ended: Callable[[str], bool] | None = None


def openai_error(body: dict[str, Any]) -> bool:
    return isinstance(body["error"]["message"], str) and {"type", "code", "param"} <= body["error"].keys()


def anthropic_error(body: dict[str, Any]) -> bool:
    return body["type"] == "error" and body["error"]["type"] in ("overloaded_error", "rate_limit_error", "api_error")


def ollama_error(body: dict[str, Any]) -> bool:
    return isinstance(body["error"], str)


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        {"messages": TURNS, "max_tokens": 48},
        lambda body: body["choices"][0]["finish_reason"] in ("stop", "length"),
        openai_error,
        lambda text: text.endswith("data: [DONE]\n\n"),
    ),
    "responses": Dialect(
        "/v1/responses",
        {"input": TURNS, "max_output_tokens": 48},
        lambda body: body["status"] in ("completed", "incomplete"),
        openai_error,
        lambda text: "event: response.completed" in text or "event: response.incomplete" in text,
    ),
    "messages": Dialect(
        "/v1/messages",
        {"messages": TURNS, "max_tokens": 48},
        lambda body: body["stop_reason"] in ("end_turn", "max_tokens"),
        anthropic_error,
        lambda text: "event: message_stop" in text,
    ),
    "ollama": Dialect(
        "/api/chat",
        {"messages": TURNS, "options": {"num_predict": 48}},
        lambda body: body["done"] is True,
        ollama_error,
        lambda text: json.loads(text.splitlines()[-1])["done"] is True,
    ),
    "embeddings": Dialect(
        "/v1/embeddings",
        {"input": ["the warp", "the weft", "the shed"]},
        lambda body: len(body["data"]) == 3,
        openai_error,
    ),
    "ollama embed": Dialect(
        "/api/embed", {"input": ["the warp"]}, lambda body: len(body["embeddings"]) == 1, ollama_error
    ),
}


@dataclass
class Tally:
    """Results of one dialect. `wrong` describes what was neither an answer nor a refusal."""

    counts: Counter[str] = field(default_factory=Counter)
    answered_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


async def client(http: httpx.AsyncClient, model: str, dialect: Dialect, tally: Tally, number: int, end: float) -> None:
    while time.monotonic() < end:
        stream = dialect.ended is not None and number % 2 == 0
        body = {"model": model, **dialect.body, **({} if dialect.ended is None else {"stream": stream})}
        began = time.monotonic()
        try:
            answer = await http.post(dialect.path, json=body)
            outcome = judge(dialect, answer, stream=stream)
        except (httpx.HTTPError, KeyError, ValueError, TypeError, IndexError) as error:
            outcome, answer = f"wrong: {error!r}", None
        took = time.monotonic() - began
        if outcome.startswith("wrong"):
            tally.wrong.append(f"{outcome}: {'' if answer is None else answer.text[-300:]}")
        tally.counts[outcome.partition(":")[0]] += 1
        (tally.answered_s if outcome == "answered" else tally.refused_s).append(took)
        if outcome != "answered":
            await asyncio.sleep(0.05)


def judge(dialect: Dialect, answer: httpx.Response, *, stream: bool) -> str:
    """Return "answered", "refused", or what is wrong."""
    if answer.status_code in REFUSED:
        good = dialect.refused(answer.json()) and int(answer.headers["retry-after"]) >= 1
        return "refused" if good else "wrong: a refusal in another shape"
    if answer.status_code != 200:
        return f"wrong: status {answer.status_code}"
    if stream:
        assert dialect.ended is not None
        return "answered" if dialect.ended(answer.text) else "wrong: a stream without its end"
    return "answered" if dialect.whole(answer.json()) else "wrong: an answer that is not whole"


async def run(url: str, clients: int, seconds: float) -> bool:
    tallies = {name: Tally() for name in DIALECTS}
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        names, end = list(DIALECTS), time.monotonic() + seconds
        work = [
            client(http, model, DIALECTS[names[i % len(names)]], tallies[names[i % len(names)]], i // len(names), end)
            for i in range(clients)
        ]
        await asyncio.gather(*work)
    print("| dialect | answered | refused | wrong | answered, median | refused, median and longest |")
    print("|---|---|---|---|---|---|")
    for name, tally in tallies.items():
        counts = [tally.counts[outcome] for outcome in ("answered", "refused", "wrong")]
        answered = statistics.median(tally.answered_s or [0.0])
        refused, longest = statistics.median(tally.refused_s or [0.0]), max(tally.refused_s, default=0.0)
        times = f"{answered:.2f} s | {refused * 1000:.0f} ms, {longest * 1000:.0f} ms"
        print(f"| {name} | {' | '.join(map(str, counts))} | {times} |")
        for wrong in tally.wrong[:5]:
            print(f"# {wrong}")
    return not any(tally.wrong for tally in tallies.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args()
    sys.exit(not asyncio.run(run(options.url, options.clients, options.seconds)))


if __name__ == "__main__":
    main()
