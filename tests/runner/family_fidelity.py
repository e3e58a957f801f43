"""Greedy tokens of a model through one backend, held to mlx-lm's own, however its sequences are computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import mlx.core as mx
import numpy as np
from msgspec.structs import replace

from tests.runner.drive import Choice, Drive, run_alone, seeded_choices
from tests.runner.looped import Looped
from tests.runner.parting import PARTING
from tests.runner.speculated import Speculated
from tests.support.scripted_drafter import ScriptedDrafter
from treadle.core.messages import Submit
from treadle.runner.loading.model import LoadedModel
from treadle.runner.model_runner import ModelRunner

LENGTHS = (1, 2, 90, 33, 7)
"""Prompts of one token, and prompts that are longer than the windows."""
PARTS = ("first", "again", "longer", "inside", "border", "late")
TIE = 1e-3
"""Spreads of logits between two tokens that rounding in float32 may exchange."""


def requests(seed: int, lengths: Sequence[int] = LENGTHS) -> list[Submit]:
    """Prompts of so many tokens, each with 4 to 12 new ones."""
    dice = random.Random(seed)
    return [
        Submit(
            id=f"r{i}",
            prompt=tuple(dice.randrange(256) for _ in range(length)),
            max_tokens=dice.randint(4, 12),
            max_wait_s=1e9,
        )
        for i, length in enumerate(lengths)
    ]


Known = dict[tuple[int, ...], tuple[int, ...]]
"""Tokens that mlx-lm was seen to generate, by their prompt."""


def faults(model: LoadedModel, known: Known | None = None) -> list[str]:
    """Ways of computing sequences that gave other tokens than mlx-lm's; empty where all gave the same. What is `known`
    of a model with the same weights, on another path, is not asked again."""
    judge = Judge(model, {} if known is None else known)
    found = []
    for way, run in WAYS.items():
        try:
            reason = next((reason for reason in run(model, judge) if reason), "")
        except Exception as error:  # whatever the model's code or a backend raises is the result
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        if reason:
            found.append(f"{way}: {reason}")
    return found


def _alone(model: LoadedModel, judge: Judge) -> Iterator[str]:
    runner = ModelRunner(model)
    for request in requests(0):
        yield judge.departure(request, run_alone(runner, request))


def _together(model: LoadedModel, judge: Judge) -> Iterator[str]:
    """In chunks of any size, held back now and then, and preempted."""
    runner, some = ModelRunner(model), requests(1)
    drive = Drive(runner, some)
    found = drive.run(partial(_with_preemption, seeded_choices(1), random.Random(1)))
    yield "; ".join(drive.failures.values())
    for request in some:
        yield judge.departure(request, found[request.id])
    yield "" if runner.statistics().kv_bytes == 0 else "memory is held behind the last sequence"


def _with_preemption(choose: Callable[[Drive], Choice], dice: random.Random, drive: Drive) -> Choice:
    """What `choose` says, after a sequence in seven steps has lost its memory."""
    joined = [row for row in drive.live.values() if row.joined]
    if joined and dice.random() < 1 / 7:
        victim = dice.choice(joined)
        drive.runner.release(victim.id)
        victim.rewind()
    return choose(drive)


def _cached(model: LoadedModel, judge: Judge) -> Iterator[str]:
    """Under the engine's own loop: prompts that begin as others did, and all of them again at once."""
    loop = Looped(ModelRunner(model), prefill_tokens=64)
    some = {name: Submit(id=name, prompt=PARTING[name][0], max_tokens=6, max_wait_s=1e9) for name in PARTS}
    for name, request in some.items():
        yield judge.departure(request, loop.run(request)[name])
    again = [Submit(id=f"{name}, again", prompt=one.prompt, max_tokens=6, max_wait_s=1e9) for name, one in some.items()]
    loop.run(*again)
    for request in again:
        yield judge.departure(request, loop.tokens(request.id))
    yield "" if any(loop.cached(request.id) for request in again) else "no prefix was reused"


def _drafted(model: LoadedModel, judge: Judge) -> Iterator[str]:
    """With drafts that are verified, every other one wrong, where the backend can; some sequences preempted."""
    if not ModelRunner(model, drafter=ScriptedDrafter({})).capabilities().steps.speculation.draft_tokens:
        return
    some = [replace(request, max_tokens=16) for request in requests(5)]
    plain = Speculated(ModelRunner(model), some, drafts=0).run()
    run = Speculated(ModelRunner(model, drafter=ScriptedDrafter(plain, 0.6)), some, drafts=3)
    tokens = run.run(preempt=1)
    for request in some:
        yield judge.departure(request, tokens[request.id])
    yield "" if run.drafted > run.accepted > 0 else "no drafts were verified"


WAYS: dict[str, Callable[[LoadedModel, Judge], Iterator[str]]] = {
    "alone": _alone,
    "together, chunked, preempted": _together,
    "cached": _cached,
    "drafted": _drafted,
}


class Judge:
    """Judge of tokens by mlx-lm's generation with `model`'s module."""

    def __init__(self, model: LoadedModel, known: Known) -> None:
        self._model = model
        self._known = known

    def departure(self, request: Submit, tokens: Sequence[int]) -> str:
        """Return the first of `tokens` that mlx-lm would not have picked, having picked those before it; empty if there
        is none. mlx-lm reads prompt and tokens as one prompt and, where that differs, token by token."""
        prompt = request.prompt
        if len(tokens) != request.max_tokens:
            return f"{request.id} has {len(tokens)} tokens and not {request.max_tokens}"
        if self._known.get(prompt) == tuple(tokens):
            return ""
        with nullcontext() if self._model.layers is None else self._model.layers.originals():
            place = _first_departure(self._model, prompt, tokens, len(prompt) + len(tokens))
            if place is not None:
                place = _first_departure(self._model, prompt, tokens, max(1, len(prompt) - 1))
        if place is None:
            self._known[prompt] = tuple(tokens)
        return "" if place is None else f"{request.id}, of a prompt of {len(prompt)}, departs at token {place}"


def _first_departure(model: LoadedModel, prompt: Sequence[int], tokens: Sequence[int], at_once: int) -> int | None:
    """Index of the first token whose logit is below the best one's by more than a tie; the first `at_once` tokens are
    read in one pass."""
    caches, read = model.library.new_caches(model.module), [*prompt, *tokens[:-1]]
    passes = [read[:at_once], *([token] for token in read[at_once:])]
    logits = mx.concatenate([model.module(mx.array([some]), cache=caches) for some in passes], axis=1)
    logits = logits[0, len(prompt) - 1 :].astype(mx.float32)
    picked = mx.take_along_axis(logits, mx.array(list(tokens))[:, None], axis=-1)[:, 0]
    finite = mx.where(mx.isfinite(logits), logits, 0)
    below = (logits.max(axis=-1) - picked) / mx.maximum(mx.std(finite, axis=-1), 1e-9)
    departed = np.flatnonzero(~(np.array(below) <= TIE))
    return int(departed[0]) if departed.size else None
