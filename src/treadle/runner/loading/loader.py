"""Loader: a checked model folder into a model in memory. The engine never sees text, so no tokenizer is loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...config import Settings
from ...context_length import context_length
from ...core.compute_path import KernelPolicy, KernelState, KernelStatus
from ...errors import ConfigError, ModelError
from ...installation import version_of
from ..base import Progress
from ..device import memory as mem
from ..device.cuda import keep_mlx_kernels, prepare_graphs
from ..device.cuda_graphs import GraphSwitch, graph_switch, has_switch, library_of_mlx
from ..device.programs import kernel_programs
from ..device.readback import Readback, readback
from ..device.staging import staging_status
from ..kv.backend import Unsupported
from ..mlxlm import MlxLm, connect, unscale_dynamic
from ..pooling import Embedding
from ..sampling.bitmask import masking
from ..sampling.mask_kernel import MaskKernel, mask_kernel
from ..sampling.sampling_kernel import SamplingKernel, sampling_kernel
from .backend_choice import BackendChoice, BackendRequest
from .choose_backend import check_bits, choose
from .compute_report import check_required, compute_path
from .embeddings import embedding_of
from .encoders import choose_encoder, is_bidirectional
from .headless import is_headless
from .load_errors import model_errors
from .model import LoadedModel
from .probe import Probe, probe
from .weights import checked, dtype_of, quantization_of, read_weights

_log = logging.getLogger(__name__)

UNKNOWN_CONTEXT = 32768


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load.

    `name` is its public name (the folder's by default) and `context` shortens its own. `memory` is the byte budget of
    all caches (a share of what the weights leave by default) for up to `max_running` sequences, beside steps of
    `prefill_tokens` tokens of prompts. `prefix_cache` keeps prompts for others, and `kv_bits` 8 stores keys and values
    as int8. With `padded` they are in mlx-lm's caches, whatever the model. `kernels` says which custom kernels are
    used, and `blas` is the state of the BLAS library. `details` are shown to people beside those that the load finds.
    """

    name: str = ""
    context: int | None = None
    memory: int | None = None
    max_running: int = 1
    prefill_tokens: int = Settings.prefill_tokens
    prefix_cache: bool = True
    kv_bits: int | None = None
    padded: bool = False
    kernels: KernelPolicy = KernelPolicy.AUTO
    blas: KernelStatus | None = None
    details: Mapping[str, str] = field(default_factory=dict)

    def request(self, device: str) -> BackendRequest:
        """The request to the choice of a KV backend."""
        return BackendRequest(
            device=device,
            memory=self.memory,
            max_running=self.max_running,
            keep_prefixes=self.prefix_cache,
            kv_bits=self.kv_bits,
            prefill_tokens=self.prefill_tokens,
            padded=self.padded,
            kernels=self.kernels,
        )


def load(folder: Path, *, progress: Progress = lambda stage: None, **options: Any) -> LoadedModel:
    """Load the model in `folder`, its weights included, as `LoadOptions` says, and choose its KV backend.

    Raises StartFailed when mlx-lm does not fit, ModelError when the model can't be loaded or run, ConfigError when
    `context` is longer than the model's, `kv_bits` can't be had, there is no memory for a step, or `kernels` is
    require and not all of them are active.
    """
    wanted = LoadOptions(**options)
    progress("loading mlx-lm")
    device = mem.device()
    library = _prepared(device.kind, wanted.kernels)
    check_bits(wanted.kv_bits, device.kind)
    progress("reading the weights")
    with model_errors(folder, library):
        read = _read(library, folder, device.kind)
    length, assumed = _context(read.config, wanted.context, folder)
    unscale_dynamic(read.module, length)
    progress("measuring the model")
    with model_errors(folder, library):
        found = probe(library, read.module, length, folder)
        choice = _choice(read, found, library, length, wanted, device.kind)
    mx.clear_cache()
    kernels = _step_kernels(found, device.kind, wanted.kernels)
    states = [*kernels.states, *(() if wanted.blas is None else (wanted.blas,))]
    path = compute_path(choice, device.kind, wanted.kernels, states, found.reference)
    name = wanted.name or folder.name
    if wanted.kernels is KernelPolicy.REQUIRE:
        check_required(path, name)
    about = _about(device.name, library, read, assumed, name) | _backend_details(name, choice, wanted)
    vectors = _embedding(folder, library, read, choice)
    model = _loaded(
        read, library, device.kind, found, choice, wanted, name=name, context=length, about=about, embedding=vectors
    )
    masks = kernels.masks or masking(device.kind)
    return replace(
        model,
        draws=kernels.sampling,
        lands=kernels.readback,
        masks=masks,
        staged=kernels.staged,
        graphs=kernels.graphs,
        compute=path,
    )


def _choice(read: _Read, found: Probe, library: MlxLm, context: int, wanted: LoadOptions, device: str) -> BackendChoice:
    """Return the KV backend; the encoder where tokens attend to those behind them. Raises ModelError where that can't
    be had: vectors of a causal pass would be wrong."""
    if not is_bidirectional(read.config):
        return choose(found, wanted.request(device))
    try:
        return choose_encoder(library, read.module, read.config, context, library.selection(read.module))
    except Unsupported as error:
        raise ModelError(f"this embedding model can't be served: {error}; use another model") from error


def _embedding(folder: Path, library: MlxLm, read: _Read, choice: BackendChoice) -> Embedding:
    with model_errors(folder, library):
        return embedding_of(
            folder,
            library,
            read.module,
            choice.config.selection,
            headless=read.headless,
            bidirectional=is_bidirectional(read.config),
        )


def prepare_process(device: str, policy: KernelPolicy) -> None:
    """Set the process up for `device`; call it before MLX first computes in it."""
    if device == "cuda":
        only_decoding = policy is not KernelPolicy.OFF and has_switch(library_of_mlx())
        prepare_graphs(os.environ, mem.most_bytes(device), only_decoding=only_decoding)
        keep_mlx_kernels(os.environ)
        if policy is not KernelPolicy.OFF:
            kernel_programs()


def _prepared(device: str, policy: KernelPolicy) -> MlxLm:
    """mlx-lm, after the process is set up for `device`."""
    prepare_process(device, policy)
    library = connect()
    mem.limit_free_pool(device)
    return library


def _loaded(
    read: _Read,
    library: MlxLm,
    device: str,
    found: Probe,
    choice: BackendChoice,
    options: LoadOptions,
    *,
    name: str,
    context: int,
    about: dict[str, str],
    embedding: Embedding,
) -> LoadedModel:
    return LoadedModel(
        name=name,
        module=read.module,
        library=library,
        architecture=str(read.config["model_type"]),
        vocabulary=found.vocabulary,
        context=context,
        device=device,
        dtype=read.dtype,
        parameters=read.parameters,
        weight_bytes=read.weight_bytes,
        choice=choice,
        kv_dtype="int8" if options.kv_bits and not options.padded else read.dtype,
        max_running=options.max_running,
        embedding=embedding,
        layers=found.reference.layers,
        details={**about, **options.details},
    )


@dataclass(frozen=True)
class _StepKernels:
    """The kernels of a step that are not of a KV backend, as far as they passed their self-tests."""

    sampling: SamplingKernel | None = None
    readback: Readback | None = None
    masks: MaskKernel | None = None
    staged: bool = False
    graphs: GraphSwitch | None = None
    states: tuple[KernelStatus, ...] = ()


def _step_kernels(found: Probe, device: str, policy: KernelPolicy) -> _StepKernels:
    if device != "cuda" or policy is KernelPolicy.OFF:
        return _StepKernels()
    sampling, masks = sampling_kernel(found.vocabulary, found.logits), mask_kernel(found.vocabulary, found.logits)
    back, staging = readback(), staging_status()
    staged = staging.state is KernelState.ACTIVE
    graphs = graph_switch(library_of_mlx())
    states = (sampling.status, masks.status, back.status, staging, graphs.status)
    return _StepKernels(sampling.kernel, back.kernel, masks.kernel, staged, graphs.kernel, states)


@dataclass(frozen=True)
class _Read:
    """A model with its weights in memory. `unscaled` is the kind of scaled positions that its configuration asks for
    and that it lacks; empty where it lacks none. `quantization` is how its weights are stored."""

    module: Any
    config: dict[str, Any]
    parameters: int
    weight_bytes: int
    dtype: str
    headless: bool
    unscaled: str
    quantization: str


def _read(library: MlxLm, folder: Path, kind: str) -> _Read:
    headless = is_headless(folder)
    module, config = library.load(folder, headless=headless)
    unscaled = library.ignored_scaling(module, config)
    parameters = library.parameters(module)
    quantization = quantization_of(module)
    module = checked(library, module, config, folder, kind)
    weight_bytes = read_weights(module, folder, kind)
    return _Read(module, config, parameters, weight_bytes, dtype_of(module), headless, unscaled, quantization)


def _about(device: str, library: MlxLm, read: _Read, assumed: bool, name: str) -> dict[str, str]:
    """Details for people about the model and its libraries, without empty ones; with a warning where its positions are
    not those of its configuration."""
    lines = {"device": device, "mlx": version_of("mlx") or "unknown", "mlx-lm": library.version}
    lines["quantization"] = read.quantization
    if read.config.get("quantize_activations"):
        lines["activations"] = "not quantized, though config.json asks for it"
    lines["context"] = "not in config.json: assumed" if assumed else ""
    if read.unscaled:
        lines["positions"] = (
            f"not scaled: config.json asks for {read.unscaled!r}, which is not known for this architecture"
        )
        _log.warning("%s: positions are %s; long contexts may be misread", name, lines["positions"])
    return {name: line for name, line in lines.items() if line}


def _backend_details(name: str, choice: BackendChoice, options: LoadOptions) -> dict[str, str]:
    """Details for people about mlx-lm's caches, where these serve the model, with a warning; else none."""
    if choice.config.name not in ("padded", "serial"):
        return {}
    reason = choice.reason_against("contiguous")
    if not options.padded:
        _log.warning("%s runs on mlx-lm's caches: %s; decoding is slower for several requests at once", name, reason)
    lines = {"own rows": reason, "not batched": choice.reason_against("padded")}
    return {name: line for name, line in lines.items() if line}


def _context(config: Mapping[str, Any], asked: int | None, folder: Path) -> tuple[int, bool]:
    """The context in tokens, and whether it had to be assumed."""
    places = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    found = [length for part in places if (length := context_length(part)) is not None]
    own = found[0] if found else UNKNOWN_CONTEXT
    if asked is None:
        return own, not found
    if found and asked > own:
        raise ConfigError(
            f"`context` is {asked}, and {folder.name} is made for {own} tokens: give at most that", param="context"
        )
    return asked, False
