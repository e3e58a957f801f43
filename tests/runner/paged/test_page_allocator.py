"""Who holds which page, one case at a time."""

from __future__ import annotations

import pytest

from tests.runner.paged import checks
from tests.runner.paged.checks import NamedPages


class Copies:
    """Remembers which pages were copied, and raises when told to."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []
        self.broken = False

    def __call__(self, table: int, source: int, target: int) -> None:
        if self.broken:
            raise ArithmeticError("no copy today")
        self.done.append((source, target))


def check(pages: NamedPages) -> None:
    checks.check(pages, pages.tables.values())


def computed(pages: NamedPages, row: str, tokens: list[int], salt: str = "") -> list[int]:
    """Let a new row compute `tokens`, and offer them; its pages."""
    table = pages.begin(row, salt)
    pages.grow(table, len(tokens))
    pages.commit(table, tokens)
    check(pages)
    return pages[row].tolist()


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture
def pages(copies: Copies) -> NamedPages:
    return NamedPages(8, 4, copies, keep_prefixes=True)


def test_a_row_has_a_page_for_each_beginning_of_size_tokens(pages: NamedPages) -> None:
    pages.begin("a")
    for tokens, count in [(1, 1), (4, 1), (5, 2), (5, 2), (16, 4)]:
        pages.grow(pages.tables["a"], tokens)
        assert len(pages["a"]) == pages.held == count
    check(pages)


def test_a_row_grows_past_the_table_it_began_with() -> None:
    pages = NamedPages(200, 1, Copies(), keep_prefixes=True)
    pages.begin("a")
    pages.grow(pages.tables["a"], 150)
    assert len(set(pages["a"].tolist())) == 150


def test_complete_pages_are_shared_in_place(pages: NamedPages, copies: Copies) -> None:
    """F6: not a byte is copied, and no page more is held."""
    mine = computed(pages, "a", [1] * 8)
    assert pages.reuse_for("b", "", [1] * 8) == 8
    assert pages["b"].tolist() == mine
    assert pages.held == 2
    assert not copies.done
    check(pages)


def test_who_writes_behind_shared_pages_does_so_in_one_of_its_own(pages: NamedPages) -> None:
    mine = computed(pages, "a", [1] * 8)
    pages.reuse_for("b", "", [1] * 8)
    pages.grow(pages.tables["b"], 9)
    assert pages["b"][2] not in mine
    check(pages)


def test_a_beginning_that_ends_inside_a_page_is_copied(pages: NamedPages, copies: Copies) -> None:
    mine = computed(pages, "a", [1, 1, 1, 1, 2, 2, 2, 2])
    assert pages.reuse_for("b", "", [1, 1, 1, 1, 2, 2, 3]) == 6
    assert pages["b"][0] == mine[0]
    assert copies.done == [(mine[1], pages["b"][1])]
    assert pages.held == 3
    check(pages)


def test_what_a_row_left_in_its_last_page_is_kept(pages: NamedPages, copies: Copies) -> None:
    mine = computed(pages, "a", [1, 1, 1, 1, 2, 2])
    pages.drop("a", [1, 1, 1, 1, 2, 2])
    check(pages)
    assert pages.held == 0
    assert pages.reuse_for("b", "", [1, 1, 1, 1, 2, 2, 2]) == 6
    assert copies.done == [(mine[1], pages["b"][1])]


def test_pages_behind_the_last_known_token_are_free_at_once(pages: NamedPages) -> None:
    """A step in flight had grown the row."""
    computed(pages, "a", [1] * 5)
    pages.grow(pages.tables["a"], 13)
    pages.drop("a", [1] * 5)
    assert len(pages._free) == 6
    check(pages)


@pytest.mark.parametrize("keep_prefixes", [True, False])
def test_a_row_that_is_released_without_its_tokens_leaves_only_what_was_offered(keep_prefixes: bool) -> None:
    pages = NamedPages(8, 4, Copies(), keep_prefixes=keep_prefixes)
    computed(pages, "a", [1] * 6)
    pages.drop("a")
    assert (pages.held, len(pages._free)) == (0, 7 if keep_prefixes else 8)
    check(pages)


def test_a_row_that_was_lost_leaves_what_was_complete_before(pages: NamedPages) -> None:
    """B7: what a failed step wrote is nobody's."""
    computed(pages, "a", [1] * 6)
    pages.drop("a")
    assert pages.reuse_for("b", "", [1] * 7) == 4
    check(pages)


def test_rows_that_complete_the_same_page_share_one(pages: NamedPages) -> None:
    first = computed(pages, "a", [1] * 8)
    second = computed(pages, "b", [1] * 8)
    assert second == first
    assert pages.held == 2
    pages.drop("a")
    check(pages)
    assert pages.held == 2


def test_rows_with_another_salt_share_nothing(pages: NamedPages) -> None:
    first = computed(pages, "a", [1] * 8, salt="x")
    second = computed(pages, "b", [1] * 8, salt="y")
    assert not set(first) & set(second)
    assert pages.reuse_for("c", "", [1] * 8) == 0


def test_when_all_pages_are_held_a_row_keeps_what_it_has(pages: NamedPages) -> None:
    pages.begin("a")
    pages.grow(pages.tables["a"], 24)
    pages.begin("b")
    with pytest.raises(MemoryError, match="all 8 pages"):
        pages.grow(pages.tables["b"], 12)
    check(pages)
    assert pages.free == 0
    pages.drop("a")
    pages.grow(pages.tables["b"], 12)
    assert len(pages["b"]) == 3
    check(pages)


def test_what_nobody_holds_makes_room(pages: NamedPages) -> None:
    computed(pages, "a", [1] * 32)
    pages.drop("a", [1] * 32)
    assert pages.free == 8
    computed(pages, "b", [2] * 32)
    assert pages.reuse_for("c", "", [1] * 32) == 0
    check(pages)


def test_no_room_for_a_copy_means_that_less_is_reused(pages: NamedPages, copies: Copies) -> None:
    computed(pages, "a", [1] * 32)
    assert pages.reuse_for("b", "", [1] * 6) == 4
    assert not copies.done
    check(pages)


def test_a_copy_that_raises_leaves_nothing_behind(pages: NamedPages, copies: Copies) -> None:
    computed(pages, "a", [1] * 8)
    copies.broken = True
    with pytest.raises(ArithmeticError):
        pages.reuse_for("b", "", [1] * 6)
    check(pages)
    pages.drop("b")
    check(pages)
    assert pages.held == 2


def test_an_id_that_comes_back_is_another_row(pages: NamedPages) -> None:
    computed(pages, "a", [1] * 8)
    assert pages.reuse_for("a", "", [2] * 8) == 0
    assert len(pages["a"]) == 0
    check(pages)


def test_after_a_reset_nothing_is_found_and_rows_go_on(pages: NamedPages) -> None:
    mine = computed(pages, "a", [1] * 8)
    computed(pages, "b", [2] * 5)
    pages.drop("b")
    assert pages.reset_all() == 12
    check(pages)
    assert pages["a"].tolist() == mine
    assert pages.reuse_for("c", "", [1] * 8) == 0
    pages.grow(pages.tables["a"], 16)
    pages.commit(pages.tables["a"], [1] * 16)
    check(pages)
    pages.drop("a", [1] * 16)
    pages.drop("c")
    check(pages)
    assert len(pages._free) == 8


def test_what_was_computed_before_a_reset_is_not_found_after_it(pages: NamedPages) -> None:
    """Also where it was not kept yet."""
    computed(pages, "a", [1] * 3)
    pages.reset_all()
    pages.grow(pages.tables["a"], 8)
    pages.commit(pages.tables["a"], [1] * 8)
    assert pages.reuse_for("b", "", [1] * 8) == 0
    check(pages)
