"""The hooks into mlx-lm's recurrent layers: which states they find, and that others are served as before."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.runner.recurrent.families import RECURRENT, new_model
from tests.runner.recurrent.test_families import alone, prompts
from tests.support.architectures import config_of, new_module
from treadle.runner.mlxlm import RecurrentState, connect, defer_norms, recurrent
from treadle.runner.recurrent.layer import ConvolutionSlots, RecurrentLayer
from treadle.runner.recurrent.operations import RecurrentOperations
from treadle.runner.recurrent.step import RecurrentPass

_SMALL = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 10000.0, "rms_norm_eps": 1e-5}


def made(family: str, config: dict[str, Any]) -> Any:
    connect()
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes({"model_type": family, **config})
    return model_class(arguments.from_dict({"model_type": family, **config}))


@pytest.mark.parametrize("family", RECURRENT)
def test_a_routed_model_serves_mlx_lms_own_caches_as_before(family: str) -> None:
    tokens = prompts()["a"][:20]
    plain, routed = new_model(family), new_model(family)
    library = connect()
    library.recurrent_states(routed)
    assert mx.array_equal(alone(routed, tokens), alone(plain, tokens))
    found = {}
    for name, model in {"plain": plain, "routed": routed}.items():
        caches = library.new_caches(model)
        found[name] = [model(mx.array([tokens[i : i + 1]]), cache=caches) for i in range(3)]
    assert all(mx.array_equal(*pair) for pair in zip(found["plain"], found["routed"], strict=True))


def test_states_have_their_shapes_and_their_convolutions() -> None:
    model = new_model("olmo_hybrid")
    first, *_, last = connect().recurrent_states(model)
    assert last is None
    assert first is not None
    assert [state.shape for state in first] == [(3, 64), (3, 64), (3, 128), (4, 32, 32)]
    assert [state.nbytes for state in first] == [768, 768, 1536, 16384]
    mixer = model.layers[0].linear_attn
    assert [state.convolution for state in first] == [mixer.q_conv1d, mixer.k_conv1d, mixer.v_conv1d, None]


def test_caches_in_a_list_are_found_one_by_one() -> None:
    states = connect().recurrent_states(new_model("falcon_h1"))
    assert [state is None for state in states] == [False, True] * 2


def test_states_that_are_not_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "_OWN", {})
    with pytest.raises(NotImplementedError, match="known"):
        connect().recurrent_states(new_module(config_of("rwkv7")))


def test_a_convolution_without_a_state_is_refused() -> None:
    model = new_model("lfm2")
    model.layers[-1].more = type(model.layers[-1].conv.conv)(8, 8, 3, groups=8)
    with pytest.raises(NotImplementedError, match="convolution"):
        connect().recurrent_states(model)


def test_a_model_of_attention_alone_has_no_states() -> None:
    config = {**_SMALL, **_HEADS, "tie_word_embeddings": False}
    assert connect().recurrent_states(made("llama", config)) == [None] * 3


def test_norms_that_were_left_are_computed_where_a_state_is_an_array() -> None:
    """A pass that broke off behind the norm of a layer leaves the next one a deferral."""
    tokens = prompts()["a"][:9]
    plain, model = new_model("qwen3_5"), new_model("qwen3_5")
    connect().recurrent_states(model)
    defer_norms()
    assert mx.array_equal(alone(model, tokens), alone(plain, tokens))


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "bailing_moe_linear"])
def test_a_mask_is_refused(family: str) -> None:
    model, step = new_model(family), RecurrentPass()
    (states, *_) = connect().recurrent_states(model)
    assert states is not None
    layer = RecurrentLayer(states, 2, RecurrentOperations(), step)
    module = __import__(type(model.layers[0]).__module__, fromlist=["*"])
    state, x = layer[len(states) - 1], mx.zeros((1, 1, 4, 4))
    calls = {
        "qwen3_5": lambda: module.gated_delta_update(x, x, x, x, x, x, x, state, x),
        "nemotron_h": lambda: module.ssm_update(x, x, x, x, x, x, x, state, (0, 1), x),
        "bailing_moe_linear": lambda: module.recurrent_gla(x, x, x, x, 1.0, h=state, mask=x),
    }
    with pytest.raises(NotImplementedError, match="mask"):
        calls[family]()


def test_a_state_knows_no_convolution_of_another_layer() -> None:
    with pytest.raises(AssertionError, match="convolution"):
        ConvolutionSlots(RecurrentState((3, 8), mx.float32), 2, RecurrentOperations(), RecurrentPass())
