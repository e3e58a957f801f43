"""Embeddings of a loaded model: the size of its vectors, and how they are pooled."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ...core.messages import Pooling
from ...errors import ModelError
from ..kv.backend import Unsupported
from ..mlxlm import MlxLm, Selection
from ..pooling import Embedding
from .hidden_states import hidden_size
from .sentence_transformers import PoolingModules, has_modules, read_modules

_log = logging.getLogger(__name__)


def embedding_of(
    folder: Path, library: MlxLm, module: Any, selection: Selection | None, *, headless: bool, bidirectional: bool
) -> Embedding:
    """Return the embeddings of the model in `folder`.

    One that generates text is pooled as a request asks. One of sentence-transformers, or without an output head, is for
    embeddings alone: raises ModelError where it gives none.
    """
    only = headless or bidirectional or has_modules(folder)
    described = read_modules(folder) if has_modules(folder) else None
    if bidirectional and described is None:
        raise ModelError(f"{folder} has no modules.json, which says how its embeddings are pooled: download it again")
    try:
        size = hidden_size(library, module, selection)
    except Unsupported as error:
        if only:
            raise ModelError(f"{folder} is for embeddings alone, and gives none: {error}") from error
        _log.info("%s gives no embeddings, and requests for them are refused: %s", folder.name, error)
        return Embedding(unavailable=str(error))
    if described is None:
        return Embedding(dimensions=size, poolings=tuple(Pooling), only=only)
    return Embedding(
        dimensions=_dimensions(folder, described, size),
        poolings=(described.pooling,),
        dense=described.dense,
        only=True,
        whole=bidirectional,
    )


def _dimensions(folder: Path, described: PoolingModules, size: int) -> int:
    """Return the size of vectors behind the last layer. Raises ModelError where layers do not fit each other."""
    for layer in described.dense:
        outputs, inputs = layer.weight.shape
        if inputs != size:
            raise ModelError(f"{folder}: a Dense layer takes {inputs} numbers and gets {size}: download it again")
        size = int(outputs)
    return size
