"""Embedding models: folders of sentence-transformers, decoders without a head, and bidirectional attention."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.looped import Looped
from tests.runner.test_pooling import pooled, vector
from tests.support.embedding_models import change_json, make_gemma_embedding, make_qwen3_embedding, write_json
from tests.support.tiny import make_tiny
from treadle.core.messages import Pooling, Submit
from treadle.core.plan import Admit, DecodeRow, StepPlan
from treadle.errors import ModelError
from treadle.runner.kv.encoder import layer as encoder_layer
from treadle.runner.loading.embeddings import embedding_of
from treadle.runner.loading.loader import load
from treadle.runner.model_runner import ModelRunner

DICE = np.random.default_rng(1)
PROMPTS = [tuple(int(token) for token in DICE.integers(0, 250, count)) for count in (3, 40, 120)]
BY_SENTENCE_TRANSFORMERS = {
    "qwen3": [-0.241651, -0.120618, -0.038785, 0.103011, -0.05438, 0.182358],
    "gemma": [0.02219, 0.199823, -0.013336, -0.064934, 0.001075, 0.153877],
}
"""The first numbers of the second prompt's vector, by sentence-transformers 6.2 with transformers 5.23 in float32."""
MAKERS: dict[str, Callable[[Path], Path]] = {"qwen3": make_qwen3_embedding, "gemma": make_gemma_embedding}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("embeddings")
    return {name: make(folder / name) for name, make in MAKERS.items()}


@pytest.mark.parametrize("kind", MAKERS)
def test_vectors_are_those_of_sentence_transformers(made: dict[str, Path], kind: str) -> None:
    """However their prompts are cut into chunks."""
    model = load(made[kind])
    (own,) = model.embedding.poolings
    for prefill in (16, 512):
        loop = Looped(ModelRunner(model), prefill_tokens=prefill)
        loop.run(*(pooled(prompt, own, f"{i}") for i, prompt in enumerate(PROMPTS)))
        found = vector(loop, "1")
        found = found / np.linalg.norm(found)
        assert np.abs(found[:6] - BY_SENTENCE_TRANSFORMERS[kind]).max() < 1e-5
        assert vector(loop, "2").shape == (model.embedding.dimensions,)


@pytest.mark.parametrize(("kind", "dimensions", "pooling"), [("qwen3", 64, Pooling.LAST), ("gemma", 48, Pooling.MEAN)])
def test_what_they_are_is_among_the_capabilities(
    made: dict[str, Path], kind: str, dimensions: int, pooling: Pooling
) -> None:
    runner = ModelRunner(load(made[kind]))
    runner.warm_up()
    can = runner.capabilities()
    assert (can.embedding.dimensions, can.embedding.poolings, can.embedding.only) == (dimensions, (pooling,), True)
    assert can.compute.backend == ("encoder" if kind == "gemma" else "contiguous")
    assert not can.compute.shortfalls()
    assert runner.forget_prefixes() == runner.free_blocks() * 0
    runner.close()


def test_a_bidirectional_model_generates_nothing(made: dict[str, Path]) -> None:
    runner = ModelRunner(load(made["gemma"]))
    request = Submit(id="text", prompt=(7,), max_tokens=3)
    plan = StepPlan(step=0, admit=(Admit(request=request),), decode=(DecodeRow(id="text", position=0),))
    (failure,) = runner.execute(plan).failures
    assert "generates no text" in failure.message


def test_a_token_sees_those_behind_it(made: dict[str, Path]) -> None:
    model = load(made["gemma"])
    loop = Looped(ModelRunner(model))
    states = {}
    for name, last in (("a", 5), ("b", 6)):
        with_keep = model.choice.config.selection
        assert with_keep is not None
        loop.run(pooled((*PROMPTS[0], last), Pooling.MEAN, name))
        states[name] = vector(loop, name)
    assert np.abs(states["a"] - states["b"]).max() > 0.01


def test_a_folder_without_dense_layers_and_a_head_that_is_tied(tmp_path: Path) -> None:
    model = load(make_gemma_embedding(tmp_path / "m", dense=0))
    assert model.embedding.dimensions == 64


def test_a_headless_decoder_without_modules_is_for_embeddings_alone(made: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(made["qwen3"], tmp_path / "m")
    (folder / "modules.json").unlink()
    embedding = load(folder).embedding
    assert (embedding.only, embedding.poolings) == (True, tuple(Pooling))


def damaged(folder: Path, change: Callable[[Path], object]) -> str:
    change(folder)
    with pytest.raises(ModelError) as error:
        load(folder)
    return str(error.value)


QWEN_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "torn": (lambda f: (f / "modules.json").write_text("["), "torn or not JSON"),
    "no list": (lambda f: write_json(f / "modules.json", {}), "list of modules"),
    "no pooling": (lambda f: write_json(f / "modules.json", []), "names no Pooling"),
    "unknown": (lambda f: write_json(f / "modules.json", [{"type": "a.LSTM"}]), "a module LSTM"),
    "outside": (lambda f: write_json(f / "modules.json", [{"type": "Pooling", "path": "../x"}]), "outside the folder"),
    "first dense": (
        lambda f: write_json(f / "modules.json", [{"type": "Dense", "path": "d"}]),
        "d/config.json is missing",
    ),
    "pooling gone": (lambda f: shutil.rmtree(f / "1_Pooling"), "is missing, though modules.json names it"),
    "no object": (lambda f: write_json(f / "1_Pooling" / "config.json", []), "must hold a JSON object"),
    "max": (lambda f: write_json(f / "1_Pooling" / "config.json", {"pooling_mode_max_tokens": True}), "max_tokens"),
    "two": (lambda f: write_json(f / "1_Pooling" / "config.json", {"pooling_mode": ["mean", "cls"]}), "mean, cls"),
    "none": (lambda f: write_json(f / "1_Pooling" / "config.json", {}), "pools by nothing"),
    "prompts": (lambda f: change_json(f / "1_Pooling" / "config.json", include_prompt=False), "leaves prompts out"),
    "not causal": (lambda f: change_json(f / "config.json", is_causal=False), "known for gemma3_text only"),
}
GEMMA_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no modules": (lambda f: (f / "modules.json").unlink(), "has no modules.json"),
    "dense gone": (lambda f: (f / "2_Dense" / "model.safetensors").unlink(), "has no model.safetensors"),
    "dense torn": (lambda f: (f / "2_Dense" / "model.safetensors").write_bytes(b"x" * 20), "can't be read"),
    "dense of another size": (lambda f: change_json(f / "2_Dense" / "config.json", in_features=9), "does not hold"),
    "dense with a bias": (lambda f: change_json(f / "2_Dense" / "config.json", bias=True), "does not hold"),
    "activation": (lambda f: change_json(f / "3_Dense" / "config.json", activation_function="a.Swoosh"), "'Swoosh'"),
    "dense twice": (
        lambda f: shutil.copytree(f / "2_Dense", f / "3_Dense", dirs_exist_ok=True),
        "takes 64 numbers and gets 96",
    ),
    "layers": (lambda f: change_json(f / "config.json", layer_types=["full_attention"] * 4), "layer_types"),
    "pattern": (lambda f: change_json(f / "config.json", _sliding_window_pattern=6), "_sliding_window_pattern"),
    "positions": (
        lambda f: change_json(f / "config.json", rope_parameters={"full_attention": {"rope_theta": 5.0}}),
        "rope_parameters",
    ),
}


@pytest.mark.parametrize("fault", QWEN_FAULTS)
def test_a_folder_that_can_not_be_followed_is_refused(made: dict[str, Path], tmp_path: Path, fault: str) -> None:
    change, message = QWEN_FAULTS[fault]
    assert message in damaged(shutil.copytree(made["qwen3"], tmp_path / "m"), change)


@pytest.mark.parametrize("fault", GEMMA_FAULTS)
def test_an_encoder_that_is_not_known_is_refused(made: dict[str, Path], tmp_path: Path, fault: str) -> None:
    change, message = GEMMA_FAULTS[fault]
    assert message in damaged(shutil.copytree(made["gemma"], tmp_path / "m"), change)


def test_newer_names_of_the_pooling_and_matching_parts_are_read(made: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(made["gemma"], tmp_path / "m")
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    kinds = ["sliding_attention", "full_attention"] * 2
    rope = {"full_attention": {"rope_theta": 10000.0}, "sliding_attention": {"rope_type": "default"}}
    change_json(folder / "config.json", layer_types=kinds, rope_parameters=rope)
    assert load(folder).embedding.poolings == (Pooling.MEAN,)


def test_a_dense_layer_may_have_a_bias_and_an_activation(made: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(made["gemma"], tmp_path / "m")
    inner = folder / "3_Dense"
    weights: Any = mx.load(str(inner / "model.safetensors"))
    biased = {"linear.weight": weights["linear.weight"], "linear.bias": mx.ones(48)}
    mx.save_safetensors(str(inner / "model.safetensors"), biased)
    change_json(inner / "config.json", bias=True, activation_function="torch.nn.modules.activation.Tanh")
    loops = [Looped(ModelRunner(load(place))) for place in (folder, made["gemma"])]
    for loop in loops:
        loop.run(pooled(PROMPTS[1], Pooling.MEAN))
    one, other = (vector(loop, "pooled") for loop in loops)
    assert np.abs(one - np.tanh(other + 1.0)).max() < 1e-5


@pytest.mark.parametrize("fault", ["window", "raises"])
def test_an_encoder_that_computes_something_else_is_found_out(
    made: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def causal(count: int, window: int) -> Any:
        if fault == "raises":
            raise ValueError("no mask")
        return mx.tril(mx.ones((count, count), mx.bool_))

    monkeypatch.setattr(encoder_layer, "near", causal)
    with pytest.raises(ModelError, match=r"can't be served: (its hidden states|prompts in one pass failed)"):
        load(made["gemma"])


def test_a_model_whose_hidden_states_are_not_known(made: dict[str, Path], tmp_path: Path) -> None:
    """One that generates text does that alone; one for embeddings is refused."""
    model = load(make_tiny(tmp_path / "m"))
    args: Any = (model.library, model.module, None)
    plain = embedding_of(tmp_path / "m", *args, headless=False, bidirectional=False)
    assert "output head is not known" in plain.unavailable
    with pytest.raises(ModelError, match="for embeddings alone, and gives none"):
        embedding_of(made["qwen3"], *args, headless=True, bidirectional=False)
