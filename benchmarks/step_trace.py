"""Sum up a trace of steps: what chunks of each size and decode steps took, and what was expected.

python benchmarks/step_trace.py TRACE [--longest 12]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Steps = Sequence[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE")
    parser.add_argument("--longest", type=int, default=12, help="steps that are listed with their neighbours")
    options = parser.parse_args()
    steps = [json.loads(line) for line in options.trace.read_text().splitlines()]
    print("\n".join([*table(steps), "", *longest(steps, options.longest)]))


def table(steps: Steps) -> list[str]:
    """Lines of a table by decoding sequences and prompt tokens, both in powers of two."""
    kinds: dict[tuple[int, int, bool], list[dict[str, Any]]] = {}
    for step, following in zip(steps, [*steps[1:], {"prompt_tokens": 0}], strict=False):
        prepares = not step["prompt_tokens"] and following["prompt_tokens"] > 0
        key = (_power(step["decoding"]), _power(step["prompt_tokens"]), prepares)
        kinds.setdefault(key, []).append(step)
    lines = ["decoding  prompt tokens   steps   median ms   p99 ms  expected ms  host ms  wait ms"]
    for (decoding, tokens, prepares), some in sorted(kinds.items()):
        known = [step["expected_s"] for step in some if step["expected_s"] is not None]
        expected = f"{_ms(statistics.median(known)):12}" if known else f"{'-':>12}"
        lines.append(
            f"{decoding:8} {'before a chunk' if prepares else tokens:>14} {len(some):7}"
            f" {_ms(_median(some, 's')):11} {_ms(_p99(some)):8} {expected}"
            f" {_ms(_median(some, 'host_s')):8} {_ms(_median(some, 'wait_s')):8}"
        )
    return lines


def longest(steps: Steps, count: int) -> list[str]:
    """The `count` longest steps with decoding sequences, each with the steps before and after it."""
    beside = [i for i, step in enumerate(steps) if step["decoding"]]
    lines = ["longest steps with decoding sequences (decoding + chunks: ms, expected, host)"]
    chosen = sorted(sorted(beside, key=lambda i: -float(steps[i]["s"]))[:count])
    return lines + [f"{i:6}  " + "  |  ".join(map(_text, steps[max(0, i - 1) : i + 2])) for i in chosen]


def _text(step: dict[str, Any]) -> str:
    chunks = "+".join(map(str, step["chunks"])) or "0"
    expected = "" if step["expected_s"] is None else f", {_ms(step['expected_s']).strip()}"
    return f"{step['decoding']} + {chunks}: {_ms(step['s']).strip()}{expected}, {_ms(step['host_s']).strip()}"


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0


def _median(steps: Steps, field: str) -> float:
    return statistics.median(step[field] for step in steps)


def _p99(steps: Steps) -> float:
    ordered = sorted(float(step["s"]) for step in steps)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


if __name__ == "__main__":
    main()
