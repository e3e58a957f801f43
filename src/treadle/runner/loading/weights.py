"""Weights of a loaded module: what a device computes them in, and their reading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ...errors import ModelError
from ...units import size
from ..device import memory as mem
from ..mlxlm import MlxLm
from .load_errors import check_flags, check_tensors, check_windows


def checked(library: MlxLm, module: Any, config: Mapping[str, Any], folder: Path, kind: str) -> Any:
    """Return a model that mlx-lm has loaded as a device of this `kind` computes it. Nothing is read. Raises ModelError
    where its answers would be wrong, and whatever its code raises."""
    check_tensors(module, folder)
    module = for_device(module, library, library.parameters(module), kind)
    check_windows(library, module, config, folder)  # which asks its code for masks: as it is stored it may not run here
    check_flags(library, config, folder)
    return module


def for_device(module: Any, library: MlxLm, parameters: int, kind: str) -> Any:
    """On the CPU compute in float32, and without quantized layers if that fits: nothing else goes through BLAS.

    Half-precision and quantized layers are ten times as slow there for a batch. Elsewhere the model stays as it is.
    Scales are converted first: products with scales in half precision would be rounded to it.
    """
    if kind != "cpu":
        return module
    module = library.without_expert_scales(module)
    module.set_dtype(mx.float32)
    if 2 * 4 * parameters <= mem.host_available_bytes():
        module = library.dequantize(module)
    module.set_dtype(mx.float32)
    return module


def read_weights(module: Any, folder: Path, kind: str) -> int:
    """Evaluate the parameters, so that nothing is read later; their bytes."""
    arrays, needed = _arrays(module), weight_bytes(module)
    usable = mem.usable_bytes(kind)
    free = max(0, usable - mx.get_active_memory())  # another model may be loaded
    if usable and needed > free:
        raise ModelError(
            f"the weights of {folder.name} take {size(needed)} ({dtype_of(module)}) and {size(free)} are free: use a "
            "smaller or a quantized model, or free memory"
        )
    for array in arrays:  # one at a time: what each is converted from goes at once
        mx.eval(array)
    return needed


def weight_bytes(module: Any) -> int:
    """Bytes of the parameters as they are stored; none is read."""
    return sum(int(array.nbytes) for array in _arrays(module))


def _arrays(module: Any) -> list[Any]:
    return [array for _, array in tree_flatten(module.parameters())]


def quantization_of(module: Any) -> str:
    """Quantization that most of the quantized layers have, in words; empty where there is none. A configuration may say
    another: mlx-lm goes by the tensors."""
    kinds: Counter[tuple[int, int, str]] = Counter()
    plain = False
    for layer in module.modules():
        if hasattr(layer, "bits"):
            kinds[layer.bits, layer.group_size, getattr(layer, "mode", "affine")] += 1
        else:
            plain = plain or hasattr(layer, "to_quantized")
    if not kinds:
        return ""
    ((bits, group, mode), _), *others = kinds.most_common()
    parts = [f"{bits} bits", f"groups of {group}"]
    if mode != "affine":
        parts.append(mode)
    if others or plain:
        parts.append("some layers otherwise")
    return ", ".join(parts)


def dtype_of(module: Any) -> str:
    """The floating type that most of the parameters have."""
    sizes: dict[str, int] = {}
    for _, array in tree_flatten(module.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).removeprefix("mlx.core.")
            sizes[name] = sizes.get(name, 0) + int(array.size)
    return max(sizes, key=lambda name: sizes[name], default="unknown")
