"""A model's layers as the backends' own caches see them, with attention and recurrences left to these caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..device.self_test import FAULTS
from ..kv.backend import Unsupported
from ..kv.cache_layout import CacheKind, CacheLayout
from ..kv.recurrent_group import RecurrentConfig
from ..mlxlm import MlxLm
from .attention_shape import attending


class RoutedLayers(NamedTuple):
    """The window of each layer with attention, 0 for none, and whether it begins at multiples of its length; the
    recurrent layers (None: there are none); and the arrangement of the caches of both."""

    windows: Sequence[int]
    chunked: Sequence[bool]
    recurrent: RecurrentConfig | None
    layout: CacheLayout


def routed_layers(library: MlxLm, module: Any) -> RoutedLayers:
    """The layers of `module`, whose attention and recurrences are left to the layers' caches from now on. Raises
    Unsupported."""
    windows = library.layer_windows(module)
    if windows is None:
        raise Unsupported("it keeps more than keys, values and recurrent states")
    kinds = [CacheKind.RECURRENT if window is None else CacheKind.ATTENTION for window in windows]
    layout, recurrent = CacheLayout(kinds, library.list_sizes(module)), None
    with known_attention():
        if CacheKind.ATTENTION in kinds and not library.route_attention(module):
            raise Unsupported("its attention does not go through mlx-lm's function")
        if CacheKind.RECURRENT in kinds:
            states = library.recurrent_states(module)
            recurrent = RecurrentConfig([layer for layer in states if layer is not None])
        layout = attending(library, module, layout)
    some = [
        (window, chunked)
        for window, chunked, kind in zip(windows, library.chunked(module), layout.kinds, strict=True)
        if window is not None and kind is CacheKind.ATTENTION
    ]
    return RoutedLayers([window for window, _ in some], [chunked for _, chunked in some], recurrent, layout)


@contextmanager
def known_attention() -> Iterator[None]:
    """Make whatever a model's code raises a reason against a backend."""
    try:
        yield
    except Unsupported:
        raise
    except NotImplementedError as error:
        raise Unsupported(str(error)) from error
    except FAULTS as error:
        raise Unsupported(f"its attention is not known ({type(error).__name__}: {error})") from error
