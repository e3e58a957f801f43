"""Candidates for a model's KV backend: each function returns a config, or raises Unsupported with the reason."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..device.properties import DeviceProperties
from ..fused.decoder import FusedDecoder
from ..fused.layer import Part
from ..kv.backend import KvConfig, Unsupported
from ..kv.contiguous.backend import ContiguousConfig
from ..kv.contiguous.buffer import STEP
from ..kv.cost import KvCost
from ..kv.paged.backend import PagedConfig
from ..kv.paged.kernels import Kernels
from ..kv.paged.memory import LayerConfig
from ..kv.paged.paged_pass import PAGE
from ..layers.compiled_module import CompiledModule
from ..mlxlm import MlxLm, narrow_last_layer
from ..recurrent.kernels import NO_KERNEL, RecurrentKernels
from ..recurrent.layer import Recurrences
from .attention_shape import attention_shapes, latent_layers
from .backend_choice import BackendRequest, Rejection
from .backend_self_test import SelfTestFailed, pages_for, self_test
from .budget import check_budget
from .reference import Reference, Trial
from .routed_layers import known_attention, routed_layers

_log = logging.getLogger(__name__)


def contiguous(
    reference: Reference, cost: KvCost, budget: int, request: BackendRequest, rejected: list[Rejection]
) -> ContiguousConfig:
    """Buffers of each sequence's own, within `budget` bytes, tested with the reference's module. Its last layer is
    narrowed; where that can't be, the reason is added to `rejected`."""
    library, module = reference.library, reference.module
    routed = routed_layers(library, module)
    with known_attention():
        latent = latent_layers(library, module, routed.layout)
    if routed.recurrent is not None:
        cost = replace(cost, row_bytes=cost.row_bytes + routed.recurrent.slot_bytes)
    config = ContiguousConfig(
        routed.windows,
        library.selection(module),
        request.device,
        cost,
        budget,
        cost.blocks(budget, request.max_running, STEP),
        request.keep_prefixes,
        latent,
        routed.chunked,
        routed.recurrent,
        request.max_running,
        routed.layout,
    )
    most = budget // max(1, cost.token_bytes) // 2
    tested, trials = replace(config, keep_prefixes=False, max_running=0), reference.trials(most)
    narrow_last_layer(module, config.selection)
    try:
        _test_with_faster_layers(reference, replace(tested, narrows=True), trials)
    except SelfTestFailed as error:
        _test_with_faster_layers(reference, tested, trials)
        rejected.append(Rejection("narrowed last layer", str(error), failed=True))
        return config
    return replace(config, narrows=True)


def paged(
    reference: Reference,
    budget: int,
    rejected: list[Rejection],
    *,
    keep_prefixes: bool,
    bits: int = 16,
    kernels: type[Kernels] = Kernels,
    recurrences: Callable[[], Recurrences] = RecurrentKernels,
    max_running: int = 0,
    step_tokens: int = 0,
) -> PagedConfig:
    """As many pages as `budget` bytes hold, tested with the reference's module. Its layers are fused; where that can't
    be, the reason is added to `rejected`. With 8 `bits` keys and values are stored as int8. Steps compute at most
    `step_tokens` tokens of `max_running` sequences (0: not known). Raises Unsupported, and ConfigError where `budget`
    is too small."""
    if not budget:
        raise Unsupported("nothing says how much memory there is for pages")
    config = page_layers(reference.library, reference.module, bits, kernels)
    config = replace(config, max_running=max_running, step_tokens=step_tokens, context=reference.context)
    config = replace(config, recurrences=recurrences()).with_memory(budget)
    check_budget("the model", budget, config.least_memory(max_running))  # the tests take minutes with some models
    if config.int8:
        reference = reference.for_int8()
    try:
        fused = _fused(reference, config, rejected)
    except Unsupported as error:
        reference.layers.restrict(None)
        failed = isinstance(error, SelfTestFailed)
        _log.log(logging.WARNING if failed else logging.INFO, "layers are not fused: %s; steps are slower", error)
        rejected.append(Rejection("fused layers", str(error), failed))
    else:
        return replace(fused, keep_prefixes=keep_prefixes)
    _test_pages(reference, config)
    return replace(_with_compiled_passes(reference, config, rejected), keep_prefixes=keep_prefixes)


def plain_pages(
    reference: Reference, budget: int, *, max_running: int, kernels: type[Kernels] = Kernels
) -> PagedConfig:
    """As many pages as `budget` bytes hold, tested with the reference's module, whose layers are neither fused nor
    compiled. No prefixes are kept."""
    config = page_layers(reference.library, reference.module, 16, kernels)
    config = replace(config, max_running=max_running, context=reference.context).with_memory(budget)
    _test_pages(reference, config)
    return config


def page_layers(library: MlxLm, module: Any, bits: int, kernels: type[Kernels]) -> PagedConfig:
    """The layers of `module` over pages, without any page yet. Raises Unsupported."""
    routed = routed_layers(library, module)
    if routed.recurrent is not None and not routed.recurrent.kernels:
        raise Unsupported(NO_KERNEL)
    with known_attention():
        shapes = attention_shapes(library, module, routed.layout)
    chip = DeviceProperties.of(mx.device_info())
    made = {shape: kernels.of(shape, PAGE, bits, chip) for shape in dict.fromkeys(shapes)}
    layers = []
    for window, chunked, shape in zip(routed.windows, routed.chunked, shapes, strict=True):
        if chunked and window % PAGE:
            raise Unsupported(f"its attention is in chunks of {window} tokens, which is no multiple of {PAGE}")
        layers.append(LayerConfig(window, made[shape], chunked))
    return PagedConfig(
        layers,
        library.selection(module),
        pages=0,
        keep_prefixes=False,
        recurrent=routed.recurrent,
        layout=routed.layout,
    )


def _fused(reference: Reference, config: PagedConfig, rejected: list[Rejection]) -> PagedConfig:
    """`config` with fused layers that passed their test. Where kernels of some part of them are at fault, that part
    stays the module's own, and the reason is added to `rejected`. Raises Unsupported."""
    fused = _with_fused_layers(reference, config)
    try:
        _test_fused(reference, fused)
    except SelfTestFailed as error:
        parts = [] if fused.decoder is None else sorted(fused.decoder.parts)
        for own in [*([part] for part in parts), *([parts] if len(parts) > 1 else [])]:
            other = _with_fused_layers(reference, config, own)
            with contextlib.suppress(SelfTestFailed):
                _test_fused(reference, other)
                reason = f"{' and '.join(own)} by kernels: {error}"
                _log.warning("%s; the model's own modules are used for it, which are slower", reason)
                rejected.append(Rejection("fused layers", reason, failed=True))
                return other
        raise
    return fused


def _with_fused_layers(reference: Reference, config: PagedConfig, own: Collection[Part] = ()) -> PagedConfig:
    """`config` with fused layers, but for the parts that are the module's `own`. Raises Unsupported."""
    if not config.layers:
        raise Unsupported("no layer has keys and values")
    kernels = [layer.kernels for layer in config.layers]
    try:
        traced = reference.layers.traced
        decoder = FusedDecoder(reference.module, kernels, config.selection, traced, config.layout, own)
    except (NotImplementedError, AttributeError) as error:
        raise Unsupported(str(error)) from error
    return replace(config, decoder=decoder)


def _test_fused(reference: Reference, config: PagedConfig) -> None:
    """Test fused layers, with faster layers inside of the parts that stay the module's own."""
    assert config.decoder is not None
    reference.layers.restrict(config.decoder.own_modules)
    _test_pages(reference, config)


def _with_compiled_passes(reference: Reference, config: PagedConfig, rejected: list[Rejection]) -> PagedConfig:
    """`config` with the module's own passes compiled; as it is where that can't be, with the reason in `rejected`."""
    if not config.layers:
        rejected.append(Rejection("compiled passes", "no layer has keys and values"))
        return config
    compile = config.layers[0].kernels.compile
    decoder = CompiledModule(reference.module, config.selection, reference.layers, compile)
    compiled = replace(config, decoder=decoder, compiled=True)
    trials = reference.trials(config.pages * PAGE // 2)
    try:
        self_test(reference, replace(compiled, pages=pages_for(trials), max_running=0), trials)
    except SelfTestFailed as error:
        _log.warning("the model's passes are not compiled: %s; steps of small models are slower", error)
        rejected.append(Rejection("compiled passes", str(error), failed=True))
        return config
    if decoder.refused:
        rejected.append(Rejection("compiled passes", decoder.refused))
        return config
    return compiled


def _test_pages(reference: Reference, config: PagedConfig) -> None:
    trials = reference.trials(config.pages * PAGE // 2)
    _test_with_faster_layers(reference, replace(config, pages=pages_for(trials), max_running=0), trials)


def _test_with_faster_layers(reference: Reference, config: KvConfig, trials: Sequence[Trial]) -> None:
    """Test a backend with the module's faster layers; where only these are at fault, they are not used."""
    layers = reference.layers
    layers.install()
    try:
        self_test(reference, config, trials)
    except SelfTestFailed as error:
        if not len(layers):
            raise
        with layers.originals():
            self_test(reference, config, trials)
        layers.reject(str(error))
