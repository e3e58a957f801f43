"""Experts in nvfp4 with a scale of each expert, as mlx-lm quantizes them with `global_scale`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten


def without_expert_scales(model: Any) -> Any:
    """Return `model` with such experts dequantized to float32. CPUs have no code for them, and mlx-lm's own way to
    dequantize forgets the scales of experts."""
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear

    found = [
        (name, _dequantized(layer))
        for name, layer in model.named_modules()
        if isinstance(layer, QuantizedSwitchLinear) and layer.get("global_scale") is not None
    ]
    if found:
        model.update_modules(tree_unflatten(found))
    return model


def _dequantized(layer: Any) -> Any:
    from mlx_lm.models.switch_layers import SwitchLinear

    plain: Any = SwitchLinear(layer.input_dims, layer.output_dims, layer.num_experts, bias="bias" in layer)
    way = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode, "dtype": mx.float32}
    parts = zip(layer.weight, layer.scales, layer.global_scale, strict=True)
    plain.weight = mx.stack([mx.dequantize(weight, scales, global_scale=own, **way) for weight, scales, own in parts])
    if "bias" in layer:
        plain.bias = layer.bias
    return plain
