"""Rows in pages: what a pass gives, what has to be evaluated for it, and what is left when it is over."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from msgspec import structs

from tests.runner.backends import Driven, segment
from tests.runner.paged.models import LAYERS, make, paged
from tests.support.cuda import ReferenceKernel, ReferenceKernels
from treadle.runner.device.staging import RING
from treadle.runner.kv.paged.backend import PagedConfig

PAGES = 16


class Marked(ReferenceKernel):
    """Makes what the last layer's keys and values are written with out of marks, once it is told to."""

    on = False
    writes = 0

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        made = super().__call__(*args, **kwargs)
        if not Marked.on or self.name not in ("write", "rotate"):
            return made
        Marked.writes += 1
        return [mx.full(made[0].shape, 7) if made[0].dtype == mx.int32 else made[0] * mx.nan]


class MarkedKernels(ReferenceKernels):
    kernel = Marked


def rows_of(kernels: type[ReferenceKernels] = ReferenceKernels, *, fused: bool = True) -> tuple[PagedConfig, Driven]:
    module = make("qwen3")
    config = paged(module, pages=PAGES, kernels=kernels)
    config = config if fused else replace(config, decoder=None)
    return config, Driven(config, module)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("counts", [(1,), (40,), (1, 40)], ids=["few", "many", "both"])
def test_a_pass_that_nobody_wants_anything_of_is_computed(
    fused: bool, counts: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk in the middle of a prompt gives no logits: what is evaluated in their place needs the last layer's keys
    and values, which need all others'."""
    _, rows = rows_of(MarkedKernels, fused=fused)
    pieces = [segment(str(i), tuple(range(count)), 0) for i, count in enumerate(counts)]
    for piece in pieces:
        rows.admit(piece.id)
    monkeypatch.setattr(Marked, "on", True)
    monkeypatch.setattr(Marked, "writes", 0)
    done = rows.compute(pieces)
    assert Marked.writes == LAYERS
    assert done.logits is None
    marks = [array[0].flatten()[0].item() for array in done.arrays]
    assert marks
    assert all(mark == 7 or mark != mark for mark in marks)


def test_a_passes_logits_are_those_that_are_wanted() -> None:
    """All of one row's tokens, the last of another's, and none of a third's."""
    _, rows = rows_of()
    module = make("qwen3")
    tokens = {"a": (1, 2, 3), "b": tuple(range(30)), "c": (4, 5)}
    for id_ in tokens:
        rows.admit(id_)
    wants = {"a": 3, "b": 1, "c": 0}
    done = rows.compute([segment(id_, tokens[id_], 0, wants=wants[id_]) for id_ in tokens], None)
    assert done.logits is not None
    assert sorted(done.places) == ["a", "b"]
    for id_, (first, count) in done.places.items():
        wanted = module(mx.array([tokens[id_]]))[0, -count:]
        assert count == wants[id_]
        assert mx.allclose(done.logits[first : first + count], wanted, atol=1e-3).item()


def test_who_has_few_tokens_goes_first() -> None:
    _, rows = rows_of()
    pieces = [segment(id_, (0,) * count, 0) for id_, count in [("a", 9), ("b", 8), ("c", 1), ("d", 500)]]
    backend = rows.backend
    assert backend.in_buckets
    found = [(piece.id, len(piece.tokens)) for piece in backend.order(pieces)]
    assert found == [("b", 8), ("c", 1), ("", 7), ("a", 9), ("d", 500), ("", 3)]
    assert [len(piece.tokens) for piece in backend.order(pieces[1:3])] == [8, 1, 3]
    backend.in_buckets = False
    assert [piece.id for piece in backend.order(pieces)] == ["b", "c", "a", "d"]


def test_segments_that_verify_drafts_are_padded_together_as_those_that_decode() -> None:
    """Up to 8 tokens take kernels that read weights once; 32 would not."""
    _, rows = rows_of()

    def ordered(*counts: int, drafts: bool) -> list[int]:
        pieces = [structs.replace(segment("a", (0,) * n, 0), drafts=(n - 1) * drafts) for n in counts]
        return [len(piece.tokens) for piece in rows.backend.order(pieces, verifies=drafts)]

    assert ordered(12, drafts=True) == [12]
    assert ordered(9, drafts=True) == [9, 3]
    assert ordered(9, drafts=False) == [9, 23]
    assert ordered(9, 2, drafts=True) == [9, 2, 1]
    assert ordered(9, 1, drafts=True) == [9, 1, 2]


def test_a_pass_over_more_pages_than_there_are_raises_and_others_keep_theirs() -> None:
    _, rows = rows_of()
    for id_ in "ab":
        rows.admit(id_)
    rows.compute([segment("a", (1,) * 32 * (PAGES - 1), 0)], None)
    with pytest.raises(MemoryError, match="all 16 pages"):
        rows.compute([segment("b", (2,) * 64, 0)], None)
    rows.invalidate("b")
    assert rows.backend.free_blocks() == 1
    done = rows.compute([segment("a", (3,), 32 * (PAGES - 1), wants=1)], None)
    assert done.logits is not None
    assert not mx.isnan(done.logits).any().item()


def test_closing_gives_the_memory_back() -> None:
    """Also with passes that were compiled, which hold the pools; but for what numbers are uploaded from."""
    config, _ = rows_of()
    mx.clear_cache()
    before = mx.get_active_memory()
    rows = Driven(config)
    size, backend = mx.get_active_memory() - before, rows.backend
    rows.admit("a")
    rows.compute([segment("a", (1,), 0, wants=1)], None)
    assert backend._step.compiled
    backend.close()
    assert not backend._step.compiled
    assert size >= PAGES * 32 * LAYERS * 2 * 2 * 64 * 4
    assert mx.get_active_memory() - before < size / 2 + 2 * 4 * RING


def test_closing_drops_the_fused_weights_at_once() -> None:
    """Without the garbage collector: the page allocator's reference to the backend is a cycle."""
    config, rows = rows_of()
    decoder = weakref.ref(config.decoder)
    assert decoder() is not None
    backend = rows.backend
    gc.disable()
    try:
        del config, rows
        backend.close()
        assert decoder() is None
    finally:
        gc.enable()


class Counting(ReferenceKernel):
    """Counts the launches that copy pages, for which there may be no memory."""

    copies = 0
    full = False

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        if self.name == "copy_pages" and Counting.full:
            raise MemoryError
        Counting.copies += self.name == "copy_pages"
        return super().__call__(*args, **kwargs)


class CountingKernels(ReferenceKernels):
    kernel = Counting


def grow(rows: Driven, name: str, tokens: int) -> list[int]:
    """The sequence's pages for so many tokens."""
    return list(rows.backend._pages.grow(rows.live[name].kv.table, tokens).tolist())


def kept(rows: Driven, name: str, tokens: Sequence[int], value: int) -> None:
    """A sequence that has gone, whose pages hold `value` in each layer."""
    rows.admit(name, "", tokens)
    layers = rows.backend.layers
    for page in grow(rows, name, len(tokens)):
        for layer in layers:
            layer.pool.data[page] = value
    mx.eval([layer.pool.data for layer in layers])
    rows.commit(name, len(tokens))
    rows.release(name)


@pytest.fixture
def rows_short_of_memory() -> Driven:
    """Of rows 1 and 2, which have gone, there is a page each; a long row has all others but one."""
    _, rows = rows_of(CountingKernels)
    for i in (1, 2):
        kept(rows, f"old {i}", (i,) * 20, i)
    rows.admit("long")
    grow(rows, "long", 32 * (PAGES - 3))
    return rows


def contents(rows: Driven, name: str) -> list[list[float]]:
    """What the sequence's pages hold, in each layer."""
    pages = rows.live[name].kv.table.pages.tolist()
    return [[layer.pool.data[page].max().item() for page in pages] for layer in rows.backend.layers]


def test_pages_are_copied_together_before_the_next_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """To start a kernel for each row and layer takes the host longer than the copies take the device."""
    _, rows = rows_of(CountingKernels)
    for i in (1, 2):
        kept(rows, f"old {i}", (i,) * 20, i)
    monkeypatch.setattr(Counting, "copies", 0)
    for row, i in (("a", 1), ("b", 2), ("c", 1)):
        assert rows.reuse(row, "", (i,) * 15) == 15
        rows.admit(row, "", (i,) * 16)
    assert Counting.copies == 0
    rows.backend._copies.launch()
    assert Counting.copies == 1
    assert contents(rows, "a") == contents(rows, "c") == [[1.0]] * LAYERS
    assert contents(rows, "b") == [[2.0]] * LAYERS
    rows.compute([segment(row, (i,), 15, wants=1) for row, i in (("a", 1), ("b", 2), ("c", 1))], None)
    assert Counting.copies == 1


def test_a_page_that_a_copy_is_made_of_is_not_written_over_before(
    rows_short_of_memory: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was copied first is given up for the next copy, and so is what was copied to."""
    rows = rows_short_of_memory
    monkeypatch.setattr(Counting, "copies", 0)
    assert rows.reuse("a", "", (1,) * 15) == 15  # the last free page
    assert rows.reuse("b", "", (2,) * 15) == 15  # in the place of what `a` is a copy of
    assert Counting.copies == 1
    rows.release("b")
    assert rows.reuse("c", "", (2,) * 15) == 15  # where `b` was
    assert Counting.copies == 2
    rows.backend._copies.launch()
    assert contents(rows, "a") == [[1.0]] * LAYERS
    assert contents(rows, "c") == [[2.0]] * LAYERS


def test_copies_that_fail_are_made_before_the_next_pass(
    rows_short_of_memory: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose turn it was is lost, and nobody else goes on with what stood in a page before."""
    rows = rows_short_of_memory
    assert rows.reuse("a", "", (1,) * 15) == 15
    rows.admit("a", "", (1,) * 16)

    monkeypatch.setattr(Counting, "full", True)
    with pytest.raises(MemoryError):
        rows.reuse("b", "", (2,) * 15)
    rows.invalidate("b")
    monkeypatch.setattr(Counting, "full", False)
    rows.compute([segment("a", (1,), 15, wants=1)], None)
    (page,) = rows.live["a"].kv.table.pages.tolist()
    assert all((layer.pool.data[page, :, :, :15] == 1).all().item() for layer in rows.backend.layers)


def test_statistics_tell_what_was_reused_copied_and_kept() -> None:
    _, rows = rows_of()
    backend = rows.backend
    page_bytes = LAYERS * 2 * 2 * 32 * 64 * 4
    tokens = tuple(range(80))
    rows.admit("a", "", tokens)
    grow(rows, "a", 80)
    rows.commit("a", 80)
    assert backend.kv_bytes() == 3 * page_bytes
    rows.release("a")
    assert rows.reuse("b", "", tokens[:73]) == 73
    found = backend.statistics()
    assert (found.looked_up, found.reused, found.stored, found.held) == (73, 73, 80, 80)
    assert found.copied_bytes == page_bytes
    assert found.held_bytes == 3 * page_bytes
    assert backend.reset() == 80
    assert backend.statistics().held == 80 - 16  # the row holds two blocks of it still
