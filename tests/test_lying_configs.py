"""A config.json with one value that its weights do not have, in any architecture: the model is served where nothing
reads the value, or refused in one line with a typed error.

A seed makes each. `broken_configs.cases` makes as many as are wanted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.architectures import config_of, make_folder
from tests.support.broken_configs import broken, cases
from treadle.errors import ModelError, TreadleError
from treadle.models import folder_checks
from treadle.runner.loading.loader import load

CASES = 60
AGAIN = "download it again, or use another model"
Folder = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Make a folder of an architecture's tiny model, and write a changed config into it."""
    known: dict[str, Path] = {}

    def made(architecture: str, config: dict[str, Any]) -> Path:
        if architecture not in known:
            known[architecture] = make_folder(tmp_path_factory.mktemp("models") / "tiny", config_of(architecture))
            (known[architecture] / "tokenizer.json").write_text("{}")
        (known[architecture] / "config.json").write_text(json.dumps(config))
        return known[architecture]

    return made


def refusal(folder: Path) -> str:
    """Why the folder is refused; empty where it is served. What else is raised comes through."""
    try:
        folder_checks.check(folder)
        load(folder, memory=1 << 25, max_running=4)
    except TreadleError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    "case", list(cases(2, CASES)), ids=lambda case: f"{case[0]}-{'.'.join(case[1])}-{str(case[2])[:20]}"
)
def test_a_value_that_is_absurd_is_served_or_refused_in_one_line(folder: Folder, case: Any) -> None:
    architecture, place, value = case
    message = refusal(folder(architecture, broken(config_of(architecture), place, value)))
    assert "\n" not in message
    assert len(message) < 700


@pytest.mark.parametrize(
    ("architecture", "changed", "words"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, and must be 1 to 4 (num_experts is 4)"),
        ("qwen3_moe", {"num_experts": 5}, "(5, 256) (num_experts is 5), and the weights have (4, 256)"),
        ("llama", {"num_attention_heads": 3}, "num_attention_heads is 3, not a multiple of num_key_value_heads, 2"),
        ("qwen2", {"num_attention_heads": 6}, "hidden_size is 256, not a multiple of num_attention_heads, 6"),
        ("llama", {"head_dim": 32}, "q_proj.weight (128, 256) (num_attention_heads is 4 and head_dim is 32)"),
        ("llama", {"vocab_size": 7}, "embed_tokens.weight (7, 256) (vocab_size is 7), and the weights have (260, 256)"),
        ("llama", {"num_hidden_layers": 3}, "the config asks for 9 parameters that the weights lack, such as model."),
        ("llama", {"num_hidden_layers": 1}, "the config has no place for 9 parameters of the weights, such as model."),
        ("gemma3_text", {"sliding_window": 0}, "a sliding window must hold at least one token: sliding_window is 0"),
        ("gpt_oss", {"sliding_window": -1}, "a sliding window must hold at least one token: sliding_window is -1"),
        ("lfm2", {"layer_types": ["conv"]}, "layer_types has 1 entries, and num_hidden_layers is 3"),
        ("mixtral", {"num_local_experts": "x"}, 'num_local_experts is "x"'),
        ("gptj", {"n_head": 0}, "a number can't be zero (n_head is 0)"),
        ("jamba", {"mamba_d_conv": -1}, "its config.json is broken (mamba_d_conv is -1)"),
        ("jamba", {"num_experts_per_tok": 0.5}, "broken: num_experts_per_tok is 0.5, and must be a whole number"),
        ("jamba", {"mamba_dt_rank": "x"}, 'its config.json is broken (mamba_dt_rank is "x")'),
        ("jamba", {"num_experts": -1}, "feed_forward.switch_mlp.gate_proj.weight (num_experts is -1)"),
        ("nemotron_h", {"n_groups": -1}, "conv1d.weight (32, 4, 1) (n_groups is -1), and the weights have (128, 4, 1)"),
        ("nemotron_h", {"layer_norm_epsilon": 0}, "its config.json is broken (layer_norm_epsilon is 0)"),
        ("gemma4_text", {"final_logit_softcapping": 10**30}, "(final_logit_softcapping is 1000000000000000000000"),
        ("gemma4_text", {"global_head_dim": 0}, "(256, 256) (global_head_dim is 0), and the weights have (512, 256)"),
        ("llama", {"tie_word_embeddings": {"x": 1}}, 'its config.json is broken (tie_word_embeddings is {"x": 1})'),
        ("qwen3_moe", {"norm_topk_prob": "false"}, 'its config.json is broken (norm_topk_prob is "false")'),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "broken (rope_scaling.factor is missing)"),
        ("qwen3_moe", {"rope_scaling": {"type": "longrope"}}, "broken (rope_scaling.short_factor is missing)"),
        ("llama", {"rope_scaling": {"type": "x"}}, "asks for positions scaled as x, which mlx-lm does not have; "),
        ("deepseek_v3", {"n_group": 3}, "broken (n_routed_experts is 4, not a multiple of n_group, 3)"),
        ("mixtral", {"num_local_experts": 0}, "(0, 256) (num_local_experts is 0), and the weights have (4, 256)"),
        ("qwen3_next", {"linear_conv_kernel_dim": 2.0}, "broken (linear_conv_kernel_dim is 2.0)"),
        ("gpt_oss", {"sliding_window": 32.0}, "broken (sliding_window is 32.0)"),
        ("glm4", {"partial_rotary_factor": 1.5}, "broken (partial_rotary_factor is 1.5)"),
        ("exaone_moe", {"layer_types": ["x"] * 4}, 'layer_types[0] is "x", which is no known type of layers'),
        ("llama", {"quantization": {"bits": 7, "group_size": 64}}, "quantization: bits is 7"),
    ],
)
def test_a_lie_is_refused_with_field_value_and_cure(
    folder: Folder, architecture: str, changed: dict[str, Any], words: str
) -> None:
    config = config_of(architecture, **changed)
    if architecture == "qwen2":
        config = {name: value for name, value in config.items() if name not in ("head_dim", "num_key_value_heads")}
    message = refusal(folder(architecture, config))
    assert words in message
    assert message.endswith(AGAIN)


@pytest.mark.parametrize(
    ("architecture", "field", "words"),
    [
        ("jamba", "mamba_d_conv", "its config.json is broken (mamba_d_conv is missing)"),
        ("gemma4_text", "hidden_size", "(260, 1536) (hidden_size is missing, and 1536 by default), and the weights"),
        (
            "gemma4_text",
            "global_head_dim",
            "num_attention_heads is 4 and global_head_dim is missing, and 512 by default",
        ),
        ("gemma4_text", "num_hidden_layers", "(IndexError: list index out of range; num_hidden_layers is missing)"),
    ],
)
def test_a_missing_field_is_named(folder: Folder, architecture: str, field: str, words: str) -> None:
    """Also where mlx-lm has a default for it, that of another model."""
    config = {name: value for name, value in config_of(architecture).items() if name != field}
    message = refusal(folder(architecture, config))
    assert words in message
    assert message.endswith(AGAIN)


def test_a_number_that_is_not_finite_is_named(folder: Folder) -> None:
    config = config_of("gemma4_text", final_logit_softcapping=float("nan"))
    assert "numbers of its config.json (final_logit_softcapping is NaN)" in refusal(folder("gemma4_text", config))


def test_code_of_mlx_lm_that_ends_the_process_is_a_refusal(folder: Folder) -> None:
    """Its module of OLMo does, without a package of its own."""
    path = folder("llama", config_of("llama", model_type="olmo"))
    with pytest.raises(ModelError, match="needs a package that is not installed"):
        load(path)
