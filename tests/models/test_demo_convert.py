"""The conversion of the demo, on a small file of the same shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, dequantize
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tests.models import ggufs
from treadle.models import folder_checks, safetensors_file
from treadle.models.demo_convert import convert, to_bfloat16
from treadle.models.demo_tokenizer import CHAT_TEMPLATE
from treadle.text.folder import FolderConfig
from treadle.text.stops import StopStrings


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ggufs.write(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    part = tmp_path_factory.mktemp("converted")
    copy = part.with_suffix(".gguf")
    copy.write_bytes(source.read_bytes())
    convert(copy, part)
    return part


@pytest.fixture(scope="module")
def tokenizer(converted: Path) -> Tokenizer:
    return Tokenizer.from_file(str(converted / "tokenizer.json"))


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Return all tensors as float32."""
    path = folder / "model.safetensors"
    tensors = safetensors_file.read_header(path)
    size = max(tensor.end for tensor in tensors.values())
    data = path.read_bytes()[-size:]
    found = {}
    for name, tensor in tensors.items():
        assert tensor.dtype == "BF16"
        half = np.frombuffer(data[tensor.start : tensor.end], dtype=np.uint16)
        found[name] = (half.astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    return found


def test_the_result_passes_the_checks_of_any_model_folder(converted: Path) -> None:
    config = folder_checks.check(converted)
    assert config["model_type"] == "gemma3_text"
    assert (config["num_hidden_layers"], config["hidden_size"], config["head_dim"]) == (ggufs.LAYERS, ggufs.HIDDEN, 32)
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == [1, 106]


def test_mlx_lm_loads_every_weight_and_misses_none(converted: Path) -> None:
    from mlx_lm.utils import load_model

    load_model(converted, strict=True)


def test_weights_are_the_files_and_norms_lose_the_one(source: Path, converted: Path) -> None:
    found = weights(converted)
    theirs = {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(source).tensors}
    pairs = {
        "model.embed_tokens.weight": theirs["token_embd.weight"],
        "model.norm.weight": theirs["output_norm.weight"] - 1,
        "model.layers.1.self_attn.q_proj.weight": theirs["blk.1.attn_q.weight"],
        "model.layers.1.self_attn.q_norm.weight": theirs["blk.1.attn_q_norm.weight"] - 1,
        "model.layers.0.pre_feedforward_layernorm.weight": theirs["blk.0.ffn_norm.weight"] - 1,
        "model.layers.0.post_feedforward_layernorm.weight": theirs["blk.0.post_ffw_norm.weight"] - 1,
        "model.layers.0.mlp.down_proj.weight": theirs["blk.0.ffn_down.weight"],
        "model.layers.0.mlp.up_proj.weight": theirs["blk.0.ffn_up.weight"],
    }
    for name, value in pairs.items():
        np.testing.assert_allclose(found[name], value, rtol=2**-8, err_msg=name)
    assert len(found) == len(theirs)


def test_the_source_is_removed(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(source.read_bytes())
    (tmp_path / "part").mkdir()
    convert(copy, tmp_path / "part")
    assert not copy.exists()


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("the cat", ["<bos>", "the", "▁", "cat"]),
        ("a the", ["<bos>", "a", "▁the"]),
        ("a  b", ["<bos>", "a", "▁▁", "b"]),
        ("a   b", ["<bos>", "a", "▁▁▁", "b"]),
        ("a\n\n\nb", ["<bos>", "a", "\n\n\n", "b"]),
        ("é", ["<bos>", "<0xC3>", "<0xA9>"]),
        ("<start_of_turn>a", ["<bos>", "<start_of_turn>", "a"]),
        ("[image]", ["<bos>", "[image]"]),
        ("", ["<bos>"]),
    ],
)
def test_text_becomes_tokens(tokenizer: Tokenizer, text: str, tokens: list[str]) -> None:
    assert tokenizer.encode(text).tokens == tokens


@pytest.mark.parametrize("text", ["the  cat\n\n sat", "naïve 🎉", "日本", "   ", "<0x41>", "a [image] b"])
def test_tokens_become_the_same_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_control_tokens_are_special_and_pieces_are_not(tokenizer: Tokenizer) -> None:
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert added["<end_of_turn>"]
    assert not added["[image]"]
    assert "\n" not in added
    assert "▁▁" not in added


def rendered(messages: list[dict[str, object]], *, add_generation_prompt: bool = True) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise
    template = environment.from_string(CHAT_TEMPLATE)
    return template.render(messages=messages, bos_token="<bos>", add_generation_prompt=add_generation_prompt)


def _raise(message: str) -> None:
    raise ValueError(message)


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_its_defaults_leave_greedy_decoding_as_it_is(converted: Path) -> None:
    """A temperature of 0 from a client must mean mlx-lm's plain greedy text: no penalty comes with the model."""
    assert FolderConfig.read(converted).default_sampling() == {"temperature": 0.1}


def test_a_chat_is_a_dialogue_in_plain_text_with_one_bos() -> None:
    messages = [user("Hi"), {"role": "assistant", "content": "Hello\n"}, user(" Bye \n")]
    assert rendered(messages) == "<bos>User: Hi\nAssistant: Hello\nUser: Bye\nAssistant:"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_text_is_a_paragraph_of_its_own(role: str) -> None:
    messages = [{"role": role, "content": "Be brief.\n"}, user("Hi"), user("There")]
    assert rendered(messages, add_generation_prompt=False) == "<bos>Be brief.\n\nUser: Hi\nUser: There\n"


def test_a_system_text_alone_can_be_answered() -> None:
    assert rendered([{"role": "system", "content": "Be brief."}]) == "<bos>Be brief.\n\nAssistant:"


def test_content_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert rendered([user(parts)]) == "<bos>User: one two\nAssistant:"


@pytest.mark.parametrize("speaker", ["user", "assistant"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_an_answer_ends_where_the_template_would_start_the_next_turn(converted: Path, speaker: str, end: str) -> None:
    stops = StopStrings(FolderConfig.read(converted).stop_strings())
    turn = rendered([{"role": speaker, "content": "Why?"}], add_generation_prompt=False).removeprefix("<bos>")
    match = stops.push(f" Paris.{end}\n{turn}")
    assert (match.text, match.stop is not None) == (" Paris.", True)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "tool", "content": "4"}, "not tool"),
        (user([{"type": "image_url", "image_url": {}}]), "reads text only, not image_url"),
    ],
)
def test_what_the_model_cannot_read_is_named(message: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rendered([message])


@given(arrays(np.float32, st.integers(1, 20), elements=st.floats(-(2.0**127), 2.0**127, width=32)))
def test_bfloat16_is_the_nearest_and_ties_go_to_even(values: np.ndarray) -> None:
    bits = to_bfloat16(values.copy())
    for value, got in zip(values, bits, strict=True):
        below = int(value.view(np.uint32)) >> 16
        options = [below, below + 1]
        gaps = [abs(float(np.uint32(option << 16).view(np.float32)) - float(value)) for option in options]
        nearest = [option for option, gap in zip(options, gaps, strict=True) if gap == min(gaps)]
        want = nearest[0] if len(nearest) == 1 else next(option for option in nearest if option % 2 == 0)
        assert int(got) == want
