"""Models whose attention or positions mlx-lm computes in a way of their own, in the backends' own caches.

The choice of a backend holds its logits to mlx-lm's, in float32, for sequences in chunks and together.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.runner.family_paths import chosen
from tests.support.architectures import config_of
from treadle.runner.kv.contiguous.backend import ContiguousConfig
from treadle.runner.mlxlm import connect

CHANGED: dict[str, dict[str, Any]] = {
    "afm7": {},
    "gpt_bigcode": {},
    "iquestloopcoder": {},
    "plamo": {"num_attention_heads": 8, "hidden_size": 512, "n_shared_head": 4},
    "stablelm": {"qk_layernorm": True},
}
"""Fields that differ from those of the tests of all families."""


@pytest.mark.parametrize("architecture", CHANGED)
def test_it_is_served_from_sequences_own_buffers(architecture: str) -> None:
    model = chosen(config_of(architecture, **CHANGED[architecture]), "cpu")
    assert isinstance(model.choice.config, ContiguousConfig), model.choice.rejected


@pytest.mark.parametrize("architecture", ["gpt_bigcode", "stablelm"])
def test_mlx_lms_caches_are_served_as_before(architecture: str) -> None:
    from tests.support.architectures import new_module

    library, logits = connect(), []
    for routes in (False, True):
        module = new_module(config_of(architecture))
        if routes:
            library.route_attention(module)
        caches = library.new_caches(module)
        logits += [module(mx.array([[1, 2, 3]]), cache=caches), module(mx.array([[4]]), cache=caches)]
    assert all(mx.array_equal(*pair) for pair in zip(logits[:2], logits[2:], strict=True))


def test_attention_is_routed_once_and_positions_are_no_attention() -> None:
    from tests.support.architectures import new_module

    module = new_module(config_of("gpt_bigcode"))
    assert connect().route_attention(module)
    kinds = [type(one) for one in module.modules()]
    assert connect().route_attention(module)
    assert [type(one) for one in module.modules()] == kinds
