"""Who holds which page, one case at a time."""

from __future__ import annotations

import pytest

from tests.runner.paged.checks import check
from treadle.runner.kv.paged.pages import Pages


class Copies:
    """Remembers which pages were copied, and raises when told to."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []
        self.broken = False

    def __call__(self, source: int, target: int) -> None:
        if self.broken:
            raise ArithmeticError("no copy today")
        self.done.append((source, target))


def computed(pages: Pages, row: str, tokens: list[int], salt: str = "") -> list[int]:
    """Let a new row compute `tokens`, and offer them; its pages."""
    pages.admit(row, salt)
    pages.grow(row, len(tokens))
    pages.settle(row, tokens)
    check(pages)
    return pages[row].tolist()


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture
def pages(copies: Copies) -> Pages:
    return Pages(8, 4, copies, keeps=True)


def test_a_row_has_a_page_for_each_beginning_of_size_tokens(pages: Pages) -> None:
    pages.admit("a", "")
    for tokens, count in [(1, 1), (4, 1), (5, 2), (5, 2), (16, 4)]:
        pages.grow("a", tokens)
        assert len(pages["a"]) == pages.held == count
    check(pages)


def test_a_row_grows_past_the_table_it_began_with() -> None:
    pages = Pages(200, 1, Copies(), keeps=True)
    pages.admit("a", "")
    pages.grow("a", 150)
    assert len(set(pages["a"].tolist())) == 150


def test_complete_pages_are_shared_in_place(pages: Pages, copies: Copies) -> None:
    """F6: not a byte is copied, and no page more is held."""
    mine = computed(pages, "a", [1] * 8)
    assert pages.reuse("b", "", [1] * 8) == 8
    assert pages["b"].tolist() == mine
    assert pages.held == 2
    assert not copies.done
    check(pages)


def test_who_writes_behind_shared_pages_does_so_in_one_of_its_own(pages: Pages) -> None:
    mine = computed(pages, "a", [1] * 8)
    pages.reuse("b", "", [1] * 8)
    pages.grow("b", 9)
    assert pages["b"][2] not in mine
    check(pages)


def test_a_beginning_that_ends_inside_a_page_is_copied(pages: Pages, copies: Copies) -> None:
    mine = computed(pages, "a", [1, 1, 1, 1, 2, 2, 2, 2])
    assert pages.reuse("b", "", [1, 1, 1, 1, 2, 2, 3]) == 6
    assert pages["b"][0] == mine[0]
    assert copies.done == [(mine[1], pages["b"][1])]
    assert pages.held == 3
    check(pages)


def test_what_a_row_left_in_its_last_page_is_kept(pages: Pages, copies: Copies) -> None:
    mine = computed(pages, "a", [1, 1, 1, 1, 2, 2])
    pages.release("a", [1, 1, 1, 1, 2, 2])
    check(pages)
    assert pages.held == 0
    assert pages.reuse("b", "", [1, 1, 1, 1, 2, 2, 2]) == 6
    assert copies.done == [(mine[1], pages["b"][1])]


def test_pages_behind_the_last_known_token_are_free_at_once(pages: Pages) -> None:
    """A step in flight had grown the row."""
    computed(pages, "a", [1] * 5)
    pages.grow("a", 13)
    pages.release("a", [1] * 5)
    assert len(pages._free) == 6
    check(pages)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_row_that_is_released_without_its_tokens_leaves_only_what_was_offered(keeps: bool) -> None:
    pages = Pages(8, 4, Copies(), keeps=keeps)
    computed(pages, "a", [1] * 6)
    pages.release("a")
    assert (pages.held, len(pages._free)) == (0, 7 if keeps else 8)
    check(pages)


def test_a_row_that_was_lost_leaves_what_was_complete_before(pages: Pages) -> None:
    """B7: what a failed step wrote is nobody's."""
    computed(pages, "a", [1] * 6)
    pages.lose("a")
    assert pages.reuse("b", "", [1] * 7) == 4
    check(pages)


def test_rows_that_complete_the_same_page_share_one(pages: Pages) -> None:
    first = computed(pages, "a", [1] * 8)
    second = computed(pages, "b", [1] * 8)
    assert second == first
    assert pages.held == 2
    pages.release("a")
    check(pages)
    assert pages.held == 2


def test_rows_with_another_salt_share_nothing(pages: Pages) -> None:
    first = computed(pages, "a", [1] * 8, salt="x")
    second = computed(pages, "b", [1] * 8, salt="y")
    assert not set(first) & set(second)
    assert pages.reuse("c", "", [1] * 8) == 0


def test_when_all_pages_are_held_a_row_keeps_what_it_has(pages: Pages) -> None:
    pages.admit("a", "")
    pages.grow("a", 24)
    pages.admit("b", "")
    with pytest.raises(MemoryError, match="all 8 pages"):
        pages.grow("b", 12)
    check(pages)
    assert pages.room == 0
    pages.release("a")
    pages.grow("b", 12)
    assert len(pages["b"]) == 3
    check(pages)


def test_what_nobody_holds_makes_room(pages: Pages) -> None:
    computed(pages, "a", [1] * 32)
    pages.release("a", [1] * 32)
    assert pages.room == 8
    computed(pages, "b", [2] * 32)
    assert pages.reuse("c", "", [1] * 32) == 0
    check(pages)


def test_no_room_for_a_copy_means_that_less_is_reused(pages: Pages, copies: Copies) -> None:
    computed(pages, "a", [1] * 32)
    assert pages.reuse("b", "", [1] * 6) == 4
    assert not copies.done
    check(pages)


def test_a_copy_that_raises_leaves_nothing_behind(pages: Pages, copies: Copies) -> None:
    computed(pages, "a", [1] * 8)
    copies.broken = True
    with pytest.raises(ArithmeticError):
        pages.reuse("b", "", [1] * 6)
    check(pages)
    pages.release("b")
    check(pages)
    assert pages.held == 2


def test_an_id_that_comes_back_is_another_row(pages: Pages) -> None:
    computed(pages, "a", [1] * 8)
    assert pages.reuse("a", "", [2] * 8) == 0
    assert len(pages["a"]) == 0
    check(pages)


def test_after_a_reset_nothing_is_found_and_rows_go_on(pages: Pages) -> None:
    mine = computed(pages, "a", [1] * 8)
    computed(pages, "b", [2] * 5)
    pages.release("b")
    assert pages.reset() == 12
    check(pages)
    assert pages["a"].tolist() == mine
    assert pages.reuse("c", "", [1] * 8) == 0
    pages.grow("a", 16)
    pages.settle("a", [1] * 16)
    check(pages)
    pages.release("a", [1] * 16)
    pages.release("c")
    check(pages)
    assert len(pages._free) == 8


def test_unknown_rows_are_harmless(pages: Pages) -> None:
    pages.release("nobody", [1, 2, 3])
    pages.lose("nobody")
    pages.settle("nobody", [1, 2, 3])
    assert pages.room == 8
    check(pages)


def test_what_was_computed_before_a_reset_is_not_found_after_it(pages: Pages) -> None:
    """Also where it was not kept yet."""
    computed(pages, "a", [1] * 3)
    pages.reset()
    pages.grow("a", 8)
    pages.settle("a", [1] * 8)
    assert pages.reuse("b", "", [1] * 8) == 0
    check(pages)
