"""Pages of layers with a window: which are held, which are kept for others, and how many there are."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.runner.backends import Driven, segment
from tests.runner.paged.checks import NamedPages, check
from tests.runner.paged.models import make, paged
from tests.support.cuda import ReferenceKernels
from treadle.core.capabilities import Sharing
from treadle.runner.kv.paged.backend import PagedConfig
from treadle.runner.kv.paged.memory import SLACK, LayerConfig, uniform
from treadle.runner.kv.paged.paged_pass import PAGE
from treadle.runner.kv.paged.window_pages import WindowPages

SIZE, WINDOW = 4, 6
SHAPE = ReferenceKernels(2, 64, PAGE, mx.float32)


def pages_of(count: int = 40, window_count: int = 40) -> NamedPages:
    windows = [WindowPages(window_count, SIZE, WINDOW)]
    return NamedPages(count, SIZE, lambda *_: None, keep_prefixes=True, windows=windows)


def compute(pages: NamedPages, row: str, tokens: list[int], *, marks: tuple[int, ...] = ()) -> None:
    """Let a new row compute `tokens` one block at a time."""
    table = pages.begin(row)
    table.marks.extend(marks)
    for end in range(SIZE, len(tokens) + SIZE, SIZE):
        done = tokens[:end]
        pages.grow(table, len(done))
        pages.windows[0].grow(table.windows[0], len(done))
        pages.commit(table, done)
        pages.leave_behind(table, len(done))
        check(pages, pages.tables.values())


def test_a_row_holds_the_pages_that_its_window_reaches() -> None:
    pages = pages_of()
    compute(pages, "a", list(range(40)))
    own = pages.tables["a"].windows[0]
    assert (own.first, own.count) == ((40 - WINDOW + 1) // SIZE, 10)
    assert pages.windows[0].held == 2
    assert pages.held == 10


def test_a_prefix_is_reused_up_to_where_its_window_is_still_there() -> None:
    """At its end, where the row left its pages; not further in, whose pages it needed again itself."""
    pages = pages_of(window_count=4)
    prompt = list(range(40))
    compute(pages, "a", prompt)
    pages.drop("a", prompt)
    assert pages.match("", prompt) == 40
    assert pages.match("", prompt[:21]) < 20
    assert pages.reuse_for("c", "", prompt) == 40
    own = pages.tables["c"].windows[0]
    assert (own.first, own.count) == (8, 10)
    check(pages, pages.tables.values())


def test_pages_behind_a_window_can_be_reused_until_they_are_needed() -> None:
    pages = pages_of(window_count=12)
    prompt = list(range(40))
    compute(pages, "a", prompt)
    assert pages.match("", prompt[:21]) == 21
    for row in "bcde":
        compute(pages, row, [ord(row) * 1000 + i for i in range(20)])
    assert pages.match("", prompt[:21]) < 20


def test_windows_before_marked_positions_outlive_others() -> None:
    for marks in [(), (20,)]:
        pages = pages_of(window_count=8)
        prompt = list(range(40))
        compute(pages, "a", prompt, marks=marks)
        pages.drop("a", prompt)
        compute(pages, "b", [1000 + i for i in range(44)])
        assert pages.match("", prompt) == 40
        compute(pages, "c", [2000 + i for i in range(8)])
        assert (pages.match("", prompt[:20]) == 20) == bool(marks)
        assert (pages.match("", prompt[:30]) == 20) == bool(marks)


def test_the_place_where_prompts_part_is_marked_by_the_second_one() -> None:
    pages = pages_of(window_count=4)
    shared = list(range(20))
    compute(pages, "a", [*shared, *range(100, 120)])
    pages.drop("a")
    second = [*shared, *range(200, 220)]
    assert pages.match("", second) < 20
    table = pages.begin("b")
    pages.mark_places(table, second)
    assert table.marks == [20, 36]


def test_a_block_that_two_rows_computed_has_one_page() -> None:
    pages = pages_of()
    for row in "ab":
        table = pages.begin(row)
        pages.grow(table, 8)
        pages.windows[0].grow(table.windows[0], 8)
    for row in "ab":
        pages.commit(pages.tables[row], list(range(8)))
    assert pages.tables["a"].windows[0].pages.tolist() == pages.tables["b"].windows[0].pages.tolist()
    assert pages.windows[0].held == pages.held == 2
    check(pages, pages.tables.values())


def test_no_page_left_is_a_memory_error() -> None:
    pages = pages_of(window_count=3)
    table = pages.begin("a")
    with pytest.raises(MemoryError, match="all 3 pages of window memory"):
        pages.windows[0].grow(table.windows[0], 4 * SIZE)
    pages.drop("a")
    check(pages, pages.tables.values())


def config_of(*windows: int, running: int = 4, step: int = 64) -> PagedConfig:
    layers = [LayerConfig(window, SHAPE) for window in windows]
    return PagedConfig(layers, None, pages=0, max_running=running, step_tokens=step)


def test_memory_is_split_so_that_sequences_never_lack_window_pages() -> None:
    each = SHAPE.page_bytes
    config = config_of(0, 64, 64).with_memory(1000 * each)
    most = 2 * 4 * (-(-(64 + SLACK) // PAGE) + 2) + 2 * 2
    assert config.window_pages(64) == most
    assert config.pages == 1000 - 2 * most
    few = config_of(0, 64, 64).with_memory(30 * each)
    assert few.window_pages(64) == few.pages == 10
    assert config.cost.token_bytes == each // PAGE
    assert config.cost.row_bytes == 2 * 5 * each


def test_layers_that_all_have_windows_keep_all_tokens() -> None:
    config = config_of(64, 32).with_memory(100 * SHAPE.page_bytes)
    assert config.windows == []
    assert config.pages == 50


def test_a_windowed_model_gives_the_same_logits_with_freed_pages() -> None:
    """Far past its window, with pages behind it given to another row."""
    module = make("gemma3")
    config = paged(module, pages=64)
    assert config.windows == [32]
    rows = Driven(config, module)
    assert rows.backend.sharing is Sharing.HELD_MARKED
    tokens = {"a": [7 * i % 250 for i in range(300)], "b": [11 * i % 250 for i in range(300)]}
    for name, own in tokens.items():
        rows.admit(name, "", own)
    for start in range(0, 300, 50):
        for name, own in tokens.items():
            done = rows.compute([segment(name, tuple(own[start : start + 50]), start, wants=1)])
            mx.eval(done.logits)
            rows.commit(name, start + 50)
            assert len(rows.live[name].kv.table.windows[0].pages) <= (32 + SLACK) // PAGE + 2
            assert done.logits is not None
            wanted = module(mx.array([own[: start + 50]]))[0, -1]
            assert mx.allclose(done.logits[0], wanted, atol=1e-3).item()


def test_uniform_layers_share_their_kernels() -> None:
    assert [layer.kernels for layer in uniform([0, 5], SHAPE)] == [SHAPE, SHAPE]
