"""Loading of EAGLE-3 heads: what is read of a folder, what is refused, and what a runner makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.drafting.eagles import Eagle, make_target, with_eagle
from tests.runner.drafting.headed import OPTIONS
from tests.support.eagle_models import SIZE, TEXT, VOCABULARY, make_eagle, read_config, read_weights, write_weights
from treadle.core.messages import Pooling, Submit
from treadle.core.plan import Admit, PrefillChunk, StepPlan
from treadle.errors import ConfigError, ModelError
from treadle.runner.build import build
from treadle.runner.drafting.head import HeadDrafter
from treadle.runner.loading.draft import DraftModel
from treadle.runner.loading.eagle import load_eagle
from treadle.runner.loading.loader import load
from treadle.runner.loading.model import LoadedModel
from treadle.runner.mlxlm import NoHead, eagle_shape
from treadle.runner.model_runner import ModelRunner

TOKENS = (5, 200, 17, 17, 90, 3, 44)


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Eagle:
    folder = tmp_path_factory.mktemp("eagle")
    return Eagle.of(make_target(folder / "model", "llama"), make_eagle(folder / "head"))


def head(folder: Path, weights: Mapping[str, Any] | None = None, **changed: Any) -> Path:
    """Write a head with `changed` entries in its configuration, and other `weights`."""
    make_eagle(folder, **changed)
    write_weights(folder, {**read_weights(folder), **(weights or {})})
    return folder


def reason(model: LoadedModel, folder: Path) -> str:
    with pytest.raises(
        ModelError, match=r"`draft` \w+ is an EAGLE-3 head, and can't draft for \w+: .*, or leave it out$"
    ) as caught:
        with_eagle(model, folder)
    assert caught.value.param == "draft"
    return caught.value.message


def logits(model: LoadedModel) -> Any:
    """Logits of a head that gets no states."""
    caches = model.library.new_caches(model.module)
    return np.array(model.module(mx.array([TOKENS]), cache=caches)[0], np.float64)


def test_the_model_shares_its_memory_and_embedding_with_the_head(eagle: Eagle) -> None:
    target, own = eagle.model.target, read_weights(eagle.folder)
    nbytes = sum(value.nbytes for name, value in own.items() if name not in ("d2t", "t2d", "embed_tokens.weight"))
    assert eagle.model.head.weight_bytes == nbytes
    assert target.weight_bytes == eagle.plain.weight_bytes + nbytes
    assert target.kv_budget_bytes + eagle.model.head.kv_budget_bytes == OPTIONS["memory"]
    assert target.details["draft model"].startswith("head (EAGLE-3 head; ")
    assert target.details["draft model"].endswith("in front of layers 1, 2, 3)")
    assert "draft model" not in eagle.plain.details


def test_embeddings_that_were_trained_are_the_heads_own(eagle: Eagle, tmp_path: Path) -> None:
    own = {"embed_tokens.weight": eagle.plain.module.model.embed_tokens.weight}
    found = with_eagle(eagle.plain, head(tmp_path / "head", own, embed_requires_grad=True))
    assert found.head.weight_bytes == eagle.model.head.weight_bytes + VOCABULARY * SIZE * 4
    assert np.array_equal(logits(found.head), logits(eagle.model.head))
    bare = head(tmp_path / "bare", {"embed_tokens.weight": None}, embed_requires_grad=True)
    assert "its weights lack embed_tokens.weight" in reason(eagle.plain, bare)


def test_a_head_without_an_output_head_has_that_of_the_model(eagle: Eagle, tmp_path: Path) -> None:
    missing = {"d2t": None, "lm_head.weight": None}
    found = with_eagle(eagle.plain, head(tmp_path / "head", missing, draft_vocab_size=VOCABULARY))
    assert found.ids is None
    output = {"d2t": None, "lm_head.weight": eagle.plain.module.lm_head.weight}
    own = with_eagle(eagle.plain, head(tmp_path / "own", output, draft_vocab_size=VOCABULARY))
    assert np.array_equal(logits(found.head), logits(own.head))
    folder = make_eagle(tmp_path / "tied", layout="original", tie_word_embeddings=True, draft_vocab_size=VOCABULARY)
    write_weights(folder, {**read_weights(folder), **missing})
    tied = with_eagle(eagle.plain, folder)
    assert tied.head.module.args.tie_word_embeddings
    assert logits(tied.head).shape == (len(TOKENS), VOCABULARY)


def test_quantized_weights_and_scaled_positions_are_read(eagle: Eagle, tmp_path: Path) -> None:
    own, changed = read_weights(eagle.folder), dict[str, Any]()
    for part in ("fc", "layers.0.self_attn.q_proj", "lm_head"):
        quantized = mx.quantize(own[f"{part}.weight"], 64, 8)
        changed |= {f"{part}.{name}": one for name, one in zip(("weight", "scales", "biases"), quantized, strict=True)}
    folder = head(tmp_path / "head", changed, quantization={"group_size": 64, "bits": 8})
    found, wanted = logits(with_eagle(eagle.plain, folder).head), logits(eagle.model.head)
    assert 0 < np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()
    for scaling in ({"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, {"rope_theta": 100.0}):
        text = {**read_config(eagle.folder)["transformer_layer_config"], "rope_parameters": scaling}
        other = logits(with_eagle(eagle.plain, head(tmp_path / "scaled", transformer_layer_config=text)).head)
        assert np.abs(other - wanted).max() > 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("weights", "changed", "says"),
    [
        ({"fc.weight": None}, {}, "Missing 1 parameters: joint.fc.weight"),
        ({"norm.weight": mx.ones(9)}, {}, "Expected shape (256,) but received shape (9,)"),
        ({"layers.0.self_attn.q_norm.weight": mx.ones(64)}, {}, "not in model: model.layers.0.self_attn.q_norm.weight"),
        ({"lm_head.weight": None}, {}, "its weights lack lm_head.weight"),
        ({"d2t": None}, {}, "it drafts 100 of the model's tokens, and its weights lack d2t"),
        ({"d2t": mx.zeros(9)}, {}, "its d2t has shape (9,), and its output head is for 100 tokens"),
        ({"d2t": mx.full(100, 200)}, {}, "it drafts token 299, and the model has 264 tokens"),
        ({"d2t": mx.full(100, -1)}, {}, "it drafts token -1, and the model has 264 tokens"),
        ({}, {"target_hidden_size": 512}, "hidden states of 512 numbers, and the model's have 256"),
        ({}, {"target_hidden_size": 64, "eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3]}, "as wide as its own"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "layer 4, and the model has layers 0 to 3"),
        ({}, {"eagle_aux_hidden_state_layer_ids": None}, "layers 2, 2, 1, which are not all different"),
        ({}, {"eagle_aux_hidden_state_layer_ids": 2}, "its eagle_aux_hidden_state_layer_ids is no list of numbers"),
        ({}, {"target_hidden_size": "wide"}, "its target_hidden_size is no number"),
        ({}, {"fc_norm": True}, "its config.json has fc_norm, which is not known"),
        ({}, {"transformer_layer_config": {"hidden_size": 256}}, "its config.json has no vocab_size"),
        ({}, {"transformer_layer_config": {**TEXT, "num_attention_heads": 0}}, "has no num_attention_heads"),
        ({}, {"transformer_layer_config": {**TEXT, "vocab_size": 99}}, "for 99 tokens, and the model has 264"),
        ({}, {"transformer_layer_config": {**TEXT, "hidden_act": "gelu"}}, "its activation function is gelu"),
    ],
)
def test_heads_that_do_not_fit_are_refused_with_the_reason(
    eagle: Eagle, tmp_path: Path, weights: Mapping[str, Any], changed: dict[str, Any], says: str
) -> None:
    assert says in reason(eagle.plain, head(tmp_path / "head", weights, **changed))


def test_models_that_no_head_can_draft_for(eagle: Eagle) -> None:
    plain, model = eagle.plain, eagle.folder.parent / "model"
    assert "its KV backend, padded, can't verify" in reason(load(model, padded=True, **OPTIONS), eagle.folder)
    small = replace(plain, choice=plain.choice.with_memory(1000))
    with pytest.raises(ModelError, match="leave no memory for caches"):
        load_eagle(small, DraftModel(eagle.folder, is_head=True), {"max_running": 8})


def test_layers_are_those_of_each_layout() -> None:
    """Ids of SGLang name the layers behind which states are read."""
    assert eagle_shape(TEXT, 36).layers == (2, 18, 33)
    assert eagle_shape({**TEXT, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}, 36).layers == (
        2,
        18,
        33,
    )
    assert eagle_shape({**TEXT, "eagle_aux_hidden_state_layer_ids": [33, 2, 18]}, 36).layers == (2, 18, 33)
    with pytest.raises(NoHead, match="reads no states of layers in the middle"):
        eagle_shape({**TEXT, "eagle_config": {"use_aux_hidden_state": False}}, 36)


def test_a_model_whose_layers_give_no_states_is_refused(eagle: Eagle, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose layers take other arguments."""
    monkeypatch.setattr(
        "treadle.runner.loading.eagle.tap_layers",
        lambda module, selection, layers: setattr(selection, "layers", layers),
    )
    model = load(eagle.folder.parent / "model", **OPTIONS)
    assert "the model's passes give no states in front of layers" in reason(model, eagle.folder)
    assert model.choice.config.selection is not None
    assert model.choice.config.selection.layers == ()


def test_embeddings_are_those_of_the_model_beside_rows_that_a_head_reads(eagle: Eagle) -> None:
    vectors = []
    for runner in (
        ModelRunner(load(eagle.folder.parent / "model", **OPTIONS)),
        ModelRunner(eagle.model.target, drafter=HeadDrafter(eagle.model)),
    ):
        asked = [Submit("a", TOKENS, 0, pooling=Pooling.MEAN), Submit("b", TOKENS, 3)]
        admits = tuple(Admit(one, ()) for one in asked)
        chunks = tuple(PrefillChunk(one.id, 0, len(TOKENS)) for one in asked)
        result = runner.execute(StepPlan(1, admits, chunks, (), propose=True))
        (vector,) = result.vectors
        vectors.append(np.frombuffer(vector.data, np.float32))
    assert vectors[0].shape == (SIZE,)
    assert np.allclose(vectors[0], vectors[1], atol=1e-5)


@pytest.mark.parametrize(("speculate", "drafters"), [("auto", ("lookup", "eagle3")), ("draft", ("eagle3",))])
def test_a_runner_drafts_with_the_head(eagle: Eagle, speculate: str, drafters: tuple[str, ...]) -> None:
    draft = DraftModel(eagle.folder, "head", is_head=True)
    runner = build(eagle.folder.parent / "model", draft=draft, speculate=speculate, **OPTIONS)
    capabilities = runner.capabilities()
    runner.close()
    assert capabilities.steps.speculation.drafters == drafters
    assert "EAGLE-3 head" in capabilities.details["draft model"]


def test_a_head_for_whose_cache_there_is_no_memory_is_refused(eagle: Eagle) -> None:
    least = eagle.plain.choice.config.least_memory(8).nbytes
    with pytest.raises(ConfigError, match=r"head needs .* of cache for 8 sequences") as caught:
        build(
            eagle.folder.parent / "model",
            draft=DraftModel(eagle.folder, "head", is_head=True),
            max_running=8,
            memory=least,
        )
    assert caught.value.param == "draft"
