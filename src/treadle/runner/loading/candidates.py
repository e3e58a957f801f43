"""Candidates for a model's KV backend: each function returns a config, or raises Unsupported with the reason."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..device.properties import DeviceProperties
from ..fused.decoder import FusedDecoder
from ..kv.backend import Unsupported
from ..kv.contiguous.backend import ContiguousConfig
from ..kv.contiguous.buffer import STEP
from ..kv.cost import KvCost
from ..kv.paged.backend import PAGE, PagedConfig
from ..kv.paged.kernels import AttentionShape, Kernels
from ..mlxlm import MlxLm
from .attention_shape import attention_shape
from .backend_choice import BackendRequest, Rejection
from .backend_self_test import FAULTS, SELF_TEST_PAGES, SelfTestFailed, self_test

_log = logging.getLogger(__name__)


def contiguous(library: MlxLm, module: Any, cost: KvCost, budget: int, request: BackendRequest) -> ContiguousConfig:
    """Buffers of each sequence's own, within `budget` bytes, tested with `module`."""
    config = ContiguousConfig(
        routed_windows(library, module),
        library.selection(module),
        request.device,
        cost,
        budget,
        cost.blocks(budget, request.max_running, STEP),
        request.keep_prefixes,
    )
    self_test(library, module, replace(config, keep_prefixes=False))
    return config


def paged(
    library: MlxLm,
    module: Any,
    budget: int,
    rejected: list[Rejection],
    *,
    keep_prefixes: bool,
    bits: int = 16,
    kernels: type[Kernels] = Kernels,
) -> PagedConfig:
    """As many pages as `budget` bytes hold, tested with `module`. Its layers are fused; where that can't be, the reason
    is added to `rejected`. With 8 `bits` keys and values are stored as int8."""
    config = _pages(library, module, budget, bits, kernels)
    try:
        fused = _with_fused_layers(module, config)
        _test_pages(library, module, fused)
    except Unsupported as error:
        level = logging.WARNING if isinstance(error, SelfTestFailed) else logging.INFO
        _log.log(level, "the layers' kernels are not fused: %s; steps are slower", error)
        rejected.append(Rejection("fused layers", str(error)))
    else:
        return replace(fused, keep_prefixes=keep_prefixes)
    _test_pages(library, module, config)
    return replace(config, keep_prefixes=keep_prefixes)


def _pages(library: MlxLm, module: Any, budget: int, bits: int, kernels: type[Kernels]) -> PagedConfig:
    if not budget:
        raise Unsupported("nothing says how much memory there is for pages")
    windows = routed_windows(library, module)
    made = _kernels(_shape(module, len(windows)), bits, kernels)
    config = PagedConfig(windows, made, library.selection(module), pages=0, keep_prefixes=False)
    return replace(config, pages=budget // config.page_bytes)


def _with_fused_layers(module: Any, config: PagedConfig) -> PagedConfig:
    try:
        return replace(config, decoder=FusedDecoder(module, config.kernels, config.selection))
    except (NotImplementedError, AttributeError) as error:
        raise Unsupported(str(error)) from error


def _test_pages(library: MlxLm, module: Any, config: PagedConfig) -> None:
    self_test(library, module, replace(config, pages=SELF_TEST_PAGES))


def routed_windows(library: MlxLm, module: Any) -> list[int]:
    """The window of each layer, 0 for none, with attention left to the layers' caches from now on."""
    windows = library.windows(module)
    if windows is None:
        raise Unsupported("it keeps more than keys and values")
    if not library.route_attention(module):
        raise Unsupported("its attention does not go through mlx-lm's function")
    return windows


def _shape(module: Any, layers: int) -> AttentionShape:
    try:
        return attention_shape(module, layers)
    except FAULTS as error:
        raise Unsupported(f"its attention is not known ({type(error).__name__}: {error})") from error


def _kernels(shape: AttentionShape, bits: int, kernels: type[Kernels]) -> Kernels:
    """The kernels for such attention on this device."""
    kernels.check(shape)
    group = shape.query_heads // shape.heads
    chip = DeviceProperties.of(mx.device_info())
    made = kernels(shape.heads, shape.dim, PAGE, shape.dtype, bits, rep=group, chip=chip)
    made.check_memory()
    return made
