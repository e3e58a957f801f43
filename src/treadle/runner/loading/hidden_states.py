"""Hidden states of a model behind its last norm: whether they can be had, and their size."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .. import mlxlm
from ..device.self_test import FAULTS
from ..kv.backend import Unsupported
from ..mlxlm import MlxLm, Selection

_TOKENS = (1, 2, 3, 4)


def hidden_size(library: MlxLm, module: Any, selection: Selection | None) -> int:
    """Return the size of the hidden states that `selection` keeps, which a short prompt was run for. Raises Unsupported
    where there are none: the module's last norm is not known, or not computed exactly once a pass."""
    if selection is None:
        raise Unsupported("the module before its output head is not known")
    try:
        states = _states(library, module, selection)
    except FAULTS as error:
        raise Unsupported(f"its hidden states can't be read ({type(error).__name__}: {error})") from error
    if states.ndim != 2 or states.shape[0] != len(_TOKENS):
        raise Unsupported(f"its hidden states have shape {states.shape} for {len(_TOKENS)} tokens")
    return int(states.shape[1])


def _states(library: MlxLm, module: Any, selection: Selection) -> Any:
    with mlxlm.keeping(selection, mx.arange(len(_TOKENS))):
        module(mx.array([_TOKENS], mx.int32), cache=library.new_caches(module))
    states = selection.take()
    mx.eval(states)
    return states
