"""S3: leakage of one key's prompts to another's holder through the times of answers."""

from __future__ import annotations

import math
import secrets
from pathlib import Path

from .figures import Figure, auc
from .routes import bearer, keys_file
from .server import Server, treadle

CHARACTERS = 560  # of two blocks of the cache, and some
ROUNDS, ROUNDS_WITHIN = 400, 50
BOUND = 0.55


async def tenants(model: Path, log: Path) -> list[Figure]:
    """Measure between two keys; and within one, which shows that the attack works where prompts are shared."""
    file, keys = keys_file(log.parent, one="use", two="use")
    server = treadle(model, log, ("--api-keys", str(file)), key=keys["one"])
    await server.start()
    try:
        between = await guessed(server, keys["one"], keys["two"], ROUNDS)
        within = await guessed(server, keys["two"], keys["two"], ROUNDS_WITHIN)
    finally:
        await server.stop()
    chance = 2 * math.sqrt((2 * ROUNDS + 1) / 12) / ROUNDS
    value = f"{between:.3f} ({ROUNDS} prompts each; chance alone: 0.5 +- {chance:.2f})"
    return [
        Figure("AUC between two keys", value, max(between, 1 - between) <= BOUND),
        Figure("AUC within one key, which shares its prompts", f"{within:.3f} ({ROUNDS_WITHIN} prompts each)"),
    ]


async def guessed(server: Server, victim: str, attacker: str, rounds: int) -> float:
    """Return the AUC with which the first token's time reveals that the victim has sent the same prompt before."""

    async def ttft(prompt: str, key: str) -> float:
        return (await server.generate(prompt, 1, headers=bearer(key))).ttft_s

    known: list[float] = []
    fresh: list[float] = []
    for index in range(rounds):
        victims, unsent = (secrets.token_hex(CHARACTERS // 2) for _ in range(2))
        await ttft(victims, victim)
        pair = [(known, victims), (fresh, unsent)]
        for times, prompt in pair if index % 2 else reversed(pair):
            times.append(await ttft(prompt, attacker))
    return auc(fresh, known)
