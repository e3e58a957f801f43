"""Loading of MTP heads: what is read of a folder, what is refused, and what a runner makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.conftest import Tiny
from tests.runner.drafting.headed import OPTIONS, Headed, maker
from tests.support.mtp_models import head_prefix, head_tensors, make_headed, tensors, text_config, write_tensors
from tests.support.mtp_reference import HeadReference
from treadle.errors import ConfigError
from treadle.runner.build import build
from treadle.runner.loading.config_oddities import read_config
from treadle.runner.loading.loader import load
from treadle.runner.loading.model import LoadedModel
from treadle.runner.loading.mtp import load_head, may_have_head
from treadle.runner.mlxlm import NoHead, connect, finish_head

TOKENS = (5, 200, 17, 17, 90, 3, 44)
Get = Callable[[str], Headed]


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Get:
    return maker(tmp_path_factory.mktemp("headed"))


def logits(model: LoadedModel) -> Any:
    """Logits of a head that gets no states."""
    caches = model.library.new_caches(model.module)
    return np.array(model.module(mx.array([TOKENS]), cache=caches)[0], np.float64)


def reason(model: LoadedModel, folder: Path) -> str:
    with pytest.raises(NoHead) as caught:
        load_head(model, folder, OPTIONS)
    return str(caught.value)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_head_of_deepseek_is_layer_61(tmp_path: Path, is_fp8: bool) -> None:
    """Also in 8 bits with a scale for each block of 128 x 128, as it is published. Without the loader's tests: a pass
    of so many layers takes long."""
    folder, library = make_headed(tmp_path, "deepseek_v3"), connect()
    own = head_tensors("deepseek_v3")
    for name in ("mlp.experts.1.up_proj", "self_attn.kv_b_proj") if is_fp8 else ():
        rounded = mx.to_fp8(own[f"{name}.weight"] / 2)
        own[f"{name}.weight"] = mx.from_fp8(rounded, mx.float32) * 2
        scales = mx.full((-(-rounded.shape[0] // 128), -(-rounded.shape[1] // 128)), 2.0)
        prefix = head_prefix("deepseek_v3") + name
        write_tensors(folder, {f"{prefix}.weight": rounded, f"{prefix}.weight_scale_inv": scales})
    target, config = library.load(folder)
    head = finish_head(library.load_head(folder, target, config), target)
    assert head.scale is head.own_scale is None
    assert len(head.module.layers) == 1
    embedding, output = (np.array(one.weight) for one in (target.model.embed_tokens, target.lm_head))
    reference = HeadReference("deepseek_v3", own, text_config("deepseek_v3"), embedding, output)
    states = np.random.default_rng(1).standard_normal((6, 256))
    selection = library.selection(head.module)
    assert selection is not None
    selection.fed = mx.array(states.astype(np.float32))
    found = np.array(head.module(mx.array([TOKENS[1:]]), cache=library.new_caches(head.module))[0])
    wanted = reference.logits(states, TOKENS)
    assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()


def test_the_model_shares_its_memory_with_the_head(headed: Get) -> None:
    one = headed("qwen3_5")
    target, head = one.model.target, one.model.head
    own = sum(value.nbytes for value in head_tensors("qwen3_5").values())
    assert head.weight_bytes == own
    assert target.weight_bytes == one.plain.weight_bytes + own
    assert target.kv_budget_bytes + head.kv_budget_bytes == OPTIONS["memory"]
    assert not head.choice.config.keep_prefixes
    assert target.details["MTP head"].endswith("contiguous KV backend")
    assert "MTP head" not in one.plain.details


def test_a_checkpoint_that_was_changed_before_gives_the_same_head(headed: Get, tmp_path: Path) -> None:
    """As mlx-lm saves a model, with the head's tensors changed alike: norms and convolutions are not changed twice."""
    one = headed("qwen3_5")
    folder = make_headed(tmp_path, "qwen3_5")
    changed = {name: value.moveaxis(2, 1) for name, value in tensors(folder).items() if "conv1d" in name}
    for name, value in tensors(folder).items():
        if "norm" in name and value.ndim == 1 and "linear_attn" not in name:
            changed[name] = value + 1
    write_tensors(folder, changed)
    found = load_head(load(folder, **OPTIONS), folder, OPTIONS)
    assert np.array_equal(logits(found.head), logits(one.model.head))


def test_quantized_tensors_of_a_head_are_read(headed: Get, tmp_path: Path) -> None:
    """Beside a model that is not quantized, or with other entries for its own layers."""
    folder, prefix = make_headed(tmp_path, "mimo"), head_prefix("mimo")
    changed: dict[str, Any] = {}
    for part in ("input_proj", "mlp.up_proj", "self_attn.q_proj"):
        weight = mx.quantize(tensors(folder)[f"{prefix}{part}.weight"], 64, 8)
        names = ("weight", "scales", "biases")
        changed |= {f"{prefix}{part}.{name}": value for name, value in zip(names, weight, strict=True)}
    write_tensors(folder, changed)
    entries = {"group_size": 64, "bits": 4, "model.layers.0.mlp.gate_proj": {"group_size": 32, "bits": 4}}
    config = {**read_config(folder), "quantization": {"group_size": 64, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    model = load(folder, **OPTIONS)
    (folder / "config.json").write_text(json.dumps({**config, "quantization": entries}))
    found, own = logits(load_head(model, folder, OPTIONS).head), logits(headed("mimo").model.head)
    assert 0 < np.abs(found - own).max() < 0.1 * np.abs(own).max()


def test_weights_that_do_not_fit_are_a_reason(headed: Get, tmp_path: Path) -> None:
    model, prefix = headed("glm4_moe").plain, head_prefix("glm4_moe")
    folder = make_headed(tmp_path, "glm4_moe")
    whole = tensors(folder)
    write_tensors(folder, {f"{prefix}enorm.weight": None})
    assert "Missing 1 parameters: joint.token_norm.weight" in reason(model, folder)
    write_tensors(folder, {f"{prefix}enorm.weight": mx.ones(9)})
    assert "Expected shape (256,) but received shape (9,)" in reason(model, folder)
    write_tensors(folder, {**whole, f"{prefix}self_attn.extra.weight": mx.ones(9)})
    assert "not in model: model.layers.0.self_attn.extra.weight" in reason(model, folder)
    write_tensors(folder, {f"{prefix}shared_head.norm.weight": None})
    assert reason(model, folder) == "its MTP weights lack their last norm"
    write_tensors(folder, dict.fromkeys(name for name in tensors(folder) if name.startswith(prefix)))
    assert reason(model, folder) == "its folder holds no MTP weights"


def test_copies_of_what_is_shared_and_further_heads_are_not_read(headed: Get, tmp_path: Path) -> None:
    folder, prefix = make_headed(tmp_path, "glm4_moe"), head_prefix("glm4_moe")
    copies = dict.fromkeys((f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"), mx.ones((260, 256)))
    write_tensors(folder, {**copies, "model.layers.3.enorm.weight": mx.ones(9)})
    model = headed("glm4_moe").plain
    assert np.array_equal(logits(load_head(model, folder, OPTIONS).head), logits(headed("glm4_moe").model.head))


def test_a_last_norm_with_zeros_hides_the_states_in_front_of_it(headed: Get, tmp_path: Path) -> None:
    folder = make_headed(tmp_path, "mimo")
    write_tensors(folder, {"model.norm.weight": mx.zeros(256)})
    assert "some of whose weights are zero" in reason(load(folder, **OPTIONS), folder)


def test_models_beside_which_no_head_can_be_used(headed: Get, tiny: Tiny) -> None:
    plain = headed("mimo").plain
    assert may_have_head(plain)
    assert not may_have_head(tiny("llama"))
    assert reason(tiny("llama"), headed("mimo").folder) == "MTP weights of its architecture are not known"
    padded = load(headed("mimo").folder, padded=True, **OPTIONS)
    assert reason(padded, headed("mimo").folder) == "its KV backend, padded, can't verify draft tokens"
    only = replace(plain, embedding=replace(plain.embedding, only=True))
    assert reason(only, headed("mimo").folder) == "it generates no text"
    silent = replace(plain, embedding=replace(plain.embedding, unavailable="no norm"))
    assert reason(silent, headed("mimo").folder) == "its hidden states are not known"
    small = replace(plain, choice=plain.choice.with_memory(1000))
    with pytest.raises(NoHead, match="leave no memory for caches"):
        load_head(small, headed("mimo").folder, {"max_running": 8})


def test_a_runner_uses_the_head_it_finds(headed: Get) -> None:
    drafters = {}
    for speculate in ("auto", "mtp", "lookup"):
        runner = build(headed("mimo").folder, speculate=speculate, **OPTIONS)
        capabilities = runner.capabilities()
        drafters[speculate] = capabilities.steps.speculation.drafters
        assert ("MTP head" in capabilities.details) == (speculate != "lookup")
        runner.close()
    assert drafters == {"auto": ("lookup", "mtp"), "mtp": ("mtp",), "lookup": ("lookup",)}


def test_a_head_for_whose_cache_there_is_no_memory_is_left_out(headed: Get) -> None:
    least = headed("mimo").plain.choice.config.least_memory(8).nbytes
    runner = build(headed("mimo").folder, max_running=8, memory=least)
    details = runner.capabilities().details
    runner.close()
    assert details["MTP head"].startswith("none: mimo needs ")
    with pytest.raises(ConfigError, match="no MTP head that can be used: mimo needs"):
        build(headed("mimo").folder, speculate="mtp", max_running=8, memory=least)


def test_a_model_without_a_head_is_refused_where_one_is_demanded(tmp_path: Path) -> None:
    folder = make_headed(tmp_path, "mimo")
    write_tensors(folder, dict.fromkeys(name for name in tensors(folder) if name.startswith(head_prefix("mimo"))))
    with pytest.raises(
        ConfigError, match="no MTP head that can be used: its folder holds no MTP weights; use"
    ) as caught:
        build(folder, speculate="mtp", **OPTIONS)
    assert caught.value.param == "speculate"
    runner = build(folder, speculate="auto", **OPTIONS)
    assert runner.capabilities().details["MTP head"] == "none: its folder holds no MTP weights"
    assert runner.capabilities().steps.speculation.drafters == ("lookup",)
    runner.close()
