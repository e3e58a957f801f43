"""R2: ten times the clients that fit."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

from ..client import Reply
from .figures import Figure, counted, mb, ms, quantile
from .load import Answers, probed, prompt_of
from .server import Server

SLOTS = 4
TOKENS = 64
PROBE_S = 0.15
REFUSED = (429, 503)


@dataclass
class Crowd:
    """Clients that send one request after the other and obey `Retry-After`, as OpenAI's SDKs do: each attempt counted
    in `x-stainless-retry-count`. `promised` has the first promise in seconds, and the true wait."""

    server: Server
    until: float
    statuses: Counter[str] = field(default_factory=Counter)
    promised: list[tuple[float, float]] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    async def client(self, index: int) -> None:
        while time.perf_counter() < self.until:
            await self._request(index)

    async def _request(self, index: int) -> None:
        promise: tuple[float, float] | None = None
        for attempt in range(1000):
            sent = time.perf_counter()
            repeats = {"x-stainless-retry-count": str(attempt)}
            reply = await self.server.generate(prompt_of(index), TOKENS, within_s=120.0, headers=repeats)
            self.statuses[reply.error or str(reply.status)] += 1
            if reply.status == 200:
                self._answered(attempt, sent, promise)
                return
            wait_s, left_s = wait_s_of(reply, attempt), self.until - time.perf_counter()
            if reply.status in REFUSED and "retry-after" in reply.headers:
                promise = promise or (time.perf_counter(), wait_s)
            await asyncio.sleep(min(wait_s, max(0.0, left_s)))
            if wait_s > left_s:
                return

    def _answered(self, attempt: int, sent: float, promise: tuple[float, float] | None) -> None:
        self.sent.append(attempt + 1)
        if promise is not None:
            self.promised.append((promise[1], sent - promise[0]))


def wait_s_of(reply: Reply, attempt: int) -> float:
    """Return the seconds that an answer asks to wait; without them, those that OpenAI's SDKs wait."""
    exact, whole = (reply.headers.get(name) for name in ("retry-after-ms", "retry-after"))
    return float(exact) / 1e3 if exact else float(whole) if whole else min(8.0, 0.5 * 2**attempt)


async def overload(server: Server, seconds: float = 60.0) -> list[Figure]:
    """Run ten times as many clients as slots, with a prober that does not retry; and one client a slot before and
    after."""
    calm = await goodput(server, min(10.0, seconds))
    before = server.resources().rss
    began = time.perf_counter()
    crowd = Crowd(server, began + seconds)
    body = json.dumps({"model": server.model, "prompt": prompt_of(10**6), "max_tokens": 1})
    probing = asyncio.create_task(probed(server, "/v1/completions", seconds, PROBE_S, body))
    await asyncio.gather(*(crowd.client(index) for index in range(10 * SLOTS)))
    served = crowd.statuses["200"] / (time.perf_counter() - began)
    calm = max(calm, await goodput(server, min(10.0, seconds)))
    after = server.resources().rss
    return [
        Figure("answers", counted(crowd.statuses), not {*crowd.statuses} - {"200", *map(str, REFUSED)}),
        refusals(await probing),
        *promises(crowd),
        Figure(
            "served a second, of what is served calmly", f"{served:.1f}, {served / calm:.0%}", served >= 0.95 * calm
        ),
        Figure("memory of all processes, before and after", f"{mb(before)}, {mb(after)}", after <= 1.05 * before),
    ]


def refusals(answers: Answers) -> Figure:
    took = [seconds for status, seconds in answers if status in REFUSED]
    value = f"{ms(quantile(took, 0.5))}, {ms(quantile(took, 0.99))} of {len(took)}" if took else "none refused"
    return Figure("refusal p50, p99, of a prober of its own", value, quantile(took, 0.99) <= 0.05 if took else None)


def promises(crowd: Crowd) -> list[Figure]:
    """Judge whether the first `Retry-After` of a request came true within 50 %."""
    if not crowd.promised:
        return [Figure("`Retry-After` that came true within 50 %", "none told")]
    close = sum(abs(promise - true) <= 0.5 * max(true, 0.1) for promise, true in crowd.promised)
    part = close / len(crowd.promised)
    sent = f"{statistics.median(crowd.sent):g}, {max(crowd.sent)}"
    return [
        Figure(
            "`Retry-After` that came true within 50 %", f"{close} of {len(crowd.promised)} ({part:.0%})", part >= 0.9
        ),
        Figure("requests sent for one answer, median, max", sent, statistics.median(crowd.sent) <= 2),
    ]


async def goodput(server: Server, seconds: float) -> float:
    """Return answers a second with as many clients as slots."""
    done, until = 0, time.perf_counter() + seconds

    async def client(index: int) -> None:
        nonlocal done
        while time.perf_counter() < until:
            reply = await server.generate(prompt_of(index), TOKENS)
            done += reply.status == 200

    began = time.perf_counter()
    await asyncio.gather(*(client(index) for index in range(SLOTS)))
    return done / (time.perf_counter() - began)
