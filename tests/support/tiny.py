"""Tiny random models, written without MLX: a folder that mlx-lm loads in milliseconds.

Token id b (0 to 255) is the byte b, so `list(text.encode())` is a prompt. The named tokens follow: <pad> 256, <bos>
257, <eos> 258, <|im_start|> 259, <|im_end|> 260, then `added` and `special` ones. Weights are float32, three times the
usual random size and untied, which gives varied greedy text, the same alone and batched. The same arguments write
identical files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from treadle.models import safetensors_file

Architecture = Literal["llama", "qwen3", "gemma3", "qwen3_moe"]

SPECIAL = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
PAD, BOS, EOS, IM_START, IM_END = range(256, 261)
CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>' ~ '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant' ~ '\\n' -}}{%- endif -%}"
)

_MODEL_TYPE = {"gemma3": "gemma3_text"}
_SCALE = 3.0
_HIDDEN, _INTERMEDIATE, _EXPERT, _EXPERTS = 64, 128, 32, 4
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 16

Array = npt.NDArray[np.float32]


def make_tiny(
    folder: Path,
    *,
    architecture: Architecture = "llama",
    vocabulary_extra: int = 0,
    context: int = 2048,
    eos: bool = True,
    layers: int = 2,
    added: tuple[str, ...] = (),
    special: tuple[str, ...] = (),
    chat_template: str | None = CHATML,
    sliding_window: int = 32,
    seed: int = 0,
) -> Path:
    """Write a model folder and return it.

    `vocabulary_extra` ids lie beyond the tokenizer's. Without `eos` nothing names an end token, so only limits end a
    sequence. `added` are plain tokens such as "<think>", `special` ones such as "[TOOL_CALLS]" that text hides.
    `sliding_window` is gemma3's, on every other layer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = 256 + len(SPECIAL) + len(added) + len(special) + vocabulary_extra
    config = _config(architecture, vocabulary, context, layers, sliding_window)
    if eos:
        config["eos_token_id"] = [EOS, IM_END]
    _write_json(folder / "config.json", config)
    _write_tokenizer(folder, context, eos, added, special, chat_template)
    _write_weights(folder / "model.safetensors", architecture, vocabulary, layers, seed)
    return folder


def _config(
    architecture: Architecture, vocabulary: int, context: int, layers: int, sliding_window: int
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": _MODEL_TYPE.get(architecture, architecture),
        "hidden_size": _HIDDEN,
        "num_hidden_layers": layers,
        "intermediate_size": _INTERMEDIATE,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": BOS,
    }
    if architecture == "gemma3":
        config |= {"query_pre_attn_scalar": _HEAD_DIM, "sliding_window": sliding_window, "sliding_window_pattern": 2}
    if architecture == "qwen3_moe":
        config |= {"num_experts": _EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": _EXPERT}
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return config


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(
    folder: Path, context: int, eos: bool, added: tuple[str, ...], special: tuple[str, ...], template: str | None
) -> None:
    tokenizer = Tokenizer(models.BPE({symbol: byte for byte, symbol in enumerate(_byte_symbols())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    if eos:
        config["eos_token"] = "<eos>"
    if template is not None:
        config["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", config)


def _byte_symbols() -> list[str]:
    """Return the printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = (byte for byte in range(256) if byte not in printable)
    symbols = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(unprintable)}
    return [symbols[byte] for byte in range(256)]


def _write_weights(path: Path, architecture: Architecture, vocabulary: int, layers: int, seed: int) -> None:
    shapes = _shapes(architecture, vocabulary, layers)
    rng = np.random.default_rng(seed)
    norm = 0.0 if architecture == "gemma3" else 1.0  # gemma3 adds the one itself
    values = {name: _values(rng, name, shape, norm) for name, shape in shapes.items()}
    kinds = {name: ("F32", shape) for name, shape in shapes.items()}
    safetensors_file.write(path, kinds, {name: [value.tobytes()] for name, value in values.items()})


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...], norm: float) -> Array:
    if len(shape) == 1:
        return np.full(shape, norm, dtype=np.float32)
    size = shape[-1] ** -0.5
    if "embed_tokens" in name:
        return (_SCALE * size * rng.standard_normal(shape)).astype(np.float32)
    return (_SCALE * rng.uniform(-size, size, shape)).astype(np.float32)


def _shapes(architecture: Architecture, vocabulary: int, layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, _HIDDEN)}
    for layer in range(layers):
        parts = _attention(architecture) | _feed_forward(architecture)
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return shapes | {"model.norm.weight": (_HIDDEN,), "lm_head.weight": (vocabulary, _HIDDEN)}


def _attention(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    parts: dict[str, tuple[int, ...]] = {
        "input_layernorm": (_HIDDEN,),
        "post_attention_layernorm": (_HIDDEN,),
        "self_attn.q_proj": (_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD_DIM),
    }
    if architecture != "llama":
        parts |= {"self_attn.q_norm": (_HEAD_DIM,), "self_attn.k_norm": (_HEAD_DIM,)}
    if architecture == "gemma3":
        parts |= {"pre_feedforward_layernorm": (_HIDDEN,), "post_feedforward_layernorm": (_HIDDEN,)}
    return parts


def _feed_forward(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    if architecture == "qwen3_moe":
        return {
            "mlp.gate": (_EXPERTS, _HIDDEN),
            "mlp.switch_mlp.gate_proj": (_EXPERTS, _EXPERT, _HIDDEN),
            "mlp.switch_mlp.up_proj": (_EXPERTS, _EXPERT, _HIDDEN),
            "mlp.switch_mlp.down_proj": (_EXPERTS, _HIDDEN, _EXPERT),
        }
    return {
        "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
    }
