"""The owner's side: the specification that crosses to a child process, and the runner and limits made from it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..config import Settings
from ..core.compute_path import KernelPolicy
from ..engine.owner import OwnerLimits
from ..errors import ModelError, spelled
from ..gc_pause import without_collections
from .unused_packages import hide_unused_packages

if TYPE_CHECKING:
    from ..grammar.vocabulary import VocabularyThread
    from ..models.folder import ModelFolder
    from ..runner.base import Progress, Runner, RunnerFactory
    from ..runner.loading.draft import DraftModel
    from ..runner.loading.scorer import ScorerModel


class OwnerSpec(msgspec.Struct, frozen=True):
    """Specification of an owner's runner: plain values only, so that it can cross to a child."""

    folder: str
    name: str
    limits: OwnerLimits
    context: int | None
    memory: int | None
    prefix_cache: bool
    kv_bits: int | None
    threads: int | None
    kernels: str
    structured: str
    speculate: str
    draft: str | None
    draft_name: str
    spec_prefill: str | None
    spec_prefill_name: str
    spec_prefill_keep: float
    spec_prefill_min: int
    log_level: str
    log_format: str
    spelling: dict[str, str]


def owner_spec(settings: Settings, folder: ModelFolder) -> OwnerSpec:
    """Return the specification for `settings` and the model in `folder`."""
    return OwnerSpec(
        folder=str(folder.path),
        name=folder.name,
        limits=OwnerLimits(max_running=settings.max_running, prefill_tokens=settings.prefill_tokens),
        context=settings.context,
        memory=settings.memory,
        prefix_cache=settings.prefix_cache,
        kv_bits=settings.kv_bits,
        threads=settings.threads,
        kernels=settings.kernels,
        structured=settings.structured,
        speculate=settings.speculate,
        draft=None if folder.draft is None else str(folder.draft.path),
        draft_name="" if folder.draft is None else folder.draft.name,
        spec_prefill=None if folder.scorer is None else str(folder.scorer.path),
        spec_prefill_name="" if folder.scorer is None else folder.scorer.name,
        spec_prefill_keep=settings.spec_prefill_keep,
        spec_prefill_min=settings.spec_prefill_min,
        log_level=settings.log_level,
        log_format=settings.log_format,
        spelling=dict(settings.spelling),
    )


def owner_of(arguments: Mapping[str, Any]) -> tuple[RunnerFactory, OwnerLimits]:
    """Return the runner factory and the limits of a child's owner. The entry point of its process."""
    from ..telemetry.logs import adopt_library_loggers, configure

    spec = msgspec.convert(arguments, OwnerSpec)
    configure(spec.log_level, sys.stderr, spec.log_format)
    hide_unused_packages()
    factory = runner_factory(spec, importing=without_collections)

    def build(progress: Progress) -> Runner:
        runner = factory(progress)
        adopt_library_loggers()  # by now everything has been imported
        return runner

    return build, spec.limits


def runner_factory(
    spec: OwnerSpec, *, importing: Callable[[], AbstractContextManager[None]] = nullcontext
) -> RunnerFactory:
    """Return a factory that builds the runner on the thread that calls it; `importing` is entered for the imports. The
    vocabulary for grammars is read beside the weights, by a thread that has ended when the factory returns or raises:
    an interpreter that ends beside it may crash."""

    def build(progress: Progress) -> Runner:
        vocabulary = begin_vocabulary(Path(spec.folder)) if spec.structured == "auto" else None
        try:
            return _runner(spec, vocabulary, importing, progress)
        finally:
            if vocabulary is not None:
                vocabulary.join()

    return build


def _runner(
    spec: OwnerSpec,
    vocabulary: VocabularyThread | None,
    importing: Callable[[], AbstractContextManager[None]],
    progress: Progress,
) -> Runner:
    """Build the runner. BLAS is chosen before MLX is imported."""
    with importing():
        from ..runner.device import blas

        report = blas.prepare(spec.threads)
        from ..runner.device.require_mlx import require_mlx

        require_mlx()
        from ..runner.device import cpu_header, memory

        if memory.device().kind == "cpu":
            cpu_header.prepare()
        from ..runner.build import build as build_runner

    with spelled(spec.spelling):
        return build_runner(
            spec.folder,
            name=spec.name,
            context=spec.context,
            memory=spec.memory,
            prefix_cache=spec.prefix_cache,
            kv_bits=spec.kv_bits,
            kernels=KernelPolicy(spec.kernels),
            speculate=spec.speculate,
            draft=_draft(spec),
            spec_prefill=_scorer(spec),
            blas=report,
            vocabulary=vocabulary,
            **msgspec.structs.asdict(spec.limits),
            progress=progress,
        )


def _draft(spec: OwnerSpec) -> DraftModel | None:
    """Return the draft model, or the EAGLE-3 head, if there is one. Raises ModelError."""
    if spec.draft is None:
        return None
    from ..runner.loading.draft import DraftModel

    if (head := _checked_head(Path(spec.draft))) is not None:
        return DraftModel(head, spec.draft_name, is_head=True)
    return DraftModel(_checked(spec, spec.draft, "draft"), spec.draft_name)


def _checked_head(folder: Path) -> Path | None:
    """Return the folder that `draft` names, checked, if it holds an EAGLE-3 head; else None. Raises ModelError."""
    from ..models import folder_checks

    try:
        if not folder_checks.is_head(folder):
            return None
        folder_checks.check_head(folder)
    except ModelError as error:
        raise ModelError(f"`draft` can't be used: {error}", param="draft") from error
    return folder


def _scorer(spec: OwnerSpec) -> ScorerModel | None:
    """Return the scorer, if there is one. Raises ModelError."""
    if spec.spec_prefill is None:
        return None
    from ..runner.loading.scorer import ScorerModel

    folder = _checked(spec, spec.spec_prefill, "spec_prefill")
    return ScorerModel(folder, spec.spec_prefill_name, spec.spec_prefill_keep, spec.spec_prefill_min)


def _checked(spec: OwnerSpec, path: str, param: str) -> Path:
    """Return the folder of a model beside the served one, which setting `param` names: it is checked, and its tokens
    are compared with the served model's. Raises ModelError."""
    from ..models import folder_checks
    from ..text.same_tokens import check_same_tokens

    folder = Path(path)
    try:
        folder_checks.check(folder)
    except ModelError as error:
        raise ModelError(f"`{param}` can't be used: {error}", param=param) from error
    check_same_tokens(Path(spec.folder), folder, param)
    return folder


def begin_vocabulary(folder: Path) -> VocabularyThread:
    """Begin to read the vocabulary of the model in `folder`."""
    from ..grammar.vocabulary import VocabularyThread, read_vocabulary
    from ..text.folder import FolderConfig

    files = FolderConfig.read(folder)
    size = files.vocabulary()
    return VocabularyThread(
        partial(
            read_vocabulary,
            folder / "tokenizer.json",
            size=size,
            eos_token_ids=files.eos_ids(size or sys.maxsize),
            added=files.declared_tokens(),
        )
    )
