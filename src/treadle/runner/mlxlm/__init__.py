"""Adapter to mlx-lm, the only package that uses it.

mlx-lm changes its inner names in each minor version, so `connect` checks every name, argument and behaviour that this
server relies on (`compatibility`), and a start fails by name instead of a request failing later. Two side effects of
mlx-lm are avoided: importing it lowers this process's limit of open files, and its generators set a wired limit (none
are used).
"""

from __future__ import annotations

from .axes import RotaryAxes, rotations_of, turning_by
from .caches import (
    Caches,
    begin_padded,
    can_trim,
    end_padded,
    extend,
    extract,
    keep_rows,
    kv_bytes,
    merge,
    shallow_copies,
    states,
    trim,
    window_of,
)
from .draft_head import DraftHead, NoHead
from .dynamic_rotations import unscale_dynamic
from .eagle import EagleShape, eagle_shape, finish_eagle
from .fetched import FETCHED
from .hooks import SelectingNorm, Selection, Window, keeping
from .injection import Injection, embedding_of, injecting
from .last_layer import LayerWritten, narrow_last_layer
from .latent import identity
from .library import MlxLm, connect
from .mtp import family_of, finish_head
from .older_fields import with_older_fields
from .recurrent import RecurrentState, defer_norms, has_convolution
from .taps import tap_layers

__all__ = [
    "FETCHED",
    "Caches",
    "DraftHead",
    "EagleShape",
    "Injection",
    "LayerWritten",
    "MlxLm",
    "NoHead",
    "RecurrentState",
    "RotaryAxes",
    "SelectingNorm",
    "Selection",
    "Window",
    "begin_padded",
    "can_trim",
    "connect",
    "defer_norms",
    "eagle_shape",
    "embedding_of",
    "end_padded",
    "extend",
    "extract",
    "family_of",
    "finish_eagle",
    "finish_head",
    "has_convolution",
    "identity",
    "injecting",
    "keep_rows",
    "keeping",
    "kv_bytes",
    "merge",
    "narrow_last_layer",
    "rotations_of",
    "shallow_copies",
    "states",
    "tap_layers",
    "trim",
    "turning_by",
    "unscale_dynamic",
    "window_of",
    "with_older_fields",
]
