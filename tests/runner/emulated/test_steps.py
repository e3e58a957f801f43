"""Whole steps by the kernels' own text: what rows pick is what mlx-lm's model has as most likely."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import dequantize_model
from msgspec import structs

from tests.runner.backends import Driven, segment
from tests.runner.columns import logits_of, places, sparse
from tests.runner.looped import Looped
from tests.runner.paged.models import loaded, make, paged
from tests.runner.reference import reference
from tests.runner.speculated import Speculated
from tests.support.emulated import EmulatedKernel, EmulatedKernels
from tests.support.grammars import Grammars, byte_tokenizer, lark
from tests.support.scripted_drafter import ScriptedDrafter
from treadle.core.messages import Sampling, Submit
from treadle.runner.model_runner import ModelRunner
from treadle.runner.sampling.sampling_kernel import sampling_kernel

KINDS = (Sampling(), Sampling(temperature=1.0, top_k=3, top_p=0.9, seed=5), Sampling())
TOLERANCE = 0.2
"""Of the spread of the logits: what bfloat16 makes of such models. MLX itself is twice as far off there."""


def requests(dice: random.Random, count: int) -> list[Submit]:
    """Of many lengths, some with a beginning in common, greedy and drawn."""
    trunk = tuple(dice.randrange(256) for _ in range(45))
    some = []
    for i in range(count):
        fresh = tuple(dice.randrange(256) for _ in range((1, 7, 30, 40)[i % 4]))
        prompt = trunk + fresh if i % 2 else fresh
        some.append(Submit(id=str(i), prompt=prompt, max_tokens=4, sampling=KINDS[i % 3], max_wait_s=1e9))
    return some


def check(module: Any, request: Submit, tokens: list[int]) -> None:
    """Each token is among the most likely ones after those before it, or as good as."""
    assert len(tokens) == request.max_tokens
    values = _values(module, request, tokens)
    best = np.sort(values, axis=-1)[:, -max(1, request.sampling.top_k)]
    picked = np.take_along_axis(values, np.array(tokens)[:, None], axis=-1)[:, 0]
    assert (best - picked <= TOLERANCE * values.std()).all()


@pytest.mark.parametrize(
    ("name", "bits", "kv_bits"),
    [("qwen3", 16, 16), ("llama", 4, 16), ("qwen3", 16, 8), ("glm4_moe_lite", 16, 16)],
    ids=["bf16", "int4", "kv8", "latents"],
)
def test_rows_that_come_and_go_pick_what_is_likely(name: str, bits: int, kv_bits: int) -> None:
    """Prompts in chunks beside rows that decode, and some reused: in pages, layers fused, drawn by the kernel."""
    dense = {"first_k_dense_replace": 2} if name == "glm4_moe_lite" else {}  # MLX has experts in float32 only here
    module = make(name, dtype=mx.bfloat16, hidden_size=512, intermediate_size=512, **dense)
    if bits < 16:
        nn.quantize(module, group_size=64, bits=bits)
    config = paged(module, bits=kv_bits, kernels=EmulatedKernels)
    assert config.fused
    model, exact = loaded(module, config), _exact(module)
    draws = sampling_kernel(model.vocabulary, mx.bfloat16, EmulatedKernel).kernel
    assert draws is not None
    loop = Looped(ModelRunner(replace(model, draws=draws)), max_running=4, prefill_tokens=64)
    some = requests(random.Random(bits + kv_bits), 4)
    found = loop.run(*some)
    later = [continued(some[3], f"{count} more", *range(count)) for count in (0, 6, 20)]  # each in another tile
    for request in later:
        found |= loop.run(request)
        assert loop.cached(request.id) >= 64
    for request in (*some, *later):
        check(exact, request, found[request.id])


ANSWER = lark('start: "k=1;" /[a-p]/ "-the-long-middle-" /[a-p]{2}/')


def test_rows_with_forced_tokens_pick_what_is_likely_behind_them() -> None:
    """Short runs in the decode kernel and long ones in the other, beside rows that decode."""
    module = make("llama", dtype=mx.bfloat16, hidden_size=512, intermediate_size=512)
    model, exact = loaded(module, paged(module, kernels=EmulatedKernels)), _exact(module)
    some = [
        Submit(id=f"{i}", prompt=tuple(range(i, 40 * i + 2)), max_tokens=40, constraint=ANSWER, max_wait_s=1e9)
        for i in range(2)
    ]
    free = Submit(id="free", prompt=(9, 8), max_tokens=7, max_wait_s=1e9)
    runner = ModelRunner(model, grammars=Grammars(byte_tokenizer(model.vocabulary)))
    loop = Looped(runner)
    loop.run(*some, free)
    check(exact, free, loop.tokens("free"))
    letters = np.arange(ord("a"), ord("q"))
    for request in some:
        tokens = loop.tokens(request.id)
        values = _values(exact, request, tokens)
        for place in (4, len(tokens) - 2, len(tokens) - 1):
            short = values[place, letters].max() - values[place, tokens[place]]
            assert short <= TOLERANCE * values[place].std()
    assert loop.scheduler.statistics(0.0, runner.statistics()).forced_tokens > 35


def test_rows_that_verify_drafts_pick_what_is_likely() -> None:
    """Many drafts in the prefill kernel, and fewer in the other, beside a row without."""
    module = make("llama", dtype=mx.bfloat16, hidden_size=512, intermediate_size=512)
    model, exact = loaded(module, paged(module, kernels=EmulatedKernels)), _exact(module)
    some = [Submit(id=f"{i}", prompt=tuple(range(i, 30 * i + 2)), max_tokens=11, speculate=i > 0) for i in range(3)]
    likely = {one.id: reference(replace(model, module=exact), one) for one in some}
    drafter = ScriptedDrafter({id_: [*tokens[:5], 0, *tokens[6:]] for id_, tokens in likely.items()})
    run = Speculated(ModelRunner(model, drafter=drafter), some, drafts=8)
    found = run.run()
    assert run.drafted > run.accepted > 0
    for request in some:
        check(exact, request, found[request.id])


def test_a_sparse_prompt_is_computed_at_its_positions() -> None:
    """With a window of positions, in chunks, and tokens that are decoded behind it."""
    module = make("gemma3", dtype=mx.bfloat16)
    model, exact = loaded(module, paged(module, kernels=EmulatedKernels)), _exact(module)
    dice = random.Random(5)
    tokens, positions = [dice.randrange(256) for _ in range(92)], sparse(dice, 90)
    rows = Driven(model.choice.config, module)
    rows.admit("a", tokens=tokens)
    whole = segment("a", tokens[:90], 0, positions=positions)
    pieces = whole.part(0, 57, wants=57), whole.part(57, 90, wants=33), segment("a", tokens[90:], 90, wants=2)
    found = [places(rows.compute([piece]))["a"] for piece in pieces]
    behind = np.arange(positions[-1] + 1, positions[-1] + 3, dtype=np.int32)
    wanted = logits_of(replace(model, module=exact), tokens, np.concatenate([positions, behind]))
    off = np.abs(np.concatenate(found) - wanted)
    plain = logits_of(replace(model, module=exact), tokens, np.arange(92, dtype=np.int32))
    assert off.max() < TOLERANCE * wanted.std() < np.abs(plain - wanted).max()


def _values(module: Any, request: Submit, tokens: list[int]) -> Any:
    """The logits that each of `tokens` was picked from."""
    logits = module(mx.array([[*request.prompt, *tokens[:-1]]]))[0, len(request.prompt) - 1 :]
    return np.array(logits.astype(mx.float32))


def _exact(module: Any) -> Any:
    """The same weights, computing in float32."""
    exact = dequantize_model(copy.deepcopy(module))
    exact.set_dtype(mx.float32)
    return exact


def continued(request: Submit, id_: str, *tokens: int) -> Submit:
    """Return the request again, with `tokens` behind its prompt."""
    return structs.replace(request, id=id_, prompt=(*request.prompt, *tokens))
