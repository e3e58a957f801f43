"""Every backend that a tiny random model of an architecture can take, chosen as the loader chooses.

CUDA is stood for by kernels on the host (`tests.support.cuda`), and by MLX's operations for recurrent layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.architectures import Config, new_module
from tests.support.cuda import ReferenceKernels
from treadle.runner.kv.padded.backend import PaddedConfig
from treadle.runner.kv.paged.backend import PagedConfig
from treadle.runner.loading import candidates
from treadle.runner.loading.backend_choice import BackendChoice, BackendRequest
from treadle.runner.loading.choose_backend import choose
from treadle.runner.loading.model import LoadedModel
from treadle.runner.loading.probe import Probe, probe
from treadle.runner.mlxlm import connect
from treadle.runner.recurrent.operations import RecurrentOperations

CONTEXT = 2048
MEMORY = 1 << 25
MAX_RUNNING = 8


def chosen(config: Config, device: str, *, padded: bool = False) -> LoadedModel:
    """A random model of `config` with the backend that the loader chooses on `device`. Raises whatever the model's code
    does."""
    found = probe(connect(), new_module(config), CONTEXT, Path("random"))
    request = BackendRequest(device, MEMORY, MAX_RUNNING, keep_prefixes=True, padded=padded)
    paged = partial(candidates.paged, recurrences=RecurrentOperations)
    with mock.patch.object(candidates, "paged", paged):
        return _loaded(config, found, choose(found, request, ReferenceKernels), device)


def _loaded(config: Config, found: Probe, choice: BackendChoice, device: str) -> LoadedModel:
    return LoadedModel(
        name="random",
        module=found.reference.module,
        library=found.reference.library,
        architecture=str(config["model_type"]),
        vocabulary=found.vocabulary,
        context=CONTEXT,
        device=device,
        dtype="float32",
        parameters=0,
        weight_bytes=0,
        choice=choice,
        kv_dtype="float32",
        max_running=MAX_RUNNING,
        layers=found.reference.layers,
    )


def every_path(config: Config) -> Iterator[tuple[str, LoadedModel]]:
    """Each path by its name, best first: a fresh model for each."""
    on_cuda = chosen(config, "cuda")
    if isinstance(on_cuda.choice.config, PagedConfig):
        if passes := passes_of(on_cuda):
            yield f"paged, {passes}", on_cuda
            on_cuda = _with(chosen(config, "cuda"), decoder=None, compiled=False)
        yield "paged", on_cuda
    elsewhere = chosen(config, "cpu")
    if elsewhere.choice.config.name == "contiguous":
        yield "contiguous", elsewhere
    padded = chosen(config, "cpu", padded=True)
    yield padded.choice.config.name, padded
    if isinstance(padded.choice.config, PaddedConfig) and padded.choice.config.batched:
        yield "serial", _with(padded, batched=False, shared_prefill=False)


def passes_of(model: LoadedModel) -> str:
    """How passes are computed other than by the model's own layers one by one: "fused", "compiled", or empty."""
    config: Any = model.choice.config
    return "fused" if config.fused else "compiled" if getattr(config, "compiled", False) else ""


def _with(model: LoadedModel, **changed: Any) -> LoadedModel:
    """`model` with another configuration of its backend."""
    config: Any = model.choice.config
    return replace(model, choice=replace(model.choice, config=replace(config, **changed)))
