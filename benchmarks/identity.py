"""Tokens with drafts beside tokens without, for tiny models of all architectures: there must be no difference (P11).

    python benchmarks/identity.py [--tokens 1000000] [--architectures qwen3 ...] [--seed 0] [--json OUT]

Each architecture runs on the contiguous backend in float32, some also in pages, with MLX's operations in place of
CUDA's kernels. Batches of 8 have greedy, drawn, penalized and constrained requests, with log-probabilities, some
without drafts. Some are preempted, and some leave, also in a step that verifies their drafts. Drafts are looked up,
scripted with a chance of 0.6, of a draft model, or of an EAGLE-3 or MTP head. One in five of the last three is changed,
as tiny models agree with themselves, and random heads, which are never right, give the number of drafts alone. Models
with a head of each kind come before every architecture, and these in an order of the seed: a run that is stopped early
has tokens of each drafter, and of any architecture.

Where plain decoding differs from itself when it is repeated, that is told, and the batch is not compared.

A difference is a tie where plain decoding, alone and from the tokens before it, gives both tokens once its logits are
changed by a ten-thousandth of their range, or by the smallest of `NOISES` that does. The gap is that of both tokens'
log-probabilities. It is one as well where plain decoding gives both tokens as the tokens before it are computed in
chunks of other `LENGTHS`: a router's best experts may be nearly equal, and other ones change logits by far more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from treadle.runner.device import blas  # noqa: E402

blas.prepare(1)  # before MLX is imported

import mlx.core as mx  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from tests.runner.drafting.eagles import make_target, with_eagle  # noqa: E402
from tests.runner.family_paths import every_path  # noqa: E402
from tests.runner.speculated import Row, Speculated  # noqa: E402
from tests.runner.speculation_requests import has_grammars, made, mixed  # noqa: E402
from tests.support.architectures import ARCHITECTURES, config_of  # noqa: E402
from tests.support.eagle_models import make_eagle  # noqa: E402
from tests.support.mtp_models import FAMILIES as WITH_MTP  # noqa: E402
from tests.support.mtp_models import make_headed  # noqa: E402
from tests.support.scripted_drafter import ScriptedDrafter  # noqa: E402
from tests.support.tiny import make_tiny  # noqa: E402

from treadle.core.messages import Submit, TokenLogprob  # noqa: E402
from treadle.errors import ModelError  # noqa: E402
from treadle.runner import step_sampler  # noqa: E402
from treadle.runner.drafting.head import HeadDrafter  # noqa: E402
from treadle.runner.drafting.lookup import LookupDrafter  # noqa: E402
from treadle.runner.drafting.model import ModelDrafter  # noqa: E402
from treadle.runner.loading.headed import HeadedModel  # noqa: E402
from treadle.runner.loading.loader import load  # noqa: E402
from treadle.runner.loading.model import LoadedModel  # noqa: E402
from treadle.runner.loading.mtp import load_head  # noqa: E402
from treadle.runner.model_runner import ModelRunner  # noqa: E402
from treadle.runner.sampling import sampler  # noqa: E402

OPTIONS: dict[str, Any] = {"max_running": 8, "memory": 64 << 20}
LONGER, MOST = 12, 400
"""Times the tokens of the tests' requests, and the most: some tiny models have 512 positions."""
PAGED = 8
"""One architecture in so many is also tried in pages, whose operations take long on a CPU."""
WITH_EAGLE = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "gemma3_text",
    "cohere2",
    "phi3",
    "mixtral",
    "glm4_moe",
    "deepseek_v3",
    "qwen3_next",
    "nemotron_h",
    "lfm2",
)
HEADS: tuple[dict[str, Any], ...] = (
    {"layout": "original"},
    {"layers": 2, "norm_before_residual": True, "norm_before_fc": True},
    {"norm_before_residual": True},
)
"""EAGLE-3 heads, of layouts and layers of each kind."""
CHANGED = 0.2
GAP_TOP = 20
NOISES = (1e-6, 1e-5, 1e-4, 1e-3)
TIE = 1e-4
TRIALS = 200
LENGTHS = (1, 2, 3, 5, 9, 40, 1000)
"""Tokens of chunks."""


@dataclass
class Difference:
    """The first other token of a row."""

    where: str
    request: str
    place: int
    plain: int
    drafted: int
    gap: float | None
    noise: float | None
    lengths: bool

    @property
    def is_tie(self) -> bool:
        return self.lengths or (self.noise is not None and self.noise <= TIE)


@dataclass
class Found:
    """What was compared with one drafter."""

    tokens: int = 0
    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    differences: list[Difference] = field(default_factory=list)


class Changed:
    """Drafts of `drafter`, some of which are changed; or as many of the rows' `answers`."""

    def __init__(self, drafter: Any, seed: int, answers: dict[str, list[int]] | None = None) -> None:
        self._drafter = drafter
        self._answers = answers
        self._dice = random.Random(seed)
        self.reads_states = getattr(drafter, "reads_states", False)

    def propose(self, rows: Sequence[Any], most: Sequence[int]) -> list[Sequence[int]]:
        found = self._drafter.propose(rows, most)
        if self._answers is not None:
            ends = [len(row.tokens) - len(row.request.prompt) for row in rows]
            answers = [self._answers[row.id][end:] for row, end in zip(rows, ends, strict=True)]
            found = [own[: len(drafts)] for own, drafts in zip(answers, found, strict=True)]
        return [[token ^ (self._dice.random() < CHANGED) for token in tokens] for tokens in found]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


Make = Callable[[dict[str, list[int]], int], Any]


def drafters(model: LoadedModel, small: LoadedModel, headed: HeadedModel | None) -> dict[str, Make]:
    """Ways to make a drafter of plain answers and a seed, by name. A model with a head has that alone."""
    if headed is not None:
        return {headed.kind.drafter: lambda answers, seed: Changed(HeadDrafter(headed), seed, answers)}

    def draft(answers: dict[str, list[int]], seed: int) -> Any:
        try:
            return Changed(ModelDrafter(model, model.vocabulary), seed)
        except ModelError:  # states that can't be cut
            return Changed(ModelDrafter(small, model.vocabulary), seed)

    return {
        "lookup": lambda answers, seed: LookupDrafter(draft_tokens=8),
        "scripted": lambda answers, seed: ScriptedDrafter(answers, 0.6, seed),
        "draft": draft,
    }


def batch(model: LoadedModel, seed: int) -> list[Submit]:
    some = [one for one in mixed(seed) if one.constraint is None or has_grammars(model)]
    return [
        one
        if one.constraint is not None
        else replace(one, max_tokens=min(MOST, LONGER * one.max_tokens), stop_token_ids=())
        for one in some
    ]


def predicting(some: Sequence[Submit], wanted: dict[str, list[int]], seed: int) -> list[Submit]:
    """The requests with predictions, some of whose tokens differ from the answers."""
    dice = random.Random(seed)
    return [
        replace(one, prediction=tuple(token ^ (dice.random() < CHANGED / 4) for token in wanted[one.id]))
        for one in some
    ]


class Leaving(Speculated):
    """Rows that leave, or come back under their ids, while a step computes their drafts."""

    def __init__(self, *args: Any, seed: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._dice = random.Random(seed)
        self.left: set[str] = set()

    def step(self, rows: Sequence[Row] | None = None, *, drafts: int | None = None) -> Any:
        self.steps += 1
        plan = self.plan(self.live if rows is None else rows, self.drafts if drafts is None else drafts)
        self.runner.start(plan)
        gone = [one.id for one in plan.decode if one.drafts and self._dice.random() < 1 / 60]
        for id_ in gone:
            self.runner.release(id_)
        result = self.runner.finish()
        self.apply(plan, result)
        for id_ in gone:
            over = self._dice.random() < 0.3
            self.left |= {id_} if over and not self.rows[id_].over else set()
            if not self.rows[id_].over:
                self.release(self.rows[id_], over=over)
        return result


def compare(where: str, model: LoadedModel, makes: dict[str, Make], seed: int, found: dict[str, Found]) -> None:
    if not made(model, ScriptedDrafter({})).capabilities().steps.speculation.draft_tokens:
        return
    some = batch(model, seed)
    plain = Speculated(made(model), some, drafts=0)
    wanted = plain.run()
    for name, make in makes.items():
        own, drafter = found.setdefault(name, Found()), make(wanted, seed)
        runner = made(model, drafter)
        asked = predicting(some, wanted, seed) if name == "lookup" else some
        run = Leaving(runner, asked, drafts=(3, 8)[seed % 2], chunk=(40, 1000)[seed % 2], seed=seed)
        tokens = run.run(preempt=seed)
        left = held(runner, drafter)
        if left or run.failures != plain.failures:
            sys.exit(f"{where}, {name}, seed {seed}: {left or run.failures}")
        places = {one.id: first_other(tokens[one.id], wanted[one.id]) for one in some}
        if any(place is not None for place in places.values()):
            again = Speculated(made(model), some, drafts=0).run()
            if again != wanted:
                print(f"{where}, {name}, seed {seed}: plain decoding differs from itself", flush=True)
                return
        own.drafted, own.accepted = own.drafted + run.drafted, own.accepted + run.accepted
        for request in some:
            mine, theirs, place = tokens[request.id], wanted[request.id], places[request.id]
            if place is None and request.id not in run.left and len(mine) != len(theirs):
                sys.exit(f"{where}, {name}, seed {seed}: {request.id} has {len(mine)} tokens and not {len(theirs)}")
            own.rows += 1
            own.tokens += len(mine) if place is None else place + 1
            if place is not None:
                one = judged(model, request, theirs, mine, place)
                own.differences.append(Difference(f"{where}, {name}, seed {seed}", request.id, place, *one))
                print(asdict(own.differences[-1]), flush=True)
        runner.close()


def first_other(mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place with another token; None where one is the beginning of the other."""
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)


def judged(
    model: LoadedModel, request: Submit, plain: Sequence[int], drafted: Sequence[int], place: int
) -> tuple[int, int, float | None, float | None, bool]:
    """Draw the token at `place` plainly, alone, behind the tokens before it, from logits that are changed a little.
    Return both tokens, their gap, the least change that gives both, and whether chunks of other lengths do."""
    asked = replace(request, logprobs=GAP_TOP, prompt_logprobs=None)
    both, noises = {plain[place], drafted[place]}, list[float]()

    def noisy(logits: Any, *others: Any) -> Any:
        drawn, seen = sampler.draw(logits, *others), set[int]()
        for noise in NOISES:
            for _ in range(TRIALS):
                change = mx.random.uniform(-noise, noise, logits.shape) * (logits.max() - logits.min())
                changed = sampler.draw(logits + change, *others)
                mx.eval(changed.arrays)
                seen.update(changed.resolve()[0])
            noises.extend([noise] if both <= seen else [])
        return drawn

    def continued(chunk: int) -> Row:
        run = Speculated(made(model), [asked], drafts=0, chunk=chunk)
        row = run.rows[request.id]
        row.tokens, row.logprobs = list(plain[:place]), [TokenLogprob(0.0)] * place
        while len(row.tokens) == place:
            run.step()
        return row

    with mock.patch.object(step_sampler, "draw", noisy):
        row = continued(LENGTHS[-1])
    first = row.logprobs[place]
    chances = dict(first.top) | {row.tokens[place]: first.logprob}
    gap = abs(chances[plain[place]] - chances[drafted[place]]) if both <= chances.keys() else None
    lengths = both <= {continued(chunk).tokens[place] for chunk in LENGTHS}
    return plain[place], drafted[place], gap, min(noises, default=None), lengths


def held(runner: ModelRunner, drafter: Any) -> str:
    """What rows that have gone still hold; empty if nothing."""
    own, rows = runner.statistics().kv_bytes, len(runner._rows)
    of_drafts = len(getattr(drafter, "_rows", ()))
    return f"{own} bytes, {rows} rows and {of_drafts} rows of drafts are held" if own or rows or of_drafts else ""


def models(
    names: Sequence[str], seed: int, heads: Iterator[tuple[str, HeadedModel]]
) -> Iterator[tuple[str, LoadedModel, HeadedModel | None]]:
    """Models of all architectures, with new weights for each seed, and before each two of those with `heads`."""
    for i, name in enumerate(random.Random(seed).sample(names, len(names))):
        for where, headed in itertools.islice(heads, 2):
            yield where, headed.target, headed
        try:
            for path, model in every_path(config_of(name, vocab_size=264)):
                if "paged" not in path or (i + seed) % PAGED == 0:
                    yield f"{name}, {path}", model, None
        except (Exception, SystemExit) as error:  # mlx-lm's module of a model may end the process
            print(f"{name} is left out: {type(error).__name__}: {str(error)[:100]}", flush=True)


def with_heads(names: Sequence[str], seed: int, folder: Path) -> Iterator[tuple[str, HeadedModel]]:
    """Models with an EAGLE-3 head and with an MTP head by turns, without end, with new weights for each."""
    eagles = [partial(eagle_headed, name) for name in WITH_EAGLE if name in names]
    mtps = [partial(mtp_headed, name) for name in WITH_MTP if name in names]
    kinds = [itertools.cycle(makes) for makes in (eagles, mtps) if makes]
    for turn in itertools.count(seed) if kinds else ():
        where, headed = next(kinds[turn % len(kinds)])(turn, folder / f"{turn}")
        yield where, headed
        shutil.rmtree(folder / f"{turn}")


def eagle_headed(name: str, seed: int, folder: Path) -> tuple[str, HeadedModel]:
    kind = HEADS[seed % len(HEADS)]
    target = load(make_target(folder / "target", name, seed=seed), **OPTIONS)
    return f"{name} with EAGLE-3 head", with_eagle(target, make_eagle(folder / "head", seed=seed, **kind))


def mtp_headed(name: str, seed: int, folder: Path) -> tuple[str, HeadedModel]:
    made_at = make_headed(folder, name, seed=seed)
    return f"{name} with MTP head", load_head(load(made_at, **OPTIONS), made_at, OPTIONS)


def all_compared(options: argparse.Namespace, folder: Path) -> dict[str, Found]:
    small, found, seeds = (
        load(make_tiny(folder / "small", layers=1, seed=9)),
        dict[str, Found](),
        itertools.count(options.seed),
    )
    names = options.architectures or list(ARCHITECTURES)
    heads = with_heads(names, options.seed, folder)
    reported = 0
    for round_ in itertools.count(options.seed):
        for where, model, headed in models(names, round_, heads):
            compare(where, model, drafters(model, small, headed), next(seeds), found)
            total = sum(one.tokens for one in found.values())
            if total - reported > options.tokens / 50:
                reported = total
                save(options, found)
                print(f"\n{total:,} tokens after {time.process_time():.0f} s, {where}\n{table(found)}", flush=True)
            if total >= options.tokens:
                return found
    raise AssertionError


def table(found: dict[str, Found]) -> str:
    rows = [
        "| drafter | rows | tokens | accepted of drafted | differences | of these ties |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        ties = sum(difference.is_tie for difference in one.differences)
        shown = f"{one.accepted:,} of {one.drafted:,} | {len(one.differences)} | {ties}"
        rows.append(f"| {name} | {one.rows:,} | {one.tokens:,} | {shown} |")
    return "\n".join(rows)


def save(options: argparse.Namespace, found: dict[str, Found]) -> None:
    if options.json:
        options.json.write_text(json.dumps({name: asdict(one) for name, one in found.items()}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--architectures", nargs="*", choices=[*ARCHITECTURES], metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        found = all_compared(options, Path(folder))
    save(options, found)
    print(table(found))


if __name__ == "__main__":
    main()
