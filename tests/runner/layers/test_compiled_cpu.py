"""Compiled blocks on the CPU: what they compute, and which calls stay the block's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from tests.runner.layers.models import installed_on_cpu
from tests.runner.recurrent.families import RECURRENT, new_model
from tests.runner.recurrent.harness import Harness
from tests.runner.recurrent.test_families import alone, close, prompts
from tests.support.architectures import config_of, new_module
from treadle.runner.layers.choose import FasterLayers
from treadle.runner.layers.compiled_cpu import MOST_TOKENS, CompiledBlock, CompiledBlocks
from treadle.runner.recurrent.layer import RecurrentLayer
from treadle.runner.recurrent.operations import RecurrentOperations

OTHERS = {"bailing_hybrid", "bailing_moe_linear", "recurrent_gemma"}
"""Families whose recurrent layers are not compiled: without a convolution, with more arguments, or with a recurrence
that asks which sequences begin."""


class Mixture(nn.Module):
    def __init__(self, columns: int = 32, experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(columns, experts, bias=False)
        self.experts = SwitchGLU(columns, 16, experts)
        self.calls = 0

    def __call__(self, x: Any) -> Any:
        scores = mx.softmax(self.gate(x), axis=-1)
        chosen = mx.argpartition(scores, kth=-2, axis=-1)[..., -2:]
        return (self.experts(x, chosen) * mx.take_along_axis(scores, chosen, axis=-1)[..., None]).sum(axis=-2)


def tokens(count: int, columns: int = 32, seed: int = 0) -> Any:
    return mx.random.normal((count, 1, columns), key=mx.random.key(100 * seed + count))


class Counted:
    """A call that is counted each time Python runs it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.count = 0
        self._call = call

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.count += 1
        return self._call(*args, **named)


def doubled(x: Any, mask: Any = None, more: Any = None) -> Any:
    return x * 2 if more is None else x * more


@pytest.mark.parametrize("count", [1, 3, MOST_TOKENS])
def test_a_number_of_tokens_is_compiled_when_it_comes_again(count: int) -> None:
    own = Counted(doubled)
    block = CompiledBlock(own)
    for seed in range(5):
        x = tokens(count, seed=seed)
        assert mx.array_equal(block(x), x * 2)
        assert mx.array_equal(block(x, mask=None), x * 2)
    assert own.count == 4  # for each form of the call its own one, and one to compile


def test_other_calls_are_the_blocks_own() -> None:
    own = Counted(doubled)
    block = CompiledBlock(own)
    single, several, many = tokens(2), mx.ones((2, 5, 32)), tokens(MOST_TOKENS + 1)
    for _ in range(3):
        for x in (several, many):
            assert mx.array_equal(block(x), x * 2)
        assert mx.array_equal(block(single, None, single), single * single)
        assert mx.array_equal(block(single, more=3.0), single * 3)
    assert own.count == 12


def test_a_block_that_reads_numbers_is_not_compiled() -> None:
    own = Counted(lambda x: x * x.sum().item())
    block, x = CompiledBlock(own), tokens(2)
    for _ in range(4):
        assert mx.allclose(block(x), x * x.sum())
    assert own.count == 5


def test_mixtures_of_experts_are_compiled() -> None:
    """Those of many tokens read their experts, and are not."""
    mixture = Mixture()
    plain = {count: mixture(tokens(count)) for count in (1, 4, MOST_TOKENS, 64)}
    faster = installed_on_cpu(mixture, count=3)
    assert faster.labels["compiled mixtures of experts"] == 1
    for _ in range(3):
        for count, wanted in plain.items():
            assert mx.allclose(mixture(tokens(count)), wanted, atol=1e-5)
    faster.remove()
    assert mx.array_equal(mixture(tokens(4)), plain[4])


class Gated(nn.Module):
    def __init__(self, columns: int = 32) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(columns, 48, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(48, columns, bias=False)

    def __call__(self, x: Any) -> Any:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


def test_feed_forward_blocks_are_compiled() -> None:
    block = Gated()
    plain = {count: block(tokens(count)) for count in (1, 4, 40)}
    layers = installed_on_cpu(block, count=4)
    assert layers.labels["compiled feed-forward blocks"] == 1
    for _ in range(3):
        for count, wanted in plain.items():
            assert mx.allclose(block(tokens(count)), wanted, atol=1e-5)


def test_layers_beside_others_are_no_block_of_their_own() -> None:
    block = Gated()
    block.norm = nn.RMSNorm(32)
    assert not [label for label in installed_on_cpu(block, count=4).labels if label.startswith("compiled")]


SINGLES: tuple[tuple[str, int], ...] = tuple((names, 1) for names in ("abc", "abcd", "cdba", "abcd", "bd", "abc", "db"))


def test_blocks_with_states_in_one_cache_are_not_compiled() -> None:
    """RWKV's channel mixing wrote the time mixing's states, too, as they were before the step."""
    model = new_module(config_of("rwkv7"))
    Harness(model, RecurrentOperations(cpu=True))
    blocks = CompiledBlocks(model)
    assert not any(blocks.maker_of(part) for layer in model.layers for part in layer.children().values())


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_layers_are_compiled_for_single_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences begin, join and leave in between."""
    written: list[Any] = []
    own = RecurrentLayer.write_singles
    monkeypatch.setattr(RecurrentLayer, "write_singles", lambda *args: written.append(args) or own(*args))
    model, plain, of = new_model(family), new_model(family), prompts()
    harness, seen = Harness(model, RecurrentOperations(cpu=True)), dict.fromkeys(of, 0)
    layers = FasterLayers(model, "cpu")
    layers.install()
    for names, count in (("abc", 1), ("ad", 7), *SINGLES):
        found = harness.run({name: of[name][seen[name] : seen[name] + count] for name in names})
        for name in names:
            seen[name] += count
            close(found[name], alone(plain, of[name][: seen[name]]), f"{names}, sequence {name}")
    assert bool(written) is (family not in OTHERS)
