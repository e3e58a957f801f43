"""R5: more sequences than the KV cache holds."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

from ..client import Reply
from .figures import Figure, mb
from .load import prompt_of
from .server import Server, treadle

ROWS = 16
PROMPT, LONG = 300, 800
OPTIONS = ("--max-running", str(ROWS), "--max-wait", "60")


async def oversubscribed(model: Path, log: Path) -> list[Figure]:
    """Run sixteen rows in a cache for half of their tokens, and compare with each of them alone."""
    server = treadle(model, log, (*OPTIONS, "--memory", str(await half(model, log))))
    await server.start()
    try:
        return await together(server)
    finally:
        await server.stop()


async def half(model: Path, log: Path) -> int:
    """Return the bytes of a cache for half the blocks that the rows need in the end, by the server's own figures."""
    server = treadle(model, log, OPTIONS)
    await server.start()
    try:
        found: dict[str, Any] = (await server.status())["capabilities"]
    finally:
        await server.stop()
    blocks = ROWS * math.ceil((PROMPT + LONG + 1) / found["kv_block"]) // 2
    return int(blocks * found["kv_block"] * found["kv_token_bytes"] + ROWS * found["kv_row_bytes"])


async def together(server: Server) -> list[Figure]:
    prompts = [prompt_of(index, PROMPT) for index in range(ROWS)]
    alone = [await server.generate(prompt, LONG) for prompt in prompts]
    before = await engine(server)
    sizes: list[int] = []
    watching = asyncio.create_task(watched(server, sizes))
    replies = await asyncio.gather(*(server.generate(prompt, LONG, within_s=180.0) for prompt in prompts))
    watching.cancel()
    after = await engine(server)
    preempted, earlier = (found["statistics"].get("preempted", 0) for found in (after, before))
    same = sum(matches(reply, other) for reply, other in zip(replies, alone, strict=True))
    status = await server.status()
    budget = status["capabilities"]["kv_budget_bytes"]
    return [
        Figure("answers with the tokens that they have alone", f"{same} of {ROWS}", same == ROWS),
        Figure("rows that gave up their memory meanwhile", str(preempted - earlier), preempted > earlier),
        Figure("restarts of the engine", str(after["restarts"]), after["restarts"] == 0),
        Figure("`--memory`; the engine's process at most", f"{mb(budget)}; {mb(max(sizes))}"),
    ]


def matches(reply: Reply, other: Reply) -> bool:
    return reply.finished and other.finished and reply.text == other.text


async def engine(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = (await server.status())["engine"]
    return found


async def watched(server: Server, sizes: list[int]) -> None:
    """Record the memory of the engine's process until cancelled."""
    while True:
        sizes.append(server.engine().memory_info().rss)
        await asyncio.sleep(0.2)
