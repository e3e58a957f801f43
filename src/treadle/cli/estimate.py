"""Estimate of a model's memory and path from its config and the headers of its files, without reading weights.

Runs in the probe's child: it asks mlx-lm for the model's classes and caches.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..core.compute_path import Backend, KernelPolicy
from ..errors import ModelError
from ..models import folder_checks
from ..text.folder import FolderConfig
from ..units import size

if TYPE_CHECKING:
    from ..runner.loading.expected import Expected
    from .device_probe import ProbeRequest

_WIDTH = {"float64": 8, "float32": 4}
_HALF = 2
_PATHS = {
    Backend.PAGED: "batched, KV cache in pages",
    Backend.CONTIGUOUS: "batched, KV cache in buffers a row",
    Backend.PADDED: "batched on mlx-lm's caches, prefixes from snapshots",
    Backend.SERIAL: "one request at a time, as mlx-lm's caches for it can't be batched",
    Backend.ENCODER: "embeddings of whole prompts, without a cache",
}


class Estimate(msgspec.Struct, frozen=True):
    """`kv_token_bytes` and `kv_row_bytes` are None if the config alone does not determine them (quantized keys and
    values, for one): the start measures them. `kv_budget_bytes` is 0 if the memory is unknown. `kv_least_tokens` is the
    first allocation of a sequence. `path` describes the expected KV `backend`, and `best` is the
    best of the device; `why` are the reasons against better ones, and `prefixes` the way to reuse cached prompts.
    Recurrent layers take `state_bytes` a sequence. The start decides by self-tests."""

    architecture: str
    parameters: int
    dtype: str
    weight_bytes: int
    context: int
    kv_budget_bytes: int
    kv_token_bytes: int | None = None
    kv_row_bytes: int | None = None
    kv_least_tokens: int = 1
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
    from ..runner.kv.contiguous import buffer
    from ..runner.loading import expected
    from ..runner.loading.encoders import is_bidirectional
    from ..runner.loading.headless import is_headless
    from ..runner.loading.load_errors import model_errors
    from ..runner.loading.weights import checked, dtype_of, weight_bytes

    assert request.folder is not None
    folder = Path(request.folder)
    config = folder_checks.check(folder)
    library = mlxlm.connect()
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
    share = memory.PAGES_SHARE if kind == "cuda" else memory.BUDGET_SHARE
    budget = int((usable_bytes - needed) * share) if usable_bytes else 0
    if request.memory is not None:
        memory.check_budget(request.memory, usable_bytes - needed if usable_bytes else None)
    encodes = is_bidirectional(config)
    pages = request.kernels != KernelPolicy.OFF
    found = expected.Expected(Backend.ENCODER, "none")
    if not encodes:
        with model_errors(folder, library):
            found = expected.expected_path(library, module, kind, pages=pages, bits=request.kv_bits or 16)
    backend = found.backend
    cost = (0, 0) if encodes else None if request.kv_bits else kv_cost(found, _WIDTH.get(dtype, _HALF), context)
    token_bytes, row_bytes = cost or (None, None)
    best = Backend.PAGED if kind == "cuda" else Backend.CONTIGUOUS
    return Estimate(
        architecture=str(config["model_type"]),
        parameters=parameters,
        dtype=dtype,
        weight_bytes=needed,
        context=context,
        kv_budget_bytes=budget if request.memory is None else request.memory,
        kv_token_bytes=token_bytes,
        kv_row_bytes=row_bytes,
        kv_least_tokens=buffer.STEP,
        path=_PATHS[backend],
        backend=backend.value,
        best=(backend if encodes else best).value,
        prefixes=found.prefixes,
        why=[f"not {one.backend}: {one.reason}" for one in found.rejected],
        state_bytes=found.state_bytes,
    )


def kv_cost(found: Expected, width: int, context: int) -> tuple[int, int] | None:
    """Return bytes of cache a token and a sequence, `width` bytes a number; None where the layers' attention is not
    known."""
    if found.layers is None:
        return None
    windows = [(window, each) for window, each in found.layers if 0 < window < context]
    token = sum(each for window, each in found.layers if not 0 < window < context)
    return token * width, sum(window * each for window, each in windows) * width + found.state_bytes
