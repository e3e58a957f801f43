"""Estimate of a model's memory and path from its config and the headers of its files, without reading weights.

Runs in the probe's child: it asks mlx-lm for the model's classes and caches.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..core.compute_path import Backend, KernelPolicy
from ..errors import ConfigError, ModelError
from ..models import folder_checks
from ..text.folder import FolderConfig
from ..units import size

if TYPE_CHECKING:
    from ..runner.loading.expected import Expected
    from .device_probe import ProbeRequest

_PATHS = {
    Backend.PAGED: "batched, KV cache in pages",
    Backend.CONTIGUOUS: "batched, KV cache in buffers a row",
    Backend.PADDED: "batched on mlx-lm's caches, prefixes from snapshots",
    Backend.SERIAL: "one request at a time, as mlx-lm's caches for it can't be batched",
    Backend.ENCODER: "embeddings of whole prompts, without a cache",
}


class Estimate(msgspec.Struct, frozen=True):
    """A sequence takes `kv_row_bytes`, and `kv_token_bytes` a token. `kv_budget_bytes` is 0 if the memory is unknown. A
    start needs `kv_least_bytes`, and `kv_least_row_bytes` for each sequence that may run. `path` describes the expected
    KV `backend`, and `best` is the best of the device; `why` are the reasons against better ones, and `prefixes` the
    way to reuse cached prompts. Recurrent layers take `state_bytes` a sequence. The start decides by self-tests."""

    architecture: str
    parameters: int
    dtype: str
    weight_bytes: int
    context: int
    kv_budget_bytes: int
    kv_token_bytes: int = 0
    kv_row_bytes: int = 0
    kv_least_bytes: int = 0
    kv_least_row_bytes: int = 0
    path: str = ""
    backend: str = ""
    best: str = ""
    prefixes: str = ""
    why: list[str] = []
    state_bytes: int = 0


def estimate(request: ProbeRequest, kind: str, usable_bytes: int) -> Estimate:
    """Estimate for a device of this `kind`. Raises ModelError, ConfigError, or any error of the model's class."""
    from ..runner import mlxlm
    from ..runner.device import memory
    from ..runner.loading import expected
    from ..runner.loading.choose_backend import check_bits
    from ..runner.loading.encoders import is_bidirectional
    from ..runner.loading.headless import is_headless
    from ..runner.loading.load_errors import model_errors
    from ..runner.loading.weights import checked, dtype_of, weight_bytes

    assert request.folder is not None
    folder = Path(request.folder)
    config = folder_checks.check(folder)
    library = mlxlm.connect()
    check_bits(request.kv_bits, kind)
    with model_errors(folder, library):
        module, read = library.load(folder, headless=is_headless(folder))
        parameters = library.parameters(module)
        module = checked(library, module, read, folder, kind)
        library.traced(module)
    dtype, needed = dtype_of(module), weight_bytes(module)
    if usable_bytes and needed > usable_bytes:
        raise ModelError(
            f"the weights take {size(needed)} and {size(usable_bytes)} are free: use a smaller or a quantized model, "
            "or free memory"
        )
    context = FolderConfig.read(folder).context(request.context)
    if request.memory is not None:
        memory.check_budget(request.memory, usable_bytes - needed if usable_bytes else None)
    mlxlm.unscale_dynamic(module, context)
    encodes = is_bidirectional(config)
    pages = request.kernels != KernelPolicy.OFF
    found = expected.Expected(Backend.ENCODER, "none")
    if not encodes:
        with model_errors(folder, library):
            found = expected.expected_path(library, module, kind, context, pages=pages, bits=request.kv_bits or 16)
        _check_pages(request, found)
    backend, least = found.backend, found.least_memory(0)
    share = memory.PAGES_SHARE if backend is Backend.PAGED else memory.BUDGET_SHARE
    budget = int((usable_bytes - needed) * share) if usable_bytes else 0
    best = Backend.PAGED if kind == "cuda" else Backend.CONTIGUOUS
    return Estimate(
        architecture=str(config["model_type"]),
        parameters=parameters,
        dtype=dtype,
        weight_bytes=needed,
        context=context,
        kv_budget_bytes=budget if request.memory is None else request.memory,
        kv_token_bytes=found.cost.token_bytes,
        kv_row_bytes=found.cost.row_bytes,
        kv_least_bytes=least,
        kv_least_row_bytes=found.least_memory(1) - least,
        path=_PATHS[backend],
        backend=backend.value,
        best=(backend if encodes else best).value,
        prefixes=found.prefixes,
        why=[f"not {one.backend}: {one.reason}" for one in found.rejected],
        state_bytes=found.state_bytes,
    )


def _check_pages(request: ProbeRequest, found: Expected) -> None:
    """Raise ConfigError where keys and values are to be stored in fewer bits than the expected backend reads."""
    if request.kv_bits and found.backend is not Backend.PAGED:
        reason = "custom kernels are off" if request.kernels == KernelPolicy.OFF else found.rejected[0].reason
        raise ConfigError(
            f"no keys and values of {request.kv_bits} bits for this model: {reason}. Leave `kv_bits` out",
            param="kv_bits",
        )
