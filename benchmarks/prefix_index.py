"""Cost of the prefix index on this CPU: looking up, holding, storing and evicting one long prompt.

    python benchmarks/prefix_index.py [--tokens 32768] [--block 16 64] [--others 1000] [--rounds 9]

The index also holds `--others` prompts of 512 tokens that begin with the same 8, and that number more after each round.
Times are medians in microseconds. `miss` differs from all of them within the first block, `half` in the middle of the
long prompt, `hit` finds all of it. `hold` holds every block of it, `hold last` the last one, which keeps the rest too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from treadle.cache.prefix_index import PrefixIndex
from treadle.cache.prefix_node import Node

P = ParamSpec("P")
T = TypeVar("T")
Tokens = tuple[int, ...]
BEGINNING, SHORT, VOCABULARY = tuple(range(8)), 512, 150_000


@dataclass
class Times:
    """Microseconds by name."""

    taken: dict[str, list[float]] = field(default_factory=dict)

    def of(self, name: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        begin = time.perf_counter()
        result = work(*args, **kwargs)
        self.taken.setdefault(name, []).append((time.perf_counter() - begin) * 1e6)
        return result


def prompt(rng: random.Random, tokens: int) -> Tokens:
    return BEGINNING + tuple(rng.randrange(8, VOCABULARY) for _ in range(tokens - len(BEGINNING)))


def again(tokens: Tokens) -> Tokens:
    """Return the same numbers in new objects, as the next request brings them."""
    return tuple(int(str(token)) for token in tokens)


def store(index: PrefixIndex, tokens: Tokens) -> Node | None:
    node: Node | None = None
    for start in range(0, len(tokens), index.block):
        node = index.insert(node, "", tokens[start : start + index.block], handle=start, size=1).node
    return node


def measure(block: int, length: int, others: int, rounds: int) -> Times:
    rng, times = random.Random(0), Times()
    index = PrefixIndex(block)
    for _ in range(others):
        store(index, prompt(rng, SHORT))
    for _ in range(rounds):
        long = prompt(rng, length)
        times.of("miss", index.match, "", long)
        times.of("insert", store, index, long)
        times.of("half", index.match, "", again(long[: length // 2]) + long[: length // 2])
        match = times.of("hit", index.match, "", again(long))
        assert match.tokens == length
        for name, nodes in (("", match.path), (" last", match.path[-1:])):
            times.of(f"hold{name}", index.acquire, nodes)
            times.of(f"let go{name}", index.release, nodes)
        freed = times.of("evict", index.evict, len(match.path))
        assert len(freed) == len(match.path)
        for _ in range(others):
            store(index, prompt(rng, SHORT))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--block", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--others", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    for block in args.block:
        times = measure(block, args.tokens, args.others, args.rounds)
        line = "  ".join(f"{name} {statistics.median(taken):.0f}" for name, taken in times.taken.items())
        print(f"block {block:3}: {line}")


if __name__ == "__main__":
    main()
