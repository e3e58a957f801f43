"""Embeddings of a loaded model: the size of its vectors, and how they are pooled."""

from __future__ import annotations

import logging
from typing import Any

from ..kv.backend import Unsupported
from ..mlxlm import MlxLm, Selection
from ..pooling import Embedding
from .hidden_states import hidden_size

_log = logging.getLogger(__name__)


def embedding_of(name: str, library: MlxLm, module: Any, selection: Selection | None) -> Embedding:
    """Return the embeddings of a model that generates text: its last hidden states, pooled as a request asks."""
    try:
        return Embedding(dimensions=hidden_size(library, module, selection))
    except Unsupported as error:
        _log.info("%s gives no embeddings, and requests for them are refused: %s", name, error)
        return Embedding(unavailable=str(error))
