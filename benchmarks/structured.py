"""Structured output in the engine (P16): valid answers, the cost of a step, and the longest step beside a dear grammar.

    python benchmarks/structured.py --model FOLDER                               # on a CPU, such as the demo
    python benchmarks/structured.py --shape 8B --tokenizer tokenizer.json        # on a GPU: random weights

`--shape` makes a Qwen3 of that size as gpu/steps.py does; `vocabularies.py` writes a tokenizer.json for it. One process
holds the model and the engine's loop with its scheduler, without fronts. Four parts, `--only` selects some:

- `valid`: rows with schemas beside free ones. Answers are checked against their schemas, and the free rows' tokens with
  those of a run without constraints.
- `cost`: batches with and without constrained rows, one token a step, in interleaved rounds. Medians of the steps in
  which all rows decode, their ratio, and the tokens a second of the free rows.
- `forced`: rows whose schema has long property names, with forced tokens taken several a step and one by one, in
  interleaved rounds: tokens a second and a step of these rows, and what the free rows beside them gain or lose.
- `compile`: free rows decode while grammars that take long are compiled: the longest step and the median step.

Exit code 1 where an answer is not valid or was not ended.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from treadle.bench.schemas import matches, random_schema
from treadle.config import Settings
from treadle.core.grammar_state import GrammarState
from treadle.core.messages import Cancel, Constraint, Failed, Finish, FinishReason, FromOwner, StepReport, Submit
from treadle.engine.loop import EngineLoop
from treadle.engine.mailbox import Mailbox
from treadle.engine.owner import OwnerLimits, scheduler_for
from treadle.grammar.compiler import GrammarCompiler
from treadle.grammar.vocabulary import read_vocabulary
from treadle.runner.device import blas

CASES = ((1, 1), (8, 4), (8, 8), (16, 8), (32, 16))
FORCED_CASES = ((1, 1), (2, 1), (8, 1), (8, 4), (8, 8))
PROMPT = 40
DEAR = 16
SKIPPED = 4


def endless(**string: int) -> dict[str, Any]:
    """Make a schema that no row completes while it is measured. Its strings have the keywords `string`."""
    fields = {
        "name": {"type": "string", **string},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["warp", "weft", "treadle", "heddle"]},
        "tags": {"type": "array", "items": {"type": "string", **string}, "maxItems": 3},
        "done": {"type": "boolean"},
    }
    item = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "array", "minItems": 2000, "items": item}


SCHEMAS = {"free strings": endless(), "strings of at most 24": endless(maxLength=24)}
"""A bounded string costs most: a mask inside of it looks at all tokens that may be too long."""


FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "minimum": 0, "maximum": 9999},
        "preferred_shipping_method": {"enum": ["standard ground", "express air", "in-store pickup"]},
        "is_a_returning_customer": {"type": "boolean"},
        "shipping_address_city": {"type": "string", "maxLength": 12},
        "estimated_delivery_window": {"enum": ["morning", "afternoon", "evening"]},
    },
    "additionalProperties": False,
}
FORMS = {"type": "array", "minItems": 500, "items": {**FORM, "required": list(FORM["properties"])}}
"""A schema most of whose tokens are forced, and that no row completes while it is measured."""


def constraint_of(schema: dict[str, Any], *, close_at_limit: bool = False) -> Constraint:
    grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
    return Constraint("json_schema", grammar, close_at_limit=close_at_limit)


def dear_schema(rng: random.Random, properties: int = 400, values: int = 100) -> dict[str, Any]:
    """Make a schema that takes long to compile and is no other one's: no cache has it."""
    names = [f"p{rng.getrandbits(48):x}" for _ in range(properties)]
    fields = {name: {"enum": [f"{rng.getrandbits(64):x}" for _ in range(values)]} for name in names}
    return {"type": "object", "properties": fields, "required": names, "additionalProperties": False}


# The engine ---------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One sequence as the engine reports it. `finish` is None while it runs; `times` are those of its tokens."""

    submit: Submit
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish: Finish | None = None


@dataclass(frozen=True)
class Step:
    """One pass of the loop: its end, its length in seconds, and the rows that gained tokens."""

    at: float
    seconds: float
    gained: frozenset[str]


class Engine:
    """One runner, and loops over it."""

    def __init__(
        self, runner: Any, vocabulary: int, stop_ids: tuple[int, ...], before_step: Callable[[], None]
    ) -> None:
        self.runner = runner
        self.vocabulary = vocabulary
        self.stop_ids = stop_ids
        self.before_step = before_step

    def run(
        self,
        submits: Sequence[Submit],
        steps: int | None = None,
        at_step: Callable[[int], None] = lambda _: None,
        forced: list[int] | None = None,
    ) -> tuple[dict[str, Row], list[Step]]:
        """Run until all rows have ended, or for `steps` steps. `at_step` is called before each with its number. The
        number of forced tokens is written to `forced`."""
        reports: list[FromOwner] = []
        self.runner.forget_prefixes()
        limits = OwnerLimits(max_running=len(submits), prefill_tokens=Settings.prefill_tokens)
        can, runner = self.runner.capabilities(), self.runner
        scheduler = scheduler_for(can, limits, runner.match_prefix, runner.grammar_state)
        loop = EngineLoop(self.runner, scheduler, Mailbox(), reports.append)
        rows = {submit.id: Row(submit) for submit in submits}
        for submit in submits:
            loop.mailbox.put(submit)
        passed: list[Step] = []
        while any(row.finish is None for row in rows.values()) and len(passed) != steps:
            at_step(len(passed))
            passed.append(self._step(loop, rows, reports))
        if forced is not None:
            forced[:] = [scheduler.statistics(0.0, runner.statistics()).forced_tokens]
        self._end(loop, rows)
        return rows, passed

    def _step(self, loop: EngineLoop, rows: dict[str, Row], reports: list[FromOwner]) -> Step:
        began = time.perf_counter()
        loop.run_once(wait_s=0.05)
        now = time.perf_counter()
        gained = set()
        for report in reports:
            if isinstance(report, Failed):
                sys.exit(f"the engine failed: {report.message}")
            for output in report.outputs if isinstance(report, StepReport) else ():
                row = rows[output.id]
                row.tokens += output.tokens
                row.times += [now] * len(output.tokens)
                row.finish = output.finish or row.finish
                if output.finish is not None and output.finish.reason is FinishReason.ERROR:
                    sys.exit(f"row {output.id} failed: {output.finish.message}")
                gained |= {output.id} if output.tokens else set()
        reports.clear()
        return Step(now, now - began, frozenset(gained))

    def _end(self, loop: EngineLoop, rows: dict[str, Row]) -> None:
        for id_, row in rows.items():
            if row.finish is None:
                loop.mailbox.put(Cancel(id_))
        loop.run_once()
        while loop.has_work:
            loop.run_once()

    def compile(self, constraints: Sequence[Constraint]) -> None:
        """Wait until the grammars are compiled."""
        for constraint in constraints:
            while (status := self.runner.grammar_state(constraint)).state is GrammarState.PENDING:
                time.sleep(0.002)
            if status.state is GrammarState.FAILED:
                sys.exit(f"a grammar was refused: {status.message}")

    def prompt(self, rng: random.Random) -> tuple[int, ...]:
        return tuple(rng.randrange(5, self.vocabulary - 1000) for _ in range(PROMPT))


def engine_of_folder(folder: Path) -> Engine:
    report = blas.prepare()
    from treadle.runner.device.blas_threads import ThreadGovernor
    from treadle.runner.loading.loader import load
    from treadle.runner.model_runner import ModelRunner

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ends = config.get("eos_token_id") or ()
    stop_ids = tuple(ends if isinstance(ends, list) else (ends,))
    threads = report.set_threads and ThreadGovernor(report.set_threads, report.threads)
    before_step = threads.before_step if threads else _nothing
    model = load(folder, max_running=40)
    grammars = compiler(folder / "tokenizer.json", model.vocabulary, stop_ids)
    runner = ModelRunner(model, before_step=before_step, grammars=grammars)
    runner.warm_up()
    print(f"# {model.name}, {model.device}, {report}", flush=True)
    return Engine(runner, model.vocabulary, stop_ids, before_step)


def _nothing() -> None:
    """Do nothing before a step: a GPU computes it."""


def engine_of_shape(shape: str, bits: int, tokenizer: Path, stop: str) -> Engine:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from benchmarks.gpu import steps
    from tokenizers import Tokenizer

    from treadle.runner.model_runner import ModelRunner

    stop_id = Tokenizer.from_file(str(tokenizer)).token_to_id(stop)
    if stop_id is None:
        sys.exit(f"{tokenizer} has no token {stop}: name its end token with --stop")
    model = steps.loaded(steps.make(shape, bits), "fused", 1 << 16)
    grammars = compiler(tokenizer, model.vocabulary, (stop_id,))
    return Engine(ModelRunner(model, grammars=grammars), model.vocabulary, (stop_id,), _nothing)


def compiler(tokenizer: Path, vocabulary: int, stop_ids: tuple[int, ...]) -> GrammarCompiler:
    return GrammarCompiler(read_vocabulary(tokenizer, size=vocabulary, eos_token_ids=stop_ids))


# valid --------------------------------------------------------------------------------------------------------------


def check_valid(engine: Engine, decode: Callable[[list[int]], str], times: int) -> bool:
    """Run 4 free rows beside 4 with schemas, `times` times, and print the share of valid and ended answers."""
    rng = random.Random(16)
    valid = ended = answers = same = compared = 0
    for round_ in range(times):
        free = [Submit(id=f"free {i}", prompt=engine.prompt(rng), max_tokens=64, max_wait_s=1e9) for i in range(4)]
        schemas = [random_schema(rng, 3 + round_ % 6) for _ in range(4)]
        constrained = [_constrained(engine, rng, i, schema) for i, schema in enumerate(schemas)]
        engine.compile([submit.constraint for submit in constrained if submit.constraint is not None])
        rows, _ = engine.run([*free, *constrained])
        alone, _ = engine.run([*free, *(_companion(engine, rng, i) for i in range(4))])
        for i, schema in enumerate(schemas):
            row = rows[f"constrained {i}"]
            answers += 1
            ended += row.finish is not None and row.finish.reason is FinishReason.STOP
            valid += _is_valid(decode([t for t in row.tokens if t not in engine.stop_ids]), schema)
        for submit in free:
            compared += 1
            same += rows[submit.id].tokens == alone[submit.id].tokens
    print(f"valid {valid} of {answers}, ended {ended}; free rows with the same tokens as alone: {same} of {compared}")
    return valid == ended == answers


def _constrained(engine: Engine, rng: random.Random, i: int, schema: dict[str, Any]) -> Submit:
    return Submit(
        id=f"constrained {i}",
        prompt=engine.prompt(rng),
        max_tokens=512,
        stop_token_ids=engine.stop_ids,
        constraint=constraint_of(schema, close_at_limit=True),
        max_wait_s=1e9,
    )


def _companion(engine: Engine, rng: random.Random, i: int) -> Submit:
    return Submit(id=f"companion {i}", prompt=engine.prompt(rng), max_tokens=64, max_wait_s=1e9)


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        return matches(json.loads(text), schema)
    except ValueError:
        return False


# cost ---------------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Medians of one run: milliseconds of a step in which all rows decode, the 99th percentile, and the tokens a second
    of its free rows."""

    step_ms: float
    p99_ms: float
    free_rate: float


def _batch_of(
    engine: Engine, seed: str, case: tuple[int, int], constraint: Constraint, max_tokens: int
) -> list[Submit]:
    """Make a batch of `rows` rows, the first `count` of them constrained."""
    rng, (rows, count) = random.Random(seed), case
    return [
        Submit(
            id=str(i),
            prompt=engine.prompt(rng),
            max_tokens=max_tokens,
            max_wait_s=1e9,
            constraint=constraint if i < count else None,
        )
        for i in range(rows)
    ]


def measure_cost(engine: Engine, cases: Sequence[tuple[int, int]], steps: int, rounds: int) -> None:
    print("\n| schema | rows | constrained | step, none | constrained | ratio | p99 ratio | free rows' tok/s, ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for name, schema in SCHEMAS.items():
        constraint = constraint_of(schema)
        engine.compile([constraint])
        for rows, count in cases:
            _measure_case(engine, name, constraint, (rows, count), steps, rounds)


def _measure_case(
    engine: Engine, name: str, constraint: Constraint, case: tuple[int, int], steps: int, rounds: int
) -> None:
    rows, count = case
    found: list[tuple[Batch, Batch]] = []
    for round_ in range(rounds + 1):  # round 0 warms both up
        order = (0, count) if round_ % 2 else (count, 0)
        pair = {number: _batch(engine, rows, number, constraint, steps, round_) for number in order}
        if round_:
            found.append((pair[0], pair[count]))
    print(f"| {name} {_cost_line(rows, count, found)}", flush=True)


def _batch(engine: Engine, rows: int, count: int, constraint: Constraint, steps: int, seed: int) -> Batch:
    submits = _batch_of(engine, f"{rows} {seed}", (rows, count), constraint, max_tokens=4 * steps)
    gc.collect()
    gc.disable()
    engine.runner.fast_forward = False  # else rows rarely decode all in the same step
    _, passed = engine.run(submits, steps + rows + 16)
    engine.runner.fast_forward = True
    gc.enable()
    whole = [step.seconds for step in passed if len(step.gained) == rows][SKIPPED : SKIPPED + steps]
    if len(whole) < steps:
        sys.exit(f"{rows} rows, {count} constrained: only {len(whole)} steps had all rows")
    ordered = sorted(whole)
    free = (rows - count) / statistics.fmean(whole)
    return Batch(statistics.median(whole) * 1e3, ordered[int(0.99 * (len(ordered) - 1))] * 1e3, free)


def _cost_line(rows: int, count: int, found: Sequence[tuple[Batch, Batch]]) -> str:
    ratios = [half.step_ms / none.step_ms for none, half in found]
    tails = [half.p99_ms / none.p99_ms for none, half in found]
    rates = [half.free_rate / none.free_rate * rows / (rows - count) for none, half in found if count < rows]
    none_ms, half_ms = (statistics.median(pair[i].step_ms for pair in found) for i in (0, 1))
    cells = (rows, count, f"{none_ms:.2f} ms", f"{half_ms:.2f} ms", _range(ratios), _range(tails), _range(rates))
    return f"| {' | '.join(map(str, cells))} |"


def _range(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.3f} ({min(values):.3f}..{max(values):.3f})"


# forced -------------------------------------------------------------------------------------------------------------


@dataclass
class Rates:
    """Tokens a second of all constrained rows and of all free ones, tokens a step of a constrained row, and the share
    of its tokens that were forced."""

    constrained: float
    free: float
    a_step: float
    forced: float


def measure_forced(engine: Engine, cases: Sequence[tuple[int, int]], steps: int, rounds: int) -> None:
    print("\n| rows | constrained | forced | a step | tok/s one by one | tok/s | ratio | free rows' tok/s, ratio |")
    print("|---|---|---|---|---|---|---|---|")
    constraint = constraint_of(FORMS)
    engine.compile([constraint])
    for rows, count in cases:
        found: list[tuple[Rates, Rates]] = []
        for round_ in range(rounds + 1):  # round 0 warms both up
            order = (False, True) if round_ % 2 else (True, False)
            pair = {forces: _rates(engine, rows, count, constraint, steps, round_, forces) for forces in order}
            if round_:
                found.append((pair[False], pair[True]))
        print(_forced_line(rows, count, found), flush=True)


def _rates(engine: Engine, rows: int, count: int, constraint: Constraint, steps: int, seed: int, forces: bool) -> Rates:
    submits = _batch_of(engine, f"forced {rows} {seed}", (rows, count), constraint, max_tokens=32 * steps)
    engine.runner.fast_forward = forces
    forced = [0]
    found, passed = engine.run(submits, steps + 4 * rows + 16, forced=forced)
    engine.runner.fast_forward = True
    all_began = max(row.times[0] for row in found.values())
    window = [step for step in passed if step.at > all_began][SKIPPED : SKIPPED + steps]
    if len(window) < steps:
        sys.exit(f"{rows} rows, {count} constrained: only {len(window)} steps had all rows")
    began, ended = window[0].at - window[0].seconds, window[-1].at
    gained = [sum(began < at <= ended for at in found[str(i)].times) for i in range(rows)]
    seconds, own = ended - began, sum(gained[:count])
    whole = sum(len(found[str(i)].tokens) for i in range(count))
    return Rates(own / seconds, sum(gained[count:]) / seconds, own / count / steps, forced[0] / whole)


def _forced_line(rows: int, count: int, found: Sequence[tuple[Rates, Rates]]) -> str:
    one, several = (statistics.median(pair[i].constrained for pair in found) for i in (0, 1))
    forced, a_step = (statistics.median(getattr(on, name) for _, on in found) for name in ("forced", "a_step"))
    ratios = [on.constrained / off.constrained for off, on in found]
    free = [on.free / off.free for off, on in found if count < rows]
    cells = (rows, count, f"{forced:.0%}", f"{a_step:.2f}", f"{one:.1f}", f"{several:.1f}", _range(ratios))
    return f"| {' | '.join(map(str, (*cells, _range(free))))} |"


# compile ------------------------------------------------------------------------------------------------------------


def measure_compile(engine: Engine, steps: int, rounds: int) -> None:
    """Eight free rows decode; in one of two runs DEAR grammars are compiled meanwhile."""
    print(f"\n| {DEAR} dear grammars | longest step: none, compiling | median step: none, compiling | ratio |")
    print("|---|---|---|---|")
    for round_ in range(rounds + 1):  # round 0 warms both up
        rng = random.Random(f"compile {round_}")
        free = [Submit(id=str(i), prompt=engine.prompt(rng), max_tokens=8 * steps, max_wait_s=1e9) for i in range(8)]
        watch = CompileWatch(engine, [constraint_of(dear_schema(rng)) for _ in range(DEAR)], steps)
        _, alone = engine.run(free, 3 * steps)
        _, beside = engine.run(free, 3 * steps, watch.at_step)
        if round_:
            print(_compile_line(watch, alone[steps:], beside), flush=True)


class CompileWatch:
    """Compilation that starts before step number `start`, and the time of its end as the steps see it."""

    def __init__(self, engine: Engine, constraints: Sequence[Constraint], start: int) -> None:
        self._engine = engine
        self._constraints = constraints
        self._start = start
        self.began = self.ended = 0.0

    def at_step(self, step: int) -> None:
        if step < self._start or self.ended:
            return
        self.began = self.began or time.perf_counter()
        states = [self._engine.runner.grammar_state(one).state for one in self._constraints]
        if GrammarState.FAILED in states:
            sys.exit("a dear grammar was refused: mend dear_schema")
        if GrammarState.PENDING not in states:
            self.ended = time.perf_counter()


def _compile_line(watch: CompileWatch, alone: Sequence[Step], beside: Sequence[Step]) -> str:
    ended = watch.ended or beside[-1].at
    during = [step.seconds * 1e3 for step in beside if watch.began < step.at <= ended]
    usual = [step.seconds * 1e3 for step in alone]
    medians = statistics.median(usual), statistics.median(during)
    return (
        f"| {(ended - watch.began) * 1e3:.0f} ms{'' if watch.ended else ' and more'}, {len(during)} steps "
        f"| {max(usual):.2f}, {max(during):.2f} ms | {medians[0]:.2f}, {medians[1]:.2f} ms "
        f"| {medians[1] / medians[0]:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--shape", choices=("tiny", "0.6B", "8B"))
    parser.add_argument("--bits", type=int, default=16)
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json for --shape")
    parser.add_argument("--stop", default="<|eot_id|>", metavar="TOKEN", help="its end token (default: Llama 3's)")
    parser.add_argument("--only", nargs="*", default=["valid", "cost", "forced", "compile"], metavar="PART")
    parser.add_argument("--rows", type=int, nargs="*", help="batch sizes, half of each constrained")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if (options.model is None) == (options.shape is None) or (options.shape and options.tokenizer is None):
        parser.error("give --model FOLDER, or --shape SIZE and --tokenizer FILE")
    if options.model is not None:
        engine, tokenizer = engine_of_folder(options.model), options.model / "tokenizer.json"
    else:
        tokenizer = options.tokenizer
        engine = engine_of_shape(options.shape, options.bits, tokenizer, options.stop)
    from tokenizers import Tokenizer

    passed = True
    if "valid" in options.only:
        passed = check_valid(engine, Tokenizer.from_file(str(tokenizer)).decode, options.rounds)
    if "cost" in options.only:
        cases = CASES if options.rows is None else [(rows, max(1, rows // 2)) for rows in options.rows]
        measure_cost(engine, cases, options.steps, options.rounds)
    if "forced" in options.only:
        cases = FORCED_CASES if options.rows is None else [(rows, max(1, rows // 2)) for rows in options.rows]
        measure_forced(engine, cases, options.steps, options.rounds)
    if "compile" in options.only:
        measure_compile(engine, options.steps, options.rounds)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
