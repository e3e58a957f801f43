"""Tokens per second of speculative decoding beside plain decoding, by batch size and share of right drafts (P11).

    python benchmarks/speculation.py (MODEL | --family qwen3 | --mtp) [--bits 16] [--config JSON] [--rows 1 4 32]
        [--acceptance 0 0.3 0.6 0.9 1] [--lookup repeating random] [--draft JSON] [--sure] [--compares] [--tokens 256]
        [--rounds 3] [--limit 600] [--json OUT]

The model of the folder MODEL, or one of `gpu/family_shapes.py` with random weights, runs in this process in the engine
loop of a server, with its scheduler and its guard. Prompts are random tokens. A drafter that knows the answers proposes
each of their tokens rightly with the given chance, and wrongly else. Its outcomes are learned from verified drafts
alone, as a draft model's are; with `--compares` also from what plain steps sample, as those of look-ups are. With
`--draft` a draft model of the same family, whose shape has the fields of JSON, or with `--mtp` an MTP head drafts, with
random weights, and its tokens are replaced by those: so drafts cost what they do. With `--lookup` drafts are looked up:
in prompts that repeat a passage, or in random ones. Plain and speculative decoding of the same prompts take turns of
0.15 s; ratios are medians over rounds. All tokens must be the same in float32. In bfloat16 a row may differ where two
tokens are nearly as probable: the largest difference of their log-probabilities, by the plain model, is told. As drafts
are those of the plain answer, they are wrong from there on: with `--sure` weights are made whose answers don't depend
on rounding. Nothing new is begun after `--limit` seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.arguments import add_model, prepare_device, shape_config  # noqa: E402

PREFILL_TOKENS = 2048
WINDOW_S = 0.15
FAST = "fast"
PASSAGE = 24
CIRCLE = 48  # tokens
LOUD = 40.0
HEADED = {  # MiMo 7B
    "model_type": "mimo",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rope_theta": 640000,
}
MOST_EXPLAINED = 8  # rows of a round whose first difference is looked at


@dataclass
class Bench:
    """A model in a runner, whose drafter is exchanged between runs."""

    model: Any
    options: argparse.Namespace
    blas: Any
    drafter: Any = None

    def __post_init__(self) -> None:
        from tests.support.scripted_drafter import ScriptedDrafter

        from treadle.runner.device.blas_threads import ThreadGovernor
        from treadle.runner.model_runner import ModelRunner

        self.drafter = real_drafter(self.model, self.options) or Exchangeable(ScriptedDrafter({}))
        govern = ThreadGovernor(self.blas.set_threads, self.blas.threads).before_step if self.blas.set_threads else None
        self.runner = ModelRunner(self.model, before_step=govern or (lambda: None), drafter=self.drafter)
        self.runner.warm_up()

    def prompts(self, rows: int, round_: int, repeating: bool) -> list[tuple[int, ...]]:
        """Random prompts; repeating ones say the same passage again and again."""
        dice = random.Random(f"{rows} {round_}")
        length, most = self.options.prompt, self.model.vocabulary
        if self.options.sure:
            return [sure_prompt(dice, length, most, repeating) for _ in range(rows)]
        if not repeating:
            return [tuple(dice.randrange(most) for _ in range(length)) for _ in range(rows)]
        passages = [[dice.randrange(most) for _ in range(PASSAGE)] for _ in range(rows)]
        return [tuple((passage * (length // PASSAGE + 1))[:length]) for passage in passages]

    def answers_of(self, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
        """The plain answers to prompts, for a drafter that knows them."""
        if self.options.sure:
            return [sure_answer(prompt, self.options.tokens, self.model.vocabulary) for prompt in prompts]
        self.runner.forget_prefixes()
        known = Arm("known", self.runner, prompts, self.options.tokens, speculate=False)
        known.run()
        return known.rows

    def compare(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Arm, Arm]:
        """Decode all prompts plainly and speculatively, in turns of `WINDOW_S` seconds: a host whose speed changes
        within seconds is the same for both. Times count from the first step in which all of them decode."""
        self.runner.forget_prefixes()
        self.drafter.begin_round()
        plain, fast = (
            Arm(name, self.runner, prompts, self.options.tokens, speculate=name == FAST) for name in ("plain", FAST)
        )
        for arm in (plain, fast):
            arm.prefill()
        while not (plain.done and fast.done):
            for arm in (plain, fast):
                arm.run(WINDOW_S)
        return plain, fast

    def difference(self, prompt: tuple[int, ...], plain: list[int], fast: list[int]) -> float:
        """Difference of the log-probabilities of the first tokens that differ, by a plain step behind the others."""
        from treadle.core.messages import Submit
        from treadle.core.plan import Admit, DecodeRow, PrefillChunk, StepPlan

        at = next(i for i, (a, b) in enumerate(zip(plain, fast, strict=True)) if a != b)
        tokens = (*prompt, *plain[:at])
        one = Submit(id="difference", prompt=tokens, max_tokens=1, logprobs=20)
        plan = StepPlan(
            0, (Admit(one),), (PrefillChunk("difference", 0, len(tokens) - 1),), (DecodeRow("difference", 0),)
        )
        self.runner.start(plan)
        result = self.runner.finish()
        self.runner.release("difference")
        top = dict(result.rows[0].logprobs[0].top)
        return abs(top[plain[at]] - top[fast[at]]) if plain[at] in top and fast[at] in top else float("inf")


class Arm:
    """Sequences of a runner, one of `tokens` for each prompt, that a scheduler of their own steps as a server's engine
    does: their `rows` so far, the `seconds` for those behind the first of each, and draft tokens. Nothing is in flight
    between calls, so several may use a runner in turns."""

    def __init__(
        self, name: str, runner: Any, prompts: Sequence[tuple[int, ...]], tokens: int, *, speculate: bool
    ) -> None:
        import msgspec

        from treadle.core.capabilities import SpeculationCapabilities
        from treadle.core.messages import Submit
        from treadle.engine.loop import EngineLoop
        from treadle.engine.mailbox import Mailbox
        from treadle.engine.owner import OwnerLimits, scheduler_for

        can = runner.capabilities()
        if not speculate:
            steps = msgspec.structs.replace(can.steps, speculation=SpeculationCapabilities())
            can = msgspec.structs.replace(can, steps=steps)
        limits = OwnerLimits(max_running=len(prompts), prefill_tokens=PREFILL_TOKENS)
        scheduler = scheduler_for(can, limits, runner.match_prefix, runner.grammar_state)
        self._reports: list[Any] = []
        self._loop = EngineLoop(runner, scheduler, Mailbox(), self._reports.append)
        for i, prompt in enumerate(prompts):
            id_ = f"{name} {i}"
            self._loop.mailbox.put(Submit(id=id_, prompt=prompt, max_tokens=tokens, salt=name, max_wait_s=1e9))
        self._tokens = tokens
        self._untimed = 0
        self._steps = StepTimes(runner)
        self.rows: list[list[int]] = [[] for _ in prompts]
        self.seconds = 0.0
        self.drafted = self.accepted = 0

    @property
    def done(self) -> bool:
        return all(len(row) == self._tokens for row in self.rows)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return (sum(map(len, self.rows)) - self._untimed) / self.seconds

    @property
    def steps(self) -> dict[bool, list[float]]:
        return self._steps.found

    def prefill(self) -> None:
        """Run until all prompts have an answer's first token."""
        while not all(self.rows):
            self._turn()
        self._land()
        self._untimed = sum(map(len, self.rows))

    def run(self, limit_s: float = float("inf")) -> None:
        """Decode for so long, or to the end."""
        if self.done:
            return
        began = time.perf_counter()
        with self._steps:
            while not self.done and time.perf_counter() - began < limit_s:
                self._turn()
        self._land()
        self.seconds += time.perf_counter() - began
        while self.done and self._loop.has_work:
            self._loop.run_once()

    def _turn(self) -> None:
        self._loop.run_once()
        self._hear()

    def _land(self) -> None:
        """Finish what is in flight, and start nothing."""
        self._loop._flush(self._loop._finish_until(0))
        self._hear()

    def _hear(self) -> None:
        from treadle.core.messages import StepReport

        for output in [o for report in self._reports if isinstance(report, StepReport) for o in report.outputs]:
            if output.finish is not None and output.finish.reason != "length":
                sys.exit(f"a sequence ended: {output.finish}")
            self.rows[int(output.id.split()[1])] += output.tokens
            self.drafted += output.drafted
            self.accepted += output.accepted
        self._reports.clear()


class StepTimes:
    """Seconds from the start of each decoding step of a runner to that of the next, by whether it verifies drafts."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._start = runner, runner.start
        self.found: dict[bool, list[float]] = {False: [], True: []}
        self._before: tuple[float, bool] | None = None

    def __enter__(self) -> None:
        self._before = None
        self._runner.start = self._timed

    def __exit__(self, *raised: object) -> None:
        self._runner.start = self._start

    def _timed(self, plan: Any) -> None:
        now, before = time.perf_counter(), self._before
        if before is not None:
            self.found[before[1]].append(now - before[0])
        self._before = None if plan.prefill or not plan.decode else (now, plan.verifies)
        self._start(plan)


class Exchangeable:
    """Drafter that asks another one, which can be exchanged."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.names = inner.names

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def use(self, script: Any) -> None:
        self.inner = script

    def begin_round(self) -> None:
        pass


class Guided:
    """Drafter that lets a real one draft, and replaces its tokens by those of a script."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._script: Any = None
        self.names = inner.names

    def use(self, script: Any) -> None:
        self._script = script

    def begin_round(self) -> None:
        self._inner.reset()

    def propose(self, rows: Sequence[Any], most: Sequence[int]) -> list[Sequence[int]]:
        own = self._inner.propose(rows, most)
        if self._script is None:  # the warm-up
            return list(own)
        drafted = [len(tokens) for tokens in own]
        places = [i for i, count in enumerate(drafted) if count]
        right = self._script.propose([rows[i] for i in places], [drafted[i] for i in places])
        found: list[Sequence[int]] = [() for _ in rows]
        for i, tokens in zip(places, right, strict=True):
            found[i] = tokens
        return found

    def follow(self, rows: Sequence[Any], seconds: float) -> list[Any]:
        self._inner.follow(rows, seconds)
        return []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class GuidedReader(Guided):
    """The same for a drafter that observes hidden states."""

    reads_states = True

    def observe(self, found: Sequence[Any]) -> None:
        self._inner.observe(found)


def real_drafter(model: Any, options: argparse.Namespace) -> Any:
    """Return the drafter that the options ask for, with its tokens replaced; None for none."""
    if options.draft is not None:
        from benchmarks.gpu.families_steps import load_made, make
        from benchmarks.gpu.family_shapes import config_of

        from treadle.runner.drafting.model import ModelDrafter

        module, config = make(config_of(options.family, small=options.small) | options.draft, options.bits)
        draft = load_made(module, config, options.memory, max(options.rows))
        return Guided(ModelDrafter(draft, model.vocabulary))
    if options.mtp:
        from treadle.runner.drafting.head import HeadDrafter
        from treadle.runner.loading.mtp import load_head

        with tempfile.TemporaryDirectory() as folder:
            make_head(Path(folder), model.module, options.made)
            headed = load_head(model, Path(folder), {"memory": options.memory, "max_running": max(options.rows)})
        return GuidedReader(HeadDrafter(headed))
    return None


def make_sure(module: Any) -> None:
    """Make each token's successor certain: its embedding is loud, and that of the successor's row of the head. Tokens
    of the lower half follow each other in circles of CIRCLE, those of the upper half in one."""
    import mlx.core as mx

    body, count = module.model, module.lm_head.weight.shape[0]
    token, half = mx.arange(count), count // 2 // CIRCLE * CIRCLE
    circling = token // CIRCLE * CIRCLE + (token % CIRCLE + 1) % CIRCLE
    following = mx.where(token < half, circling, half + (token - half + 1) % (count - half))
    embedding = body.embed_tokens.weight.astype(mx.float32)
    embedding = embedding / mx.sqrt(mx.mean(mx.square(embedding), axis=1, keepdims=True))
    body.embed_tokens.weight = (embedding * LOUD).astype(mx.bfloat16)
    head = mx.zeros_like(module.lm_head.weight)
    head[following] = (embedding / embedding.shape[1] ** 0.5).astype(mx.bfloat16)
    module.lm_head.weight = head
    mx.eval(body.embed_tokens.weight, head)


def sure_prompt(dice: random.Random, length: int, vocabulary: int, repeating: bool) -> tuple[int, ...]:
    """Return a random prompt, whose answer is one long circle, or one that goes around a short circle as its answer."""
    half = vocabulary // 2 // CIRCLE * CIRCLE
    if not repeating:
        return (*(dice.randrange(half) for _ in range(length - 1)), dice.randrange(half, vocabulary))
    first = dice.randrange(half // CIRCLE) * CIRCLE
    return tuple(first + i % CIRCLE for i in range(length))


def sure_answer(prompt: Sequence[int], tokens: int, vocabulary: int) -> list[int]:
    """Return the answer to a prompt, by the weights of `make_sure`."""
    half, last, answer = vocabulary // 2 // CIRCLE * CIRCLE, prompt[-1], list[int]()
    for _ in range(tokens):
        last = (
            last // CIRCLE * CIRCLE + (last + 1) % CIRCLE
            if last < half
            else half + (last - half + 1) % (vocabulary - half)
        )
        answer.append(last)
    return answer


def make_head(folder: Path, module: Any, config: dict[str, Any]) -> None:
    """Write a folder with an MTP head of MiMo's layout: the last layer of the model, and a random joint."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    size, prefix = config["hidden_size"], "model.mtp_layers.0."
    tensors = {prefix + name: value for name, value in tree_flatten(module.model.layers[-1].parameters())}
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{prefix}{norm}.weight"] = mx.ones(size, mx.bfloat16)
    tensors[f"{prefix}input_proj.weight"] = (mx.random.normal((size, 2 * size)) * size**-0.5).astype(mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, default=str))


def cell(bench: Bench, rows: int, kind: str) -> dict[str, Any]:
    """Measure one batch size with drafts of one kind: an acceptance, or "repeating" or "random" for look-ups."""
    from tests.support.scripted_drafter import ScriptedDrafter

    from treadle.runner.drafting.lookup import LookupDrafter

    lookup = kind in ("repeating", "random")
    rates: dict[bool, list[float]] = {False: [], True: []}
    drafted = accepted = 0
    differing, apart = 0, 0.0
    steps: list[dict[str, list[float]]] = []
    for round_ in range(bench.options.rounds):
        prompts = bench.prompts(rows, round_, kind == "repeating")
        if lookup:
            bench.drafter.use(LookupDrafter(None))
        else:
            answers = {f"{FAST} {i}": row for i, row in enumerate(bench.answers_of(prompts))}
            seed = f"{rows} {kind} {round_}"
            bench.drafter.use(ScriptedDrafter(answers, float(kind), seed, compares=bench.options.compares))
        plain, fast = bench.compare(prompts)
        pairs = [pair for pair in zip(prompts, plain.rows, fast.rows, strict=True) if pair[1] != pair[2]]
        differing += len(pairs)
        apart = max([apart, *(bench.difference(*pair) for pair in pairs[:MOST_EXPLAINED])])
        drafted, accepted = drafted + fast.drafted, accepted + fast.accepted
        steps.append(
            {"of plain decoding": plain.steps[False], "plain": fast.steps[False], "verifying": fast.steps[True]}
        )
        for speculate, run in ((False, plain), (True, fast)):
            rates[speculate].append(run.rate)
    ratios = [fast / plain for plain, fast in zip(rates[False], rates[True], strict=True)]
    return {
        "rows": rows,
        "drafts": kind,
        "plain": statistics.median(rates[False]),
        "speculative": statistics.median(rates[True]),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "drafted": drafted,
        "accepted": accepted,
        "differing": differing,
        "apart": apart,
        "steps": {name: _summed([each[name] for each in steps]) for name in steps[0]},
    }


def _summed(rounds: Sequence[Sequence[float]]) -> tuple[int, float]:
    """Return the number of steps, and the mean of their milliseconds."""
    times = [seconds for one in rounds for seconds in one]
    return len(times), round(statistics.fmean(times) * 1e3, 3) if times else 0.0


def _steps(one: dict[str, Any]) -> str:
    return ", ".join(f"{count} {name} of {ms:.2f}" for name, (count, ms) in one["steps"].items() if count)


def _differing(one: dict[str, Any]) -> str:
    return f"{one['differing']} by {one['apart']:.3f}" if one["differing"] else "0"


def load_model(options: argparse.Namespace) -> Any:
    if options.model is not None:
        from treadle.runner.loading.loader import load

        return load(Path(options.model), memory=options.memory, max_running=max(options.rows))
    from benchmarks.gpu.families_steps import load_made, make
    from benchmarks.gpu.family_shapes import COMMON

    config = {**COMMON, **HEADED, **options.config} if options.mtp else shape_config(options)
    if options.sure:
        config["tie_word_embeddings"] = False
    prepare_device()
    module, options.made = make(config, options.bits)
    if options.sure:
        make_sure(module)
    return load_made(module, options.made, options.memory, max(options.rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser, memory="4")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 32])
    parser.add_argument("--acceptance", nargs="*", default=["0", "0.3", "0.6", "0.9", "1"])
    parser.add_argument("--lookup", nargs="*", choices=["repeating", "random"], default=[])
    parser.add_argument("--draft", type=json.loads, help="JSON of the shape's fields of a draft model")
    parser.add_argument("--mtp", action="store_true", help="a shape with an MTP head, MiMo 7B")
    parser.add_argument("--sure", action="store_true", help="weights that leave no doubt about the next token")
    parser.add_argument("--compares", action="store_true", help="learn from plain steps, too, as look-ups do")
    parser.add_argument("--limit", type=float, default=1e9, metavar="SECONDS")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if sum([options.model is not None, options.family is not None, options.mtp]) != 1:
        parser.error("name a model folder, a shape with --family, or --mtp")
    if options.sure and (options.model is not None or options.bits != "16"):
        parser.error("--sure is for shapes in 16 bits")
    if (options.draft and options.family is None) or ((options.draft or options.mtp) and options.lookup):
        parser.error("--draft needs a shape; it and --mtp go without --lookup")
    began = time.monotonic()
    from treadle.runner.device import blas
    from treadle.runner.device.require_mlx import require_mlx

    report = blas.prepare(None)
    require_mlx()
    bench = Bench(load_model(options), options, report)
    can = bench.runner.capabilities()
    print(f"{can.model}: {can.compute.summary()}; drafts of at most {can.steps.speculation.draft_tokens}")
    print("| rows | drafts | plain, tok/s | speculative | ratio | accepted of drafted | steps, ms | rows that differ |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    cells = []
    for rows in options.rows:
        for kind in [*options.acceptance, *options.lookup]:
            if time.monotonic() - began > options.limit:
                sys.exit("no time is left")
            one = cell(bench, rows, kind)
            cells.append(one)
            print(
                f"| {rows} | {kind} | {one['plain']:,.0f} | {one['speculative']:,.0f} |"
                f" {one['ratio']:.2f} ({one['least']:.2f}..{one['most']:.2f}) |"
                f" {one['accepted']:,} of {one['drafted']:,} | {_steps(one)} | {_differing(one)} |",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps(cells))
    bench.runner.close()


if __name__ == "__main__":
    main()
