"""`treadle serve` that writes a trace of its steps.

    python benchmarks/traced_serve.py TRACE MODEL [OPTION ...]

The server is the real one. Its engine's process records each step after the warm-up and writes TRACE when it stops, one
JSON object a line: `at_s` its end on the engine's clock; `decoding` sequences, `prompt_tokens`, `chunks`; `host_s`, in
which the host built it, `wait_s`, in which the host waited for it; `s`, from its start or the end of the step before it
to its end; `expected_s`, the prefill budget's expectation when it was started, where it has one. `step_trace.py` sums
it up.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from treadle.compose import engine, owner  # noqa: E402
from treadle.core.prefill_budget import PrefillBudget  # noqa: E402
from treadle.core.step_times import Charge  # noqa: E402

PATH = "TREADLE_STEP_TRACE"
ENTRY = "traced_serve:entry"


def entry(arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    """The engine's entry: the runner is traced once it is warm."""
    factory, limits = owner.owner_of(arguments)

    def build(progress: Callable[[str], None]) -> Any:
        runner = factory(progress)
        warm_up = runner.warm_up

        def and_trace() -> None:
            warm_up()
            Trace(runner, Path(os.environ[PATH]))

        runner.warm_up = and_trace  # type: ignore[method-assign]
        return runner

    return build, limits


class Trace:
    """Records the steps of `runner` in memory, and writes them to `path` when the process ends."""

    def __init__(self, runner: Any, path: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self._path = path
        self._clock = clock
        self._start, self._finish, self._close = runner.start, runner.finish, runner.close
        self._started: deque[tuple[dict[str, Any], float]] = deque()
        self._finished_at = 0.0
        self.steps: list[dict[str, Any]] = []
        self._expected: deque[float | None] = deque(maxlen=8)
        runner.start, runner.finish, runner.close = self.start, self.finish, self.close
        _watch(self._expected)

    def start(self, plan: Any) -> None:
        began = self._clock()
        self._start(plan)
        chunks = {chunk.id: chunk.count for chunk in plan.prefill}
        step = {
            "decoding": sum(decode.id not in chunks for decode in plan.decode),
            "prompt_tokens": sum(chunks.values()),
            "chunks": list(chunks.values()),
            "expected_s": self._expected.pop() if self._expected else None,
            "host_s": self._clock() - began,
        }
        self._started.append((step, began))

    def finish(self) -> Any:
        waited = self._clock()
        result = self._finish()
        ended = self._clock()
        step, began = self._started.popleft()
        step |= {"at_s": ended, "wait_s": ended - waited, "s": ended - max(began, self._finished_at)}
        self._finished_at = ended
        self.steps.append(step)
        return result

    def close(self) -> None:
        self._path.write_text("".join(json.dumps(step) + "\n" for step in self.steps))
        self._close()


def _watch(expected: deque[float | None]) -> None:
    """Keep the expected seconds of each step that the prefill budget charges, where it knows them."""
    charge = PrefillBudget.charge

    def charged(budget: PrefillBudget, tokens: int, *, decoding: int, **parts: Any) -> Charge:
        expected.append(_expected_s(budget, tokens, decoding > 0))
        return charge(budget, tokens, decoding=decoding, **parts)

    PrefillBudget.charge = charged  # type: ignore[assignment, method-assign]


def _expected_s(budget: PrefillBudget, tokens: int, beside: bool) -> float | None:
    """Return the seconds of a decode step, if `beside`, and of a chunk of so many tokens; None before both are
    measured."""
    times = budget._times
    cost = times.chunk_cost(beside=beside)
    if (beside and not times.decode_s) or (tokens and not cost.known):
        return None
    return (times.decode_s if beside else 0.0) + (cost.seconds(tokens) if tokens else 0.0)


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    os.environ[PATH] = str(Path(sys.argv[1]).resolve())
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    engine.OWNER_ENTRY = ENTRY
    sys.argv[1:2] = ["serve"]
    from treadle.cli import main as cli

    cli()


if __name__ == "__main__":
    main()
