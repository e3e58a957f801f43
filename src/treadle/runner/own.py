"""Whether a model's rows can be kept in a layout of this server's own, found out by running some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .body import FlatRows
from .flat import FlatPass, Layout, Piece
from .guard import mlx_runtime
from .mlxlm import MlxLm, Selection
from .stock.layout import StockLayout

TOLERANCE = 0.25
"""Mean difference over the logits' spread: half precision stays far below, a wrong position goes far above."""

_PROMPTS = ((1, 2, 3, 4, 5, 6, 7), (8, 9), (10, 11, 12, 13))
_SPLITS = (3, 1, 2)
_NEXT = (14, 15, 16)


@dataclass(frozen=True)
class Own:
    """How a model's rows are kept: `new_layout` makes an empty layout, `selection` says what its head sees."""

    kind: str
    selection: Selection | None
    new_layout: Callable[[], Layout]

    def new_rows(self, module: Any) -> FlatRows:
        """Rows of `module`, none yet."""
        layout = self.new_layout()
        return FlatRows(layout, FlatPass(module, layout, self.selection))


def stock(library: MlxLm, module: Any, *, blocks: int, budget: int, keeps: bool, device: str) -> Own | str:
    """`module`'s rows in buffers of their own, or why that can't be."""
    windows = library.windows(module)
    if windows is None:
        return "it keeps more than keys and values"
    if not library.route_attention(module):
        return "its attention does not go through mlx-lm's function"

    def layout(keeps: bool = keeps) -> Layout:
        return StockLayout(windows, blocks=blocks, budget=budget, keeps=keeps, group_queries=device == "cpu")

    own = Own("rows", library.selection(module), layout)
    return why_not(library, module, own, lambda: layout(keeps=False)) or own


def why_not(library: MlxLm, module: Any, own: Own, small: Callable[[], Layout]) -> str:
    """Run a few rows, in pieces and together, in the layout `small`; why that did not give what each gives alone."""
    layout = small()
    try:
        with mlx_runtime("trying the model"):
            alone = [_alone(library, module, *row) for row in zip(_PROMPTS, _SPLITS, _NEXT, strict=True)]
            together = _together(FlatRows(layout, FlatPass(module, layout, own.selection)))
            mx.eval(alone, together)
    except (ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError) as error:
        return f"rows in one pass failed ({type(error).__name__}: {error})"
    finally:
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
        [Piece(str(i), prompt[:split], 0, wants=1) for i, (prompt, split, _) in enumerate(whole)],
        [Piece(str(i), prompt[split:], split, wants=1) for i, (prompt, split, _) in enumerate(whole)],
        [Piece(str(i), (token,), len(prompt), wants=1) for i, (prompt, _, token) in enumerate(whole)],
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
