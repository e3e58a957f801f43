"""Models whose attention has sinks, capped scores, latents, or keys and values that differ, in pages."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.runner.drive import Drive, seeded_choices
from tests.runner.paged.models import loaded, make, paged
from tests.runner.reference import references
from tests.runner.test_fidelity import requests
from treadle.runner.kv.paged.kernels import AttentionShape
from treadle.runner.loading.attention_shape import attention_shapes, latent_layers
from treadle.runner.loading.routed_layers import routed_layers
from treadle.runner.mlxlm import connect
from treadle.runner.model_runner import ModelRunner

SHAPES = {
    "gpt_oss": AttentionShape(2, 4, 64, mx.float32, 64, sinks=True),
    "gemma2": AttentionShape(2, 4, 64, mx.float32, 64, softcap=2.0),
    "glm4_moe_lite": AttentionShape(1, 4, 160, mx.float32, 128, latent=True),
    "deepseek_v2": AttentionShape(4, 4, 48, mx.float32, 32),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_models_attention_is_recorded(name: str) -> None:
    module = make(name)
    library = connect()
    routed = routed_layers(library, module)
    assert attention_shapes(library, module, routed.layout) == [SHAPES[name]] * len(routed.windows)
    assert latent_layers(library, module, routed.layout) == [SHAPES[name].latent] * len(routed.windows)


@pytest.mark.parametrize("name", SHAPES)
def test_any_schedule_gives_what_mlx_lm_gives(name: str) -> None:
    """In chunks of any size, with tiles that are split, beyond windows."""
    module = make(name)
    model = loaded(module, paged(module))
    some = requests(2, count=6)
    together = Drive(ModelRunner(model), some).run(seeded_choices(2))
    assert together == references(model, some, together)
