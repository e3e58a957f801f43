"""Long prompts against a running server: time to first token, whole answers, a client that leaves, and the next one.

    python benchmarks/long_context.py [--url http://127.0.0.1:8000] [--model NAME] [--tokens 16384 65536 131072]
        [--answer 64] [--rounds 1] [--seed 0] [--json OUT]

For each length: a streamed answer; one that is not streamed; a client that leaves in the middle of the prompt, and a
short request right behind it, compared with the same one on an idle server. All prompts differ from their first word
on, so that no prefix cache helps; another seed makes others. Of a Treadle server the sequences that are held at the
end are printed, too. The number of words a prompt needs is measured first, from the usage that the server reports.
Exit code 1 if any request fails, or anything is held. `treadle bench run -w stall` measures decoders beside a long
prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.arguments import add_long_prompts  # noqa: E402
from benchmarks.client import Reply, Target  # noqa: E402

from treadle.bench.lorem import text  # noqa: E402

PROBE_WORDS = 200
SHORT_WORDS = 30
SHORT_TOKENS = 4


@dataclass
class Row:
    """Figures of one length and round, in seconds but for tokens."""

    tokens: int
    ttft_s: float
    tokens_per_s: float
    stream_s: float
    whole_s: float
    left_after_s: float
    follow_up_s: float
    idle_s: float


class Server:
    """A server and its model."""

    def __init__(self, url: str, model: str, seed: int) -> None:
        parts = urlsplit(url)
        self.target = Target(parts.hostname or "127.0.0.1", parts.port or 80)
        self.model = model
        self.words_per_token = 1.0
        self._dice = random.Random(seed)

    def prompt(self, words: int) -> str:
        return f"{self._dice.random()} {text(self._dice, words)}"

    async def ask(self, words: int, answer: int, *, stream: bool = True, leave_after: float | None = None) -> Reply:
        """Send one request. Exits where it fails."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": self.prompt(words),
            "max_tokens": answer,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        reply = await self.target.post("/v1/completions", body, leave_after=leave_after)
        if reply.error != "left" and (reply.status != 200 or (stream and not reply.finished)):
            sys.exit(f"a request of {words} words failed: {reply.status} {reply.error} {reply.body[:300]!r}")
        return reply

    async def calibrate(self) -> None:
        """Measure how many words make a token, by the difference of two prompts."""
        used = [await self._prompt_tokens(words) for words in (PROBE_WORDS, 2 * PROBE_WORDS)]
        self.words_per_token = PROBE_WORDS / max(1, used[1] - used[0])

    async def _prompt_tokens(self, words: int) -> int:
        reply = await self.ask(words, 1, stream=False)
        return int(reply.json()["usage"]["prompt_tokens"])

    async def held(self) -> int | None:
        """Sequences that a Treadle server still holds; None of another server."""
        reply = await self.target.get("/v1/status")
        if reply.status != 200:
            return None
        return int(reply.json()["admission"]["rows"])


def first_s(reply: Reply) -> float:
    """Seconds to the first piece of text, or to the end: tokens of a random model may be no text."""
    return reply.token_s[0] if reply.token_s else reply.total_s


async def measure(server: Server, tokens: int, answer: int) -> Row:
    words = max(1, round(tokens * server.words_per_token))
    idle = [first_s(await server.ask(SHORT_WORDS, SHORT_TOKENS)) for _ in range(3)]
    streamed = await server.ask(words, answer)
    whole = await server.ask(words, answer, stream=False)
    used = int(whole.json()["usage"]["prompt_tokens"])
    left = await server.ask(words, answer, leave_after=first_s(streamed) / 2)
    follow_up = await server.ask(SHORT_WORDS, SHORT_TOKENS)
    return Row(
        tokens=used,
        ttft_s=first_s(streamed),
        tokens_per_s=used / first_s(streamed),
        stream_s=streamed.total_s,
        whole_s=whole.total_s,
        left_after_s=left.total_s,
        follow_up_s=first_s(follow_up),
        idle_s=statistics.median(idle),
    )


async def run(options: argparse.Namespace) -> int:
    server = Server(options.url, options.model, options.seed)
    await server.calibrate()
    print("| prompt tokens | TTFT, s | tokens/s | streamed, s | whole, s | left after, s | next TTFT, s | idle, s |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for tokens in options.tokens:
        for _ in range(options.rounds):
            row = await measure(server, tokens, options.answer)
            rows.append(row)
            print(
                f"| {row.tokens:,} | {row.ttft_s:.3f} | {row.tokens_per_s:,.0f} | {row.stream_s:.3f} |"
                f" {row.whole_s:.3f} | {row.left_after_s:.3f} | {row.follow_up_s:.3f} | {row.idle_s:.3f} |",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows]))
    held = await server.held()
    print("no /v1/status" if held is None else f"sequences held at the end: {held}")
    return 1 if held else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    add_long_prompts(parser, rounds=1)
    sys.exit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
