"""Model folders with strange values: each is served, or refused in one line with a typed error; nothing else is raised.

A seed makes each folder.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import make_tiny
from treadle.config import Settings
from treadle.errors import TreadleError
from treadle.models.resolve import resolve
from treadle.runner.build import build
from treadle.text.tokenizer import TextModel

DEEP = "[" * 100_000 + "]" * 100_000
STRANGE = (
    *("null", "true", "-1", "0", "1", "2", "0.5", "1e308", "-1e308", "1e400", "NaN", "-Infinity", "1e-320", "1e-300"),
    *("123456789012345678901234567890", "99999999999", '"x"', '""', '"\\ud800"', '"yarn"', '"linear"'),
    *("[]", "{}", "[1,[2]]", '{"a":{}}', "[null]", DEEP),
)
KEYS = (
    *("rope_scaling", "rope_parameters", "quantization", "quantization_config", "text_config", "eos_token_id"),
    *("layer_types", "attention_bias", "num_experts", "sliding_window", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "do_sample", "stop_strings", "model_file", "auto_map", "tie_word_embeddings"),
)
ROPE_KEYS = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "mscale")
ROPE_KINDS = ("yarn", "linear", "llama3", "dynamic", "su", "longrope", "unknown")
SEEDS, ENGINE_SEEDS = 60, 12


class Raw:
    """JSON text that stands for itself in a document, also where `json.dumps` would not write it."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def __call__(self, text: str) -> str:
        self._texts.append(text)
        return f"raw {len(self._texts) - 1} raw"

    def dumps(self, value: Any) -> str:
        document = json.dumps(value)
        for i, text in enumerate(self._texts):
            document = document.replace(json.dumps(f"raw {i} raw"), text)
        return document


def mutate(folder: Path, rnd: random.Random) -> str:
    """Put strange values into one of the folder's configurations; its name."""
    name = rnd.choice(["config.json", "config.json", "generation_config.json"])
    path, raw = folder / name, Raw()
    value = json.loads(path.read_text()) if path.exists() else {}
    for _ in range(rnd.choice([1, 1, 2, 4])):
        key = rnd.choice([*value, *KEYS])
        if key.startswith("rope_") and rnd.random() < 0.8:
            inner: dict[str, str] = {one: raw(rnd.choice(STRANGE)) for one in rnd.sample(ROPE_KEYS, 3)}
            value[key] = {"rope_type": rnd.choice(ROPE_KINDS), **inner}
        else:
            value[key] = raw(rnd.choice(STRANGE))
    path.write_text(raw.dumps(value))
    return name


def load_text(folder: Path) -> None:
    resolve(Settings(model=str(folder)), lambda stage: None)
    TextModel.load(folder, chat_template=None, context=None)


def load_engine(folder: Path) -> None:
    resolve(Settings(model=str(folder)), lambda stage: None)
    runner = build(folder, memory=1 << 26)
    runner.warm_up()
    runner.close()


def refusal(load: Callable[[Path], None], folder: Path) -> str:
    """Why `load` refuses the folder, empty if it does not; whatever else it raises comes through."""
    try:
        load(folder)
    except TreadleError as error:
        return error.message
    return ""


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.filterwarnings("ignore")
def test_the_text_side_serves_or_refuses_in_one_line(tmp_path: Path, seed: int) -> None:
    rnd = random.Random(seed)
    folder = make_tiny(tmp_path / "m", architecture=rnd.choice(["llama", "gemma3", "qwen3_moe"]))
    mutate(folder, rnd)
    assert "\n" not in refusal(load_text, folder)


@pytest.mark.parametrize("seed", range(1000, 1000 + ENGINE_SEEDS))
@pytest.mark.filterwarnings("ignore")
def test_the_engine_serves_or_refuses_in_one_line(tmp_path: Path, seed: int) -> None:
    rnd = random.Random(seed)
    folder = make_tiny(tmp_path / "m", architecture=rnd.choice(["llama", "gemma3", "qwen3_moe"]))
    mutate(folder, rnd)
    assert "\n" not in refusal(load_engine, folder)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation_config.json", f'{{"a": {DEEP}}}'),
        ("generation_config.json", DEEP),
        ("tokenizer_config.json", f'{{"a": {DEEP}}}'),
        ("special_tokens_map.json", f'{{"a": {DEEP}}}'),
    ],
)
def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path: Path, name: str, text: str) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / name).write_text(text)
    why = refusal(load_text, folder)
    assert name in why
    assert "\n" not in why


@pytest.mark.parametrize("factor", [1e308, float("inf"), float("nan"), -1, 0])
def test_a_yarn_factor_out_of_reach_leaves_the_context_as_it_is(tmp_path: Path, factor: float) -> None:
    folder = make_tiny(tmp_path / "m", context=512)
    path = folder / "config.json"
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 512}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": rope}))
    assert TextModel.load(folder, chat_template=None, context=None).context == 512


@pytest.mark.parametrize(
    ("name", "value"),
    [("repetition_penalty", 1e30), ("repetition_penalty", 0), ("temperature", 1e300), ("top_k", 2.5), ("min_p", True)],
)
def test_a_default_out_of_the_range_of_requests_is_ignored_with_a_warning(
    tmp_path: Path, name: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({name: value}))
    assert TextModel.load(folder, chat_template=None, context=None).default_sampling == {}
    assert f"generation_config.json: {name} is {value!r}, which is out of range: it is ignored" in caplog.text
