"""Whether a model's rows can be kept in a layout of this server's own, found out by running some."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from ..base import RunnerBroken
from ..device.guard import mlx_runtime
from ..device.properties import DeviceProperties
from ..device.staging import Staging, direct
from ..forward.ragged import ForwardPass, Layout, RowSegment
from ..fused.decoder import FusedDecoder
from ..kv.backend import FlatRows
from ..kv.contiguous.backend import ContiguousLayout
from ..kv.paged.backend import PAGE, PagedLayout
from ..kv.paged.kernels import AttentionShape, Kernels
from ..mlxlm import MlxLm, Selection

_log = logging.getLogger(__name__)

TOLERANCE = 0.25
"""Mean difference over the logits' spread: half precision stays far below, a wrong position goes far above."""

_FAULTS = (ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, RunnerBroken)
"""What a model's code raises that is used in another way than its author thought of, or a kernel's compiler."""
_PROMPTS = (tuple(range(1, 38)), (8, 9), (10, 11, 12, 13))
_SPLITS = (19, 1, 2)
_NEXT = (14, 15, 16)
_PROBE_PAGES = sum(-(-(len(prompt) + 1) // PAGE) for prompt in _PROMPTS)


@dataclass(frozen=True)
class Own:
    """How a model's rows are kept: `new_layout` makes an empty layout, `selection` says what its head sees. `decoder`
    stands for the model in a pass, where it is not the model itself. Where there are pages, one takes `page_bytes` in
    all layers, `pages` makes a layout of so many that keeps prefixes or does not, and `plain` says whether they hold
    what the model computes, or whole numbers of 8 bits for it."""

    kind: str
    selection: Selection | None
    new_layout: Callable[[], Layout]
    decoder: Any | None = None
    page_bytes: int = 0
    pages: Callable[[int, bool], Layout] | None = None
    plain: bool = True

    def new_rows(self, module: Any) -> FlatRows:
        """Rows of `module`, none yet."""
        return self.rows_in(self.new_layout(), module)

    def rows_in(self, layout: Layout, module: Any) -> FlatRows:
        """Rows of `module` in an empty layout."""
        put = Staging().put if self.page_bytes else direct
        return FlatRows(layout, ForwardPass(self.decoder or module, layout, self.selection, put))


def _windows(library: MlxLm, module: Any) -> list[int] | str:
    """How far back each layer sees, with attention left to the caches from now on; or why it can't be."""
    windows = library.windows(module)
    if windows is None:
        return "it keeps more than keys and values"
    if not library.route_attention(module):
        return "its attention does not go through mlx-lm's function"
    return windows


def stock(library: MlxLm, module: Any, *, blocks: int, budget: int, keeps: bool, device: str) -> Own | str:
    """`module`'s rows in buffers of their own, or why that can't be."""
    windows = _windows(library, module)
    if isinstance(windows, str):
        return windows

    def layout(keeps: bool = keeps) -> Layout:
        return ContiguousLayout(windows, blocks=blocks, budget=budget, keeps=keeps, plain=device == "cpu")

    own = Own("rows", library.selection(module), layout)
    return why_not(library, module, own, lambda: layout(keeps=False)) or own


def paged(
    library: MlxLm, module: Any, *, budget: int, keeps: bool, bits: int = 16, using: type[Kernels] = Kernels
) -> Own | str:
    """`module`'s rows in as many pages, for kernels for CUDA to read in place, as `budget` bytes hold (none, where that
    is less than one takes); or why that can't be. With 8 `bits` keys and values are kept as whole numbers."""
    if not budget:
        return "nothing says how much memory there is for pages"
    windows = _windows(library, module)
    if isinstance(windows, str):
        return windows
    try:
        shapes = set(_shapes(module, len(windows)))
    except _FAULTS as error:
        return f"its attention is not known ({type(error).__name__}: {error})"
    if len(shapes) > 1:
        return "its layers have different heads"
    (shape,) = shapes
    if reason := using.fits(shape):
        return reason
    chip = DeviceProperties.of(mx.device_info())
    kernels = using(shape.heads, shape.dim, PAGE, shape.dtype, bits, rep=shape.query_heads // shape.heads, chip=chip)
    if kernels.too_large:
        return kernels.too_large
    page_bytes = len(windows) * kernels.page_bytes

    def own_with(decoder: FusedDecoder | None) -> Own:
        def layout(pages: int, keeps: bool) -> Layout:
            return PagedLayout(windows, kernels, pages=pages, keeps=keeps, in_sizes=decoder is not None)

        whole = partial(layout, budget // page_bytes, keeps)
        return Own("pages", selection, whole, decoder, page_bytes, layout, plain=not kernels.small)

    def refused(own: Own) -> str:
        assert own.pages is not None
        return why_not(library, module, own, partial(own.pages, _PROBE_PAGES, False))

    selection = library.selection(module)
    try:
        fused = own_with(FusedDecoder(module, kernels, selection))
    except (NotImplementedError, AttributeError) as error:
        _log.info("the layers' kernels are not fused: %s", error)
    else:
        if not (reason := refused(fused)):
            return fused
        _log.warning("the layers' kernels are not fused: %s", reason)
    own = own_with(None)
    return refused(own) or own


class _Recorder:
    """A cache that only looks at what a layer's attention is."""

    offset = 0

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.queries: Any = None

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        self.keys, self.values = keys, values
        return keys, values

    def attend(self, queries: Any, scale: float, window: int, sinks: Any | None) -> Any:
        if sinks is not None:
            raise NotImplementedError("the kernels know no attention sinks")
        self.queries = queries
        return queries

    @property
    def shape(self) -> AttentionShape:
        if self.queries is None or self.values.shape != self.keys.shape:
            raise NotImplementedError("a layer's keys and values differ in shape, or are shared")
        _, heads, _, dim = self.keys.shape
        return AttentionShape(heads, self.queries.shape[1], dim, self.keys.dtype)


def _shapes(module: Any, layers: int) -> list[AttentionShape]:
    recorders = [_Recorder() for _ in range(layers)]
    module(mx.array([[1]], mx.int32), cache=recorders)
    return [recorder.shape for recorder in recorders]


def why_not(library: MlxLm, module: Any, own: Own, small: Callable[[], Layout]) -> str:
    """Run a few rows, in pieces and together, in the layout `small`; why that did not give what each gives alone."""
    layout: Layout | None = None
    try:
        with mlx_runtime("trying the model"):
            layout = small()
            alone = [_alone(library, module, *row) for row in zip(_PROMPTS, _SPLITS, _NEXT, strict=True)]
            together = _together(own.rows_in(layout, module))
            mx.eval(alone, together)
            if isinstance(layout, PagedLayout) and layout.copies_wrongly():
                return "a page's copy is another one"
    except _FAULTS as error:
        return f"rows in one pass failed ({type(error).__name__}: {error})"
    finally:
        if layout is not None:
            layout.close()
    for expected, found in zip(alone, together, strict=True):
        expected, found = expected.astype(mx.float32), found.astype(mx.float32)
        if expected.shape != found.shape:
            return f"rows in one pass gave logits {found.shape} and not {expected.shape}"
        if not (mx.mean(mx.abs(found - expected)) <= TOLERANCE * mx.std(expected)).item():
            return "rows gave other logits in one pass than alone"
    return ""


def _alone(library: MlxLm, module: Any, prompt: Sequence[int], split: int, token: int) -> Any:
    """Logits (3, V) after the first `split` tokens of a prompt, after all of it and after one more token."""
    caches = library.new_caches(module)
    first = module(mx.array([prompt], mx.int32), cache=caches)[0]
    second = module(mx.array([[token]], mx.int32), cache=caches)[0]
    return mx.concatenate([first[split - 1 : split], first[-1:], second])


def _together(rows: FlatRows) -> list[Any]:
    """The same of all prompts: each in two pieces, or one, beside the others', then one more token of all."""
    whole = [(prompt, split, token) for prompt, split, token in zip(_PROMPTS, _SPLITS, _NEXT, strict=True)]
    steps = [
        [RowSegment(str(i), prompt[:split], 0, wants=1) for i, (prompt, split, _) in enumerate(whole)],
        [RowSegment(str(i), prompt[split:], split, wants=1) for i, (prompt, split, _) in enumerate(whole)],
        [RowSegment(str(i), (token,), len(prompt), wants=1) for i, (prompt, _, token) in enumerate(whole)],
    ]
    found: list[list[Any]] = [[] for _ in whole]
    for i in range(len(whole)):
        rows.admit(str(i), "")
    for pieces in steps:
        done = rows.compute(pieces, None)
        assert done.logits is not None
        mx.eval(done.logits, done.arrays)
        for id_, (first, _) in done.places.items():
            found[int(id_)].append(done.logits[first : first + 1])
    return [mx.concatenate(parts) for parts in found]
