"""Loader of a model's MTP head, out of the same folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..base import Progress
from ..mlxlm import DraftHead, NoHead, family_of, finish_head
from .config_oddities import read_config
from .headed import HeadedModel, HeadKind, reason_against, with_head
from .model import LoadedModel
from .weights import for_device, read_weights

MTP = HeadKind("mtp", "MTP head", "its MTP weights")


def may_have_head(model: LoadedModel) -> bool:
    """Whether MTP heads of a model's architecture are known, and could be used beside it."""
    return family_of(model.module) is not None and not reason_against(model)


def load_head(
    target: LoadedModel, folder: Path, options: Mapping[str, Any], progress: Progress = lambda stage: None
) -> HeadedModel:
    """Load the MTP head in `folder`, that of `target`, which was loaded with `options`, and divide the memory for
    caches. Details of the target describe it. Raises NoHead where there is none that can be used."""
    if reason := reason_against(target):
        raise NoHead(reason)
    progress("reading the MTP head")
    headed = with_head(MTP, target, folder, options, partial(_read, target, folder))
    headed.target.details[MTP.title] = headed.about
    return headed


def _read(target: LoadedModel, folder: Path) -> tuple[DraftHead, int]:
    """Return the head in `folder`, in memory, and the bytes of its weights."""
    library = target.library
    module = library.load_head(folder, target.module, read_config(folder))
    module = for_device(module, library, library.parameters(module), target.device)
    nbytes = read_weights(module, folder, target.device)
    return finish_head(module, target.module), nbytes
