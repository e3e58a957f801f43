"""Values of a config.json that no model can have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import make_tiny
from treadle.runner.loading.config_oddities import doubtful, mistyped, no_flags, oddities


def odd(folder: Path, **values: Any) -> list[str]:
    path = make_tiny(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return oddities(folder)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648"),
        ({"head_dim": True}, "head_dim is true"),
        ({"rope_theta": float("nan")}, "rope_theta is NaN"),
        ({"rms_norm_eps": "x" * 100}, 'rms_norm_eps is "' + "x" * 36 + "..."),
        ({"quantization": 4}, "quantization is 4"),
        ({"rope_scaling": {"factor": 0}}, "rope_scaling.factor is 0"),
        ({"rope_scaling": {"beta_fast": "x"}}, 'rope_scaling.beta_fast is "x"'),
        ({"rope_scaling": {"attention_factor": 0}}, "rope_scaling.attention_factor is 0"),
        (
            {"rope_parameters": {"full_attention": {"original_max_position_embeddings": -1}}},
            "rope_parameters.full_attention.original_max_position_embeddings is -1",
        ),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0}}, "rope_parameters.partial_rotary_factor is 0"),
        ({"text_config": {"num_hidden_layers": -1}}, "num_hidden_layers is -1"),
    ],
)
def test_an_odd_value_is_named(tmp_path: Path, values: dict[str, Any], line: str) -> None:
    assert odd(tmp_path, **values) == [line]


def test_doubtful_values_are_whole_numbers_that_are_none_and_text_for_a_number() -> None:
    types = {"kernel": int, "layers": int | None, "rank": int | str, "scale": float, "pad_token_id": int, "name": str}
    config = {"kernel": 0, "layers": -1, "rank": "x", "scale": float("inf"), "pad_token_id": -1, "name": "x", "no": -1}
    assert doubtful(config, types) == ["kernel is 0", "layers is -1", 'rank is "x"', "scale is Infinity"]
    assert doubtful({"layers": 0, "rank": "auto", "scale": -0.5, "kernel": True, "name": "auto"}, types) == []
    assert doubtful({"text_config": {"layers": 2.5, "rank": 2.0}}, types) == ["layers is 2.5", "rank is 2.0"]
    assert doubtful({"layers": 2.0}, types) == []  # many annotations say int of numbers with a fraction


def test_text_that_stands_for_true_is_not_odd() -> None:
    """Laguna's gates of one kind have a name."""
    types = {"gating": bool, "other": bool}
    for named in (no_flags, mistyped):
        assert named({"gating": "per-head"}, types) == []
        assert named({"gating": "per-element"}, types) == ['gating is "per-element"']
        assert named({"other": "per-head"}, types) == ['other is "per-head"']


def test_values_that_models_have_are_not_odd(tmp_path: Path) -> None:
    assert odd(tmp_path, head_dim=None, num_key_value_heads=None, rope_scaling={"rope_type": "default"}) == []


@pytest.mark.parametrize("text", ["", "[1]", "[" * 100_000])
def test_a_file_that_is_no_object_has_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert oddities(tmp_path) == oddities(tmp_path / "nowhere") == []
