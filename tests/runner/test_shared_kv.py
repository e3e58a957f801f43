"""Layers that attend to an earlier layer's keys and values, in the backends that compute attention themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from tests.support.cuda import ReferenceKernels
from treadle.runner.kv.backend import Unsupported
from treadle.runner.kv.cost import KvCost
from treadle.runner.loading import candidates
from treadle.runner.loading.backend_choice import BackendRequest
from treadle.runner.loading.reference import Reference
from treadle.runner.mlxlm import FETCHED, connect

_COMMON: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 261,
}
_GEMMA3N = {
    **_COMMON,
    "intermediate_size": [128] * 6,
    "altup_num_inputs": 4,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.0] * 6,
    "query_pre_attn_scalar": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma4_text": {**_COMMON, "model_type": "gemma4_text", "global_head_dim": 128, "sliding_window_pattern": 2},
    "gemma3n": {"model_type": "gemma3n", "text_config": {**_GEMMA3N, "model_type": "gemma3n"}},
}


@pytest.fixture(scope="module", params=CONFIGS)
def reference(request: pytest.FixtureRequest) -> Reference:
    """A random model, with weights larger than usual, and its logits by mlx-lm."""
    library = connect()
    from mlx.utils import tree_map
    from mlx_lm.utils import _get_classes

    mx.random.seed(0)
    model_class, arguments = _get_classes(CONFIGS[request.param])
    module = model_class(arguments.from_dict(CONFIGS[request.param]))
    module.update(tree_map(lambda weight: weight * 3 if weight.ndim == 2 else weight, module.parameters()))
    mx.eval(module.parameters())
    return Reference(library, module, 2048)


def test_buffers_of_sequences_hold_each_pair_once(reference: Reference) -> None:
    request = BackendRequest("cpu", None, 4, keep_prefixes=False)
    config = candidates.contiguous(reference, KvCost(1, 0), 0, request, [])
    assert config.windows == [32, 0, 32, 0]
    assert reference.tested_tokens > 32


def test_pages_hold_each_pair_once(reference: Reference) -> None:
    """Gemma 4's layers that see all tokens also have larger heads."""
    config = candidates.paged(reference, 1 << 26, [], keep_prefixes=True, kernels=ReferenceKernels)
    assert [layer.window for layer in config.layers] == [32, 0, 32, 0]
    larger = 128 if "gemma4" in type(reference.module).__module__ else 64
    assert [layer.kernels.dim for layer in config.layers] == [64, larger, 64, larger]


def test_nothing_of_a_pass_is_kept(reference: Reference) -> None:
    candidates.paged(reference, 1 << 26, [], keep_prefixes=True, kernels=ReferenceKernels)
    assert FETCHED.cache_of(mx.zeros(1)) is None
    assert not FETCHED._pairs
    assert not FETCHED._caches


def test_a_model_whose_shared_pairs_are_lost_is_refused(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers would attend to the tokens of the batch alone."""
    others = mx.zeros((1, 2, 1, 64))

    def put(cache: Any, keys: Any, values: Any) -> tuple[Any, Any]:
        return keys, values

    def of(cache: Any) -> Sequence[Any]:
        return others, others

    monkeypatch.setattr(FETCHED, "put", put)
    monkeypatch.setattr(FETCHED, "of", of)
    with pytest.raises(Unsupported):
        candidates.paged(reference, 1 << 26, [], keep_prefixes=True, kernels=ReferenceKernels)
