"""Requests with known answers: a seeded pool that every client of a run draws from."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOKENS = {"short": (1, 12), "middle": (16, 48), "long": (120, 300)}
LETTERS = string.ascii_letters + " ,."
PREFIXES = 6
PREFIX_TOKENS = 300
SALTS = ("", "", "one", "two")
PRIORITIES = (0, 0, 0, -3, 5)


@dataclass(frozen=True)
class Choice:
    """One choice of an answer."""

    tokens: Sequence[int]
    finish: str
    logprobs: Sequence[float] = ()


Answer = Mapping[int, Choice]


@dataclass(frozen=True)
class Recipe:
    """One request, independent of its transport. A token of the tiny model is a byte, so `text` and its ids are one."""

    index: int
    size: str
    text: str
    max_tokens: int
    temperature: float
    seed: int
    n: int = 1
    logprobs: bool = False
    stop: str = ""
    chat: bool = False

    @property
    def ids(self) -> list[int]:
        return list(self.text.encode())

    def http(self, *, stream: bool, salt: str = "", priority: int = 0) -> tuple[str, dict[str, Any]]:
        """Return path and body over HTTP."""
        body: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "n": self.n,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        if self.stop:
            body["stop"] = [self.stop]
        if salt:
            body["cache_salt"] = salt
        if priority:
            body["priority"] = priority
        if self.chat:
            scores = {"logprobs": True, "top_logprobs": 1} if self.logprobs else {}
            message = {"role": "user", "content": self.text}
            return "/v1/chat/completions", {**body, **scores, "messages": [message]}
        scores = {"logprobs": 1} if self.logprobs else {}
        prompt: Any = self.ids if self.index % 2 else self.text
        return "/v1/completions", {**body, **scores, "prompt": prompt}

    def fits(self, wire: str) -> bool:
        """Whether it can be sent over a gRPC wire."""
        return not self.chat and (wire == "vllm" or (self.n == 1 and not self.stop))


def recipes(seed: int, count: int) -> list[Recipe]:
    """Build a pool of `count`: short, middle and long answers, short and long prompts, a few that share their
    beginnings."""
    rng = random.Random(f"recipes/{seed}")
    prefixes = [_letters(rng, PREFIX_TOKENS) for _ in range(PREFIXES)]
    return [_recipe(rng, i, prefixes) for i in range(count)]


def _recipe(rng: random.Random, index: int, prefixes: Sequence[str]) -> Recipe:
    size = rng.choices(("short", "middle", "long"), (6, 3, 1))[0]
    low, high = TOKENS[size]
    several = size != "long" and rng.random() < 0.1
    return Recipe(
        index=index,
        size=size,
        text=_prompt(rng, prefixes),
        max_tokens=rng.randint(low, high),
        temperature=rng.choice((0.0, 0.8, 1.0)),
        seed=rng.randrange(2**31),
        n=rng.randint(2, 3) if several else 1,
        logprobs=rng.random() < 0.15,
        stop=rng.choice(LETTERS) if size == "middle" and rng.random() < 0.3 else "",
        chat=rng.random() < 0.3,
    )


def _prompt(rng: random.Random, prefixes: Sequence[str]) -> str:
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(prefixes) + _letters(rng, rng.randint(1, 40))
    if kind < 0.35:
        return _letters(rng, rng.randint(800, 2000))
    return _letters(rng, rng.randint(1, 120))


def _letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choices(LETTERS, k=count))
