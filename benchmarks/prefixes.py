"""Prefix cache under its intended loads (P9), in this process.

    python benchmarks/prefixes.py [agents] [shared] [miss] [--model demo] [--agents 20] [--turns 8] ...

agents   agents that share a system prompt talk in turns, all at once: the reused part of the tokens that an earlier
         request had computed, and the time to first token by turn, beside an engine without the cache
shared   two requests with one long system prompt: the second's time to first token over the first's
miss     prompts that share nothing, with the cache and without, in turn: the cost of looking up and storing

Reusable is the longest common prefix of a prompt with the sequences that had ended before it was sent: all tokens of an
earlier prompt and its answer, without the last, which was never computed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle import Engine
from treadle.library.arguments import read_arguments


@dataclass
class EndedSequences:
    """Prompts and answers computed so far, which later ones could reuse."""

    ended: list[tuple[int, ...]] = field(default_factory=list)

    def reusable(self, prompt: Sequence[int]) -> int:
        return min(len(prompt) - 1, max((_common(prompt, other) for other in self.ended), default=0))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if tuple(a[low:middle]) == tuple(b[low:middle]) else (low, middle - 1)
    return low


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    cached: int
    ttft_s: float


async def ask(engine: Engine, prompt: Sequence[int], tokens: int) -> Answer:
    began = time.perf_counter()
    first, found = 0.0, []
    arguments = read_arguments({"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True})
    async with engine._begin(list(prompt), arguments) as choice:  # the choice has the number of cached tokens
        async for piece in choice.pieces():
            first = first or time.perf_counter() - began
            found.extend(piece.token_ids)
        return Answer(tuple(found), choice.cached_tokens, first)


def words(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(10, 250) for _ in range(count))


async def agents(engine: Engine, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run agents, each of whose turns begins when its last one is answered."""
    rng = random.Random(seed)
    system, ended_sequences = words(rng, options.system), EndedSequences()
    totals = {"prompt": 0, "reusable": 0, "reused": 0}
    ttft: dict[int, list[float]] = {}

    async def agent(own: random.Random) -> None:
        history = system
        for turn in range(options.turns):
            prompt = (*history, *words(own, options.user))
            reusable = ended_sequences.reusable(prompt)
            answer = await ask(engine, prompt, options.answer)
            history = (*prompt, *answer.tokens)
            ended_sequences.ended.append(history[:-1])
            totals["prompt"] += len(prompt)
            totals["reusable"] += reusable
            totals["reused"] += min(answer.cached, reusable)
            ttft.setdefault(turn, []).append(answer.ttft_s)

    began = time.perf_counter()
    await asyncio.gather(*(agent(random.Random(f"{seed} {i}")) for i in range(options.agents)))
    return {**totals, "seconds": time.perf_counter() - began, "ttft": ttft}


def engine(options: argparse.Namespace, **more: Any) -> Engine:
    rows = max(options.agents, 1)
    return Engine(options.model, max_running=rows, max_waiting=rows, max_wait_s=600.0, **more)


async def show_agents(options: argparse.Namespace) -> None:
    print(
        f"{options.agents} agents x {options.turns} turns, a system prompt of {options.system} tokens, {options.user} "
        f"new ones a turn, answers of {options.answer}"
    )
    for name, on in (("with", True), ("without", False)):
        async with engine(options, prefix_cache=on) as one:
            await ask(one, words(random.Random(1), 40), 2)
            result = await agents(one, options, 7)
            share = result["reused"] / result["reusable"] if result["reusable"] else 0.0
            turns = ", ".join(f"{statistics.median(result['ttft'][t]):.2f}" for t in sorted(result["ttft"]))
            print(
                f"{name:8} the cache: {result['seconds']:.1f} s, {result['reused']} of {result['reusable']} reusable "
                f"tokens reused ({share:.1%}), of {result['prompt']} in all; median TTFT by turn {turns} s",
                flush=True,
            )


async def show_shared(options: argparse.Namespace) -> None:
    async with engine(options) as one:
        rng = random.Random(3)
        await ask(one, words(rng, 40), 2)
        ratios = []
        for _ in range(options.rounds):
            system = words(rng, options.long)
            first = await ask(one, (*system, *words(rng, 20)), 4)
            second = await ask(one, (*system, *words(rng, 20)), 4)
            ratios.append(second.ttft_s / first.ttft_s)
            print(
                f"a system prompt of {options.long} tokens: TTFT {first.ttft_s:.3f} s, then {second.ttft_s:.3f} s "
                f"({second.cached} tokens cached): {ratios[-1]:.3f} of it",
                flush=True,
            )


async def show_miss(options: argparse.Namespace) -> None:
    rng = random.Random(5)
    times: dict[bool, list[float]] = {True: [], False: []}
    async with engine(options, prefix_cache=True) as on, engine(options, prefix_cache=False) as off:
        for one in (on, off):
            await ask(one, words(rng, 40), 2)
        for round_ in range(2 * options.rounds):
            for cached_run in (True, False) if round_ % 2 else (False, True):
                began = time.perf_counter()
                for _ in range(options.misses):
                    await ask(on if cached_run else off, words(rng, options.length), options.answer)
                times[cached_run].append(time.perf_counter() - began)
    ratio = statistics.median(a / b for a, b in zip(times[True], times[False], strict=True))
    print(
        f"{options.misses} prompts of {options.length} tokens that share nothing, answers of {options.answer}: with the"
        f" cache {ratio:.3f} of the time without (median of {len(times[True])} pairs, "
        f"{min(times[False]):.2f} to {max(times[False]):.2f} s)",
        flush=True,
    )


SCENARIOS = {"agents": show_agents, "shared": show_shared, "miss": show_miss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--model", default="demo")
    for name, value in (
        ("agents", 20),
        ("turns", 8),
        ("system", 300),
        ("user", 40),
        ("answer", 16),
        ("long", 1000),
        ("rounds", 3),
        ("misses", 4),
        ("length", 300),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    for name in options.scenarios:
        asyncio.run(SCENARIOS[name](options))


if __name__ == "__main__":
    main()
