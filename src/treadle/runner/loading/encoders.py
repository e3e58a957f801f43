"""Models whose tokens attend to those behind them: which of them can be served, and the test of their backend."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .. import mlxlm
from ..device.owner_thread import mlx_runtime
from ..device.self_test import FAULTS
from ..forward.segments import KvSequence, RowSegment
from ..kv.backend import Unsupported
from ..kv.cost import KvCost
from ..kv.encoder.backend import EncoderConfig
from ..kv.encoder.layer import near
from ..mlxlm import MlxLm, Selection
from .backend_choice import BackendChoice
from .backend_self_test import SelfTestFailed
from .routed_layers import routed_layers

_FLAGS = {"use_bidirectional_attention": True, "is_causal": False}
_KNOWN = "gemma3_text"
_MOST_DEVIATION = 0.02
"""Of hidden states, relative to their spread: both sides compute the same sums, in another order."""


def is_bidirectional(config: Mapping[str, Any]) -> bool:
    """Whether a model's config says that tokens attend to those behind them."""
    return any(config.get(name) is value for name, value in _FLAGS.items())


def choose_encoder(
    library: MlxLm, module: Any, config: Mapping[str, Any], context: int, selection: Selection | None
) -> BackendChoice:
    """Return the encoder backend for the model of `config`, tested with `module`. Raises Unsupported with the reason
    where bidirectional attention can't be had for it, or where its parts are not those that mlx-lm computes."""
    if config.get("model_type") != _KNOWN or selection is None:
        raise Unsupported(f"its tokens attend to those behind them, which is known for {_KNOWN} only")
    _check_layers(config)
    if routed_layers(library, module).recurrent is not None:
        raise Unsupported("it has recurrent layers")
    pattern, layers = _pattern(config), int(config["num_hidden_layers"])
    size = int(config["sliding_window"]) // 2 + 1  # on either side, as in transformers
    windows = [0 if (layer + 1) % pattern == 0 else size for layer in range(layers)]
    chosen = EncoderConfig(windows, selection, context)
    _self_test(module, chosen)
    return BackendChoice(chosen, KvCost(0, 0), 0)


def _pattern(config: Mapping[str, Any]) -> int:
    return int(config.get("sliding_window_pattern", 6))


def _check_layers(config: Mapping[str, Any]) -> None:
    """Raise Unsupported where transformers would compute other layers or positions than mlx-lm."""
    pattern, kinds = _pattern(config), config.get("layer_types")
    full = [kind == "full_attention" for kind in kinds or ()]
    if kinds and full != [(layer + 1) % pattern == 0 for layer in range(len(full))]:
        raise Unsupported(f"its layer_types are not every {pattern}th layer with full attention")
    if config.get("_sliding_window_pattern", pattern) != pattern:
        raise Unsupported("its _sliding_window_pattern is not mlx-lm's sliding_window_pattern")
    bases = {
        "full_attention": config.get("rope_theta", 1e6),
        "sliding_attention": config.get("rope_local_base_freq", 1e4),
    }
    for kind, given in (config.get("rope_parameters") or {}).items():
        if not isinstance(given, Mapping) or given.get("rope_theta", bases.get(kind)) != bases.get(kind):
            raise Unsupported("its rope_parameters are not those that mlx-lm reads")


# Self-test ------------------------------------------------------------------------------------------------------


class _Masked:
    """Stands for the cache of a layer: one prompt by itself, with an explicit mask and mlx-lm's own attention."""

    offset = 0

    def __init__(self, window: int) -> None:
        self._window = window

    def make_mask(self, count: int = 1, return_array: bool = False, window_size: int | None = None) -> Any:
        mask = near(count, self._window)
        return mx.ones((count, count), mx.bool_) if mask is None else mask

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        return keys, values


def _self_test(module: Any, config: EncoderConfig) -> None:
    """Compute prompts together in the backend, and each alone with explicit masks: one is longer than a window."""
    longest = min(config.longest, max(config.windows) + 24)
    prompts = [tuple(1 + (7 * i + 3 * i * i) % 37 for i in range(count)) for count in (9, 1, longest)]
    try:
        with mlx_runtime("testing the encoder"):
            found = _together(module, config, prompts)
            expected = [_alone(module, config, prompt) for prompt in prompts]
            wrong = max(_deviation(*pair) for pair in zip(found, expected, strict=True))
    except FAULTS as error:
        raise SelfTestFailed(f"prompts in one pass failed ({type(error).__name__}: {error})") from error
    if not wrong <= _MOST_DEVIATION:
        raise SelfTestFailed(f"its hidden states are not the model's own: they differ by {wrong:.2g} of their spread")


def _together(module: Any, config: EncoderConfig, prompts: Sequence[tuple[int, ...]]) -> list[Any]:
    rows = [KvSequence(str(i), "", prompt) for i, prompt in enumerate(prompts)]
    segments = [RowSegment(row, row.tokens, 0, hidden=len(row.tokens)) for row in rows]
    done = config.build(module, {}, time.monotonic).compute(segments, None, hidden=True)
    return [done.hidden[row.id] for row in rows]


def _alone(module: Any, config: EncoderConfig, prompt: tuple[int, ...]) -> Any:
    with mlxlm.keeping(config.selection, mx.arange(len(prompt))):
        module(mx.array([prompt], mx.int32), cache=[_Masked(window) for window in config.windows])
    return config.selection.take()


def _deviation(found: Any, expected: Any) -> float:
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    ratio = mx.mean(mx.abs(found - expected)) / mx.maximum(mx.std(expected), 1e-9)
    return float(np.array(ratio))
