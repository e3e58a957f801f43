"""Conversion of the demo's GGUF file to an MLX folder: weights as bfloat16, tokenizer, chat template, configuration.

GGUF stores Gemma's norm weights plus one, and MLX adds the one itself, so it is subtracted. The model needs BOS at the
start of a prompt, so both the tokenizer and the chat template add it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from . import demo_tokenizer, safetensors_file
from .gguf_file import GgufFile, GgufTensor

_BLOCKS_AT_ONCE = 1 << 18
_BLOCKS_A_ROW = 256
_SLIDING_PATTERN = 6

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, part: Path) -> dict[str, str]:
    """Convert the GGUF file `source`, which is removed, into the folder `part`. Returns the weights' sha256 by file
    name."""
    file = GgufFile(source)
    source.unlink()
    _write_small_files(file, part)
    digest = _write_weights(file, part / "model.safetensors")
    return {"model.safetensors": digest}


def _write_small_files(file: GgufFile, part: Path) -> None:
    metadata = file.metadata
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    demo_tokenizer.build(tokens, kinds).save(str(part / "tokenizer.json"), pretty=False)
    _write_json(part / "tokenizer_config.json", _tokenizer_config(metadata))
    _write_json(part / "config.json", _config(metadata))
    _write_json(part / "generation_config.json", _generation_config())
    (part / "chat_template.jinja").write_text(demo_tokenizer.CHAT_TEMPLATE, encoding="utf-8")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _tokenizer_config(metadata: Any) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["gemma3.context_length"],
    }


def _generation_config() -> dict[str, Any]:
    # A low temperature: the first token of "Paris" after a question for the capital of France has a probability of
    # 13 % at temperature 1, 79 % at 0.2 and 97 % at 0.1.
    return {
        "do_sample": True,
        "temperature": 0.1,
        "bos_token_id": 2,
        "eos_token_id": [1, 106],
        "pad_token_id": 0,
        "stop_strings": list(demo_tokenizer.STOP_STRINGS),
    }


def _config(metadata: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": metadata["gemma3.embedding_length"],
        "num_hidden_layers": metadata["gemma3.block_count"],
        "intermediate_size": metadata["gemma3.feed_forward_length"],
        "num_attention_heads": metadata["gemma3.attention.head_count"],
        "num_key_value_heads": metadata["gemma3.attention.head_count_kv"],
        "head_dim": metadata["gemma3.attention.key_length"],
        "query_pre_attn_scalar": metadata["gemma3.attention.key_length"],
        "rms_norm_eps": 1e-6,
        "rope_theta": metadata["gemma3.rope.freq_base"],
        "rope_local_base_freq": 10000.0,
        "sliding_window": metadata["gemma3.attention.sliding_window"],
        "sliding_window_pattern": _SLIDING_PATTERN,
        "max_position_embeddings": metadata["gemma3.context_length"],
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 2,
        "eos_token_id": [1, 106],
        "pad_token_id": 0,
    }


def _write_weights(file: GgufFile, path: Path) -> str:
    named = {_mlx_name(tensor.name): tensor for tensor in file.tensors}
    shapes = {name: ("BF16", tensor.shape) for name, tensor in named.items()}
    return safetensors_file.write(path, shapes, {name: _bfloat16(file, tensor) for name, tensor in named.items()})


def _mlx_name(name: str) -> str:
    """Map a GGUF tensor name: `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    if not name.startswith("blk."):
        return f"{_TOP[name.removesuffix('.weight')]}.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER[part]}.weight"


def _bfloat16(file: GgufFile, tensor: GgufTensor) -> Iterator[bytes]:
    """Yield the tensor's values as bfloat16, _BLOCKS_AT_ONCE blocks at a time."""
    kind = GGMLQuantizationType(tensor.kind)
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    raw = file.raw(tensor, tensor.size // per_block * block_bytes).reshape(-1, block_bytes)
    shift = np.float32(1.0 if tensor.name.endswith("norm.weight") else 0.0)
    for start in range(0, len(raw), _BLOCKS_AT_ONCE):
        values = _dequantized(raw[start : start + _BLOCKS_AT_ONCE], kind)
        yield to_bfloat16(values - shift if shift else values).tobytes()


def _dequantized(blocks: npt.NDArray[np.uint8], kind: Any) -> npt.NDArray[np.float32]:
    """Dequantize blocks to a flat array. Long rows are many times faster, as `gguf` processes 16 rows at a time."""
    whole = len(blocks) // _BLOCKS_A_ROW * _BLOCKS_A_ROW
    rows = blocks[:whole].reshape(-1, _BLOCKS_A_ROW * blocks.shape[1])
    parts = [dequantize(part, kind).reshape(-1) for part in (rows, blocks[whole:]) if len(part)]
    return np.concatenate(parts) if len(parts) > 1 else np.ascontiguousarray(parts[0])


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to bfloat16, to nearest with ties to even; returns the bits. Values must be finite."""
    bits = values.view(np.uint32)
    odd = bits >> np.uint32(16)
    odd &= np.uint32(1)
    odd += np.uint32(0x7FFF)
    odd += bits
    odd >>= np.uint32(16)
    return odd.astype(np.uint16)
