"""MTP heads in NumPy, written from their descriptions: published tensors in, drafts out, without caches or batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
EPS = 1e-5


class HeadReference:
    """The head of a `family` with published `tensors`, without the prefix of their names, for a model with `config`,
    `embedding` (V, D) and `output` (V, D)."""

    def __init__(
        self, family: str, tensors: Mapping[str, Any], config: Mapping[str, Any], embedding: Array, output: Array
    ) -> None:
        self._tensors = {name.removesuffix(".weight"): np.array(value, np.float64) for name, value in tensors.items()}
        self._qwen = family.startswith("qwen")
        self._base = 100000.0 if family.startswith("qwen3_5") else config["rope_theta"]
        self._latent_eps = 1e-6 if family == "deepseek_v3" else EPS
        self._mimo = family == "mimo"
        self._config = config
        self._embedding = embedding
        self._output = output
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "")
        if self._qwen:
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.")
        elif self._mimo:
            names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "")
        self._token_norm, self._state_norm, self._projection, self._last_norm, self._layer = names

    def drafts(self, states: Array, tokens: Sequence[int], count: int) -> list[int]:
        """Return `count` greedy tokens behind the last of `tokens` (n + 1): `states` (n, D) are those of the first n,
        as the family's head takes them."""
        found: list[int] = []
        known, states = list(tokens), states.copy()
        for _ in range(count):
            inside = self._decoder(self._joined(states, self._embedding[known[1:]]))[-1:]
            out = self._norm(inside, self._last_norm)
            found.append(int(np.argmax(out @ self._output.T)))
            known.append(found[-1])
            states = np.concatenate([states, inside if self._mimo else out])
        return found

    def logits(self, states: Array, tokens: Sequence[int]) -> Array:
        """Return logits (n, V) behind tokens 1 to n of `tokens`."""
        joined = self._joined(states, self._embedding[list(tokens[1:])])
        return self._norm(self._decoder(joined), self._last_norm) @ self._output.T

    def _joined(self, states: Array, embedded: Array) -> Array:
        parts = [self._norm(embedded, self._token_norm), self._norm(states, self._state_norm)]
        if self._mimo:
            parts.reverse()
        return np.concatenate(parts, axis=-1) @ self._tensors[self._projection].T

    def _norm(self, x: Array, name: str, eps: float = EPS) -> Array:
        weight = self._tensors[name] + self._qwen
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight

    def _product(self, x: Array, name: str) -> Array:
        name = self._layer + name
        return x @ self._tensors[name].T + self._tensors.get(f"{name}.bias", 0.0)

    def _decoder(self, x: Array) -> Array:
        attend = self._latent_attention if f"{self._layer}self_attn.kv_b_proj" in self._tensors else self._attention
        x = x + attend(self._norm(x, f"{self._layer}input_layernorm"))
        y = self._norm(x, f"{self._layer}post_attention_layernorm")
        return x + (self._experts(y) if f"{self._layer}mlp.gate" in self._tensors else self._gated(y, "mlp."))

    def _attention(self, x: Array) -> Array:
        heads, kv, size = (self._config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        queries = self._product(x, "self_attn.q_proj").reshape(len(x), heads, -1)
        queries, gates = queries[..., :size], queries[..., size:].reshape(len(x), -1)
        keys = self._product(x, "self_attn.k_proj").reshape(len(x), kv, size)
        values = self._product(x, "self_attn.v_proj").reshape(len(x), kv, size)
        if f"{self._layer}self_attn.q_norm" in self._tensors:
            queries = self._norm(queries, f"{self._layer}self_attn.q_norm")
            keys = self._norm(keys, f"{self._layer}self_attn.k_norm")
        rotated = int(size * self._config.get("partial_rotary_factor", 0.25 if self._qwen else 1.0))
        queries, keys = _rotated(queries, rotated, self._base), _rotated(keys, rotated, self._base)
        out = _attended(queries, keys.repeat(heads // kv, 1), values.repeat(heads // kv, 1), size**-0.5)
        return self._product(out * _sigmoid(gates) if self._qwen else out, "self_attn.o_proj")

    def _latent_attention(self, x: Array) -> Array:
        config, heads, eps = self._config, self._config["num_attention_heads"], self._latent_eps
        plain, turned, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
        queries = self._norm(self._product(x, "self_attn.q_a_proj"), f"{self._layer}self_attn.q_a_layernorm", eps)
        queries = self._product(queries, "self_attn.q_b_proj").reshape(len(x), heads, plain + turned)
        both = self._product(x, "self_attn.kv_a_proj_with_mqa")
        latents = self._norm(both[:, :rank], f"{self._layer}self_attn.kv_a_layernorm", eps)
        turned_keys = _interleaved(both[:, None, rank:], self._base).repeat(heads, 1)
        expanded = self._product(latents, "self_attn.kv_b_proj").reshape(len(x), heads, -1)
        keys = np.concatenate([expanded[..., :plain], turned_keys], axis=-1)
        queries = np.concatenate([queries[..., :plain], _interleaved(queries[..., plain:], self._base)], axis=-1)
        out = _attended(queries, keys, expanded[..., plain:], (plain + turned) ** -0.5)
        return self._product(out, "self_attn.o_proj")

    def _gated(self, x: Array, prefix: str) -> Array:
        gate = self._product(x, f"{prefix}gate_proj")
        return self._product(gate * _sigmoid(gate) * self._product(x, f"{prefix}up_proj"), f"{prefix}down_proj")

    def _experts(self, x: Array) -> Array:
        scores = self._product(x, "mlp.gate")
        chosen, weights = self._softmax_routed(scores) if self._qwen else self._sigmoid_routed(scores)
        out = np.zeros_like(x)
        for place, (some, own) in enumerate(zip(chosen, weights, strict=True)):
            for expert, weight in zip(some, own, strict=True):
                out[place] += weight * self._expert(x[place], expert)
        if self._qwen:
            return out + _sigmoid(self._product(x, "mlp.shared_expert_gate")) * self._gated(x, "mlp.shared_expert.")
        shared = f"{self._layer}mlp.shared_experts.up_proj" in self._tensors
        return out + self._gated(x, "mlp.shared_experts.") if shared else out

    def _expert(self, x: Array, expert: int) -> Array:
        joined = self._tensors.get(f"{self._layer}mlp.experts.gate_up_proj")
        if joined is None:
            return self._gated(x, f"mlp.experts.{expert}.")
        gate, up = np.split(joined[expert] @ x, 2)
        down: Array = self._tensors[f"{self._layer}mlp.experts.down_proj"][expert]
        return down @ (gate * _sigmoid(gate) * up)

    def _softmax_routed(self, scores: Array) -> tuple[Any, Array]:
        most = self._config["num_experts_per_tok"]
        chosen = np.argsort(-scores, axis=-1)[:, :most]
        return chosen, _softmax(np.take_along_axis(scores, chosen, -1))

    def _sigmoid_routed(self, scores: Array) -> tuple[Any, Array]:
        """One group of experts: those with the best corrected scores, by their own ones."""
        own = _sigmoid(scores)
        bias = self._tensors[f"{self._layer}mlp.gate.e_score_correction_bias"]
        chosen = np.argsort(-(own + bias), axis=-1)[:, : self._config["num_experts_per_tok"]]
        weights = np.take_along_axis(own, chosen, -1)
        factor = self._config.get("routed_scaling_factor", 1.0)
        return chosen, weights / (weights.sum(-1, keepdims=True) + 1e-20) * factor


def _rotated(x: Array, count: int, base: float) -> Array:
    """Rotary embedding of the first `count` dimensions of x (n, heads, size), in halves."""
    angles = np.arange(len(x))[:, None, None] * base ** (-np.arange(0, count, 2) / count)
    first, second = np.split(x[..., :count], 2, axis=-1)
    turned = [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
    return np.concatenate([*turned, x[..., count:]], axis=-1)


def _interleaved(x: Array, base: float) -> Array:
    """Rotary embedding of x (n, heads, size), in pairs of neighbours."""
    size = x.shape[-1]
    angles = np.arange(len(x))[:, None, None] * base ** (-np.arange(0, size, 2) / size)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = [even * np.cos(angles) - odd * np.sin(angles), odd * np.cos(angles) + even * np.sin(angles)]
    return np.stack(turned, axis=-1).reshape(x.shape)


def _attended(queries: Array, keys: Array, values: Array, scale: float) -> Array:
    """Causal attention (n, heads * size) of (n, heads, size)."""
    scores = np.einsum("ihd,jhd->hij", queries, keys) * scale
    scores[:, np.triu(np.ones(scores.shape[1:], np.bool_), 1)] = -np.inf
    return np.einsum("hij,jhd->ihd", _softmax(scores), values).reshape(len(queries), -1)


def _softmax(x: Array) -> Array:
    powers: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))
