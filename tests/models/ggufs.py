"""Builder of a small GGUF file with the demo's metadata, special vocabulary entries and tensor types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
HIDDEN, LAYERS = 64, 2
_LETTERS = "abcdefghijklmnopqrstuvwxyz.,"
_PIECES = ("th", "the", "▁t", "▁the", "cat", "at")


def vocabulary() -> tuple[list[str], list[int]]:
    """Return tokens and their GGUF types, in id order."""
    entries = [
        ("<pad>", CONTROL),
        ("<eos>", CONTROL),
        ("<bos>", CONTROL),
        ("<unk>", CONTROL),
        ("[image]", USER_DEFINED),
    ]
    entries += [(f"<unused{n}>", CONTROL) for n in range(100)]
    entries += [("<start_of_turn>", CONTROL), ("<end_of_turn>", CONTROL)]
    entries += [("\n" * n, USER_DEFINED) for n in (1, 2, 3)] + [(" " * n, USER_DEFINED) for n in (2, 3)]
    entries += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    entries += [("▁", NORMAL)] + [(letter, NORMAL) for letter in _LETTERS] + [(piece, NORMAL) for piece in _PIECES]
    return [token for token, _ in entries], [kind for _, kind in entries]


def write(path: Path, seed: int = 0) -> Path:
    """Write the file; tensors are random, norms are stored plus one, as in Gemma's files."""
    tokens, kinds = vocabulary()
    writer = GGUFWriter(path, "gemma3")
    writer.add_uint32("gemma3.context_length", 128)
    writer.add_uint32("gemma3.embedding_length", HIDDEN)
    writer.add_uint32("gemma3.block_count", LAYERS)
    writer.add_uint32("gemma3.feed_forward_length", 2 * HIDDEN)
    writer.add_uint32("gemma3.attention.head_count", 2)
    writer.add_uint32("gemma3.attention.head_count_kv", 1)
    writer.add_uint32("gemma3.attention.key_length", 32)
    writer.add_uint32("gemma3.attention.sliding_window", 16)
    writer.add_float32("gemma3.rope.freq_base", 1e6)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores([-float(n) for n in range(len(tokens))])
    _add_tensors(writer, np.random.default_rng(seed), len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensors(writer: GGUFWriter, chance: np.random.Generator, tokens: int) -> None:
    def matrix(name: str, rows: int, columns: int, kind: GGMLQuantizationType) -> None:
        values = chance.standard_normal((rows, columns)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", (1 + chance.uniform(-0.5, 0.5, size)).astype(np.float32))

    matrix("token_embd", tokens, HIDDEN, GGMLQuantizationType.Q8_0)
    norm("output_norm", HIDDEN)
    for layer in range(LAYERS):
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            norm(f"blk.{layer}.{name}", HIDDEN)
        for name in ("attn_q_norm", "attn_k_norm"):
            norm(f"blk.{layer}.{name}", 32)
        matrix(f"blk.{layer}.attn_q", HIDDEN, HIDDEN, GGMLQuantizationType.Q5_0)
        matrix(f"blk.{layer}.attn_k", 32, HIDDEN, GGMLQuantizationType.Q5_0)
        matrix(f"blk.{layer}.attn_v", 32, HIDDEN, GGMLQuantizationType.Q8_0)
        matrix(f"blk.{layer}.attn_output", HIDDEN, HIDDEN, GGMLQuantizationType.F32)
        matrix(f"blk.{layer}.ffn_gate", 2 * HIDDEN, HIDDEN, GGMLQuantizationType.Q5_0)
        matrix(f"blk.{layer}.ffn_up", 2 * HIDDEN, HIDDEN, GGMLQuantizationType.F16)
        matrix(f"blk.{layer}.ffn_down", HIDDEN, 2 * HIDDEN, GGMLQuantizationType.Q8_0)
