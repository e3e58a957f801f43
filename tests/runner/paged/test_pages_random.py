"""Pages under random lives of rows, against what each page really holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from tests.runner.paged.checks import NamedPages, check
from treadle.runner.kv.paged.window_pages import WindowPages
from treadle.runner.kv.slot_allocator import SlotAllocator
from treadle.runner.recurrent.step import FRESH

SIZE = 4
SLACK = 3
REJECTED = 9
ACTS = {"join": 4, "start": 14, "settle": 6, "verify": 6, "leave": 3, "lose": 0.3, "reset": 0.1}
Content = list[int | None]


@dataclass
class Living:
    """A row: its prompt, how many of its tokens are computed, how many of those are known to be so, and its pages as
    the last step that was started saw them."""

    salt: str
    tokens: list[int]
    computed: int
    settled: int
    in_flight: tuple[int, ...] = ()
    seen: dict[int, int] = field(default_factory=dict)
    """By window, the first place that its first token of its own sees."""


class World:
    """Rows over pages that hold tokens instead of keys and values. A step that computes a token writes it."""

    def __init__(
        self, seed: int, count: int, *, keep_prefixes: bool = True, windows: Sequence[int] = (), slots: int = 0
    ) -> None:
        self.dice = random.Random(seed)
        self.windows = windows
        self.memory: list[list[Content]] = [[[None] * SIZE for _ in range(count)] for _ in range(1 + len(windows))]
        self.pages = NamedPages(
            count,
            SIZE,
            self._copy,
            keep_prefixes=keep_prefixes,
            windows=[WindowPages(count, SIZE, window, SLACK) for window in windows],
            slots=SlotAllocator(slots) if slots else None,
        )
        self.states: list[tuple[int, ...]] = [(-1,)] * slots
        self.rows: dict[str, Living] = {}
        self.said: list[tuple[str, list[int]]] = []
        self.born = self.refused = self.reused = self.failing = self.rejected = 0

    def _copy(self, table: int, source: int, target: int) -> None:
        if self.failing:
            self.failing -= 1
            raise ArithmeticError("no copy today")
        self.memory[table][target] = list(self.memory[table][source])

    def prompt(self) -> tuple[str, list[int]]:
        """Some are another's beginning, or go on from it."""
        fresh = [self.dice.randrange(3) for _ in range(self.dice.randint(1, 20))]
        if not self.said or self.dice.random() < 0.3:
            return self.dice.choice(["", "a", "b"]), fresh
        salt, trunk = self.dice.choice(self.said)
        return salt, (trunk[: self.dice.randint(0, len(trunk))] + fresh[: self.dice.randint(0, 9)]) or fresh

    def join(self) -> None:
        self.born += 1
        id_, (salt, tokens) = f"r{self.born % 6}", self.prompt()
        room = self.pages.free
        gone = self.rows.pop(id_, None)
        reused = self.pages.reuse_for(id_, salt, tokens[:-1])
        assert 0 <= reused < len(tokens)
        assert gone is not None or room - self.pages.free <= -(-reused // SIZE), "more than there is room for it"
        self.rows[id_] = Living(salt, tokens, reused, reused)
        self.pages.mark_places(self.pages.tables[id_], tokens)
        self.rows[id_].seen = {window: max(0, reused - window + 1) for window in self.windows}
        self.reused += reused
        self.see(id_, reused)

    def see(self, id_: str, count: int) -> None:
        """Its pages hold its first `count` tokens, in order."""
        row, table = self.rows[id_], self.pages[id_].tolist()
        found = [token for page in table for token in self.memory[0][page]][:count]
        assert found == row.tokens[:count]
        if self.pages.slots is not None and row.computed:
            assert self.states[self.pages.tables[id_].slots.states[row.computed]] == tuple(row.tokens[: row.computed])
        for memory, window, own in zip(self.memory[1:], self.windows, self.pages.tables[id_].windows, strict=True):
            first = max(row.seen[window], row.settled - SLACK - window + 1)
            for place in range(first, count):
                assert own.first <= place // SIZE < own.count
                assert memory[own.table[place // SIZE]][place % SIZE] == row.tokens[place]
            assert len(own.pages) * SIZE <= window + SLACK + row.computed - row.settled + 3 * SIZE

    def start(self, id_: str) -> None:
        """Compute some tokens, those before the last first; a row at its end gains one first."""
        row = self.rows[id_]
        if row.computed == len(row.tokens):
            row.tokens.append(self.dice.randrange(3))
        target = min(len(row.tokens), row.computed + self.dice.choice([1, 1, 3, 9]))
        mine = self.pages.tables[id_]
        try:
            self.pages.grow(mine, target)
            for pages, own in zip(self.pages.windows, mine.windows, strict=True):
                pages.grow(own, target)
        except MemoryError:
            assert self.pages.free == 0
            self.refused += 1
            return
        table = self.pages[id_].tolist()
        others = [page for other in self.rows if other != id_ for page in self.pages[other].tolist()]
        for place in range(row.computed, target):
            page = table[place // SIZE]
            assert place // SIZE >= self.pages.tables[id_].shared, "a row writes to a page of the index"
            assert page not in others, "a row writes to another's page"
            self.memory[0][page][place % SIZE] = row.tokens[place]
            self.write_windows(id_, place)
        self.write_state(id_, target)
        row.computed = target
        self.see(id_, target)

    def verify(self, id_: str) -> None:
        """Compute a row's last token and drafts behind it, some of which are rejected. With states, the row goes on
        from the one behind its last token, or from that behind all drafts, if there is one."""
        row, mine = self.rows[id_], self.pages.tables[id_]
        start, drafts = row.computed, self.dice.randint(1, SLACK)
        if start + 1 < len(row.tokens):
            return
        self.settle(id_, start)
        try:
            self.pages.grow(mine, start + 1 + drafts)
            for pages, own in zip(self.pages.windows, mine.windows, strict=True):
                pages.grow(own, start + 1 + drafts)
        except MemoryError:
            self.refused += 1
            return
        gained = self.dice.randint(1, 1 + drafts)
        row.tokens += [self.dice.randrange(3) for _ in range(start + gained - len(row.tokens))]
        for place in range(start, start + 1 + drafts):
            token = row.tokens[place] if place < start + gained else REJECTED
            self.memory[0][mine.pages[place // SIZE]][place % SIZE] = token
            self.write_windows(id_, place, token)
        if self.pages.slots is not None:
            self.write_drafts(id_, start + gained, start + 1 + drafts)
        free, end = self.pages.free, start + gained
        left = self.pages.shrink(mine, end, row.settled)
        assert left == (end if self.pages.slots is None or end in mine.slots.states else start + 1)
        assert mine.count == -(-end // SIZE)
        assert self.pages.free >= free
        row.computed = left
        self.settle(id_, left)
        self.rejected += 1

    def write_windows(self, id_: str, place: int, token: int | None = None) -> None:
        """No page that others hold, or that the index has, is written."""
        for i, (memory, own) in enumerate(zip(self.memory[1:], self.pages.tables[id_].windows, strict=True)):
            page = int(own.table[place // SIZE])
            others = [table.windows[i] for other, table in self.pages.tables.items() if other != id_]
            assert page not in [held for other in others for held in other.pages.tolist()]
            assert page not in self.pages.windows[i]._handle_of
            memory[page][place % SIZE] = self.rows[id_].tokens[place] if token is None else token

    def write_state(self, id_: str, target: int) -> None:
        """Compute the state after `target` tokens from the one before, maybe a second time, and by way of a mark."""
        slots, row, mine = self.pages.slots, self.rows[id_], self.pages.tables[id_]
        if slots is None:
            return
        for _ in range(self.dice.choice([1, 1, 2])):
            slots.leave_behind(mine.slots, row.computed, row.settled, mine.marks)
            ends = [mark for mark in mine.marks if row.computed < mark < target][:1]
            for start, end in pairwise([row.computed, *ends, target]):
                source, written = slots.advance(mine.slots, start, end)
                assert (source == FRESH) == (start == 0)
                assert source == FRESH or self.states[source] == tuple(row.tokens[:start])
                others = [table.slots.states.values() for other, table in self.pages.tables.items() if other != id_]
                assert written not in slots._handle_of
                assert not any(written in other for other in others)
                self.states[written] = tuple(row.tokens[:end])

    def write_drafts(self, id_: str, kept: int, end: int) -> None:
        """Compute the state behind a row's last token, and that behind its drafts, of which `kept` tokens are right."""
        slots, row, mine = self.pages.slots, self.rows[id_], self.pages.tables[id_]
        assert slots is not None
        slots.leave_behind(mine.slots, row.computed, row.settled, mine.marks)
        known = row.computed + 1
        _, written = slots.advance(mine.slots, row.computed, known)
        self.states[written] = tuple(row.tokens[:known])
        if slots.available > 0 and self.dice.random() < 0.7:
            _, written = slots.advance(mine.slots, known, end)
            self.states[written] = tuple(row.tokens[:end]) if kept == end else (REJECTED,)

    def settle(self, id_: str, count: int = 0) -> None:
        """Steps are finished: `count` tokens, or some of those that were computed, are known."""
        row = self.rows[id_]
        row.settled = count or self.dice.randint(row.settled, row.computed)
        mine = self.pages.tables[id_]
        if self.dice.random() < 0.2:
            mine.marks.append(self.dice.randint(0, len(row.tokens)))
        self.pages.commit(mine, row.tokens[: row.settled])
        self.pages.leave_behind(mine, row.settled)
        self.see(id_, row.computed)

    def leave(self, id_: str) -> None:
        row = self.rows.pop(id_)
        self.said.append((row.salt, row.tokens))
        self.pages.drop(id_, row.tokens[: row.settled])
        assert id_ not in self.pages.tables

    def lose(self, id_: str) -> None:
        """A step failed: what it wrote is anything."""
        own = self.pages[id_][self.pages.tables[id_].shared :].tolist()
        for page in own:
            self.memory[0][page] = [9] * SIZE
        tables = self.pages.tables[id_].windows
        for memory, pages, mine in zip(self.memory[1:], self.pages.windows, tables, strict=True):
            for page in mine.pages.tolist():
                if page not in pages._handle_of:
                    memory[page] = [9] * SIZE
        del self.rows[id_]
        self.pages.drop(id_)

    def reset(self) -> None:
        held = 0 if self.pages.index is None else self.pages.index.tokens
        assert self.pages.reset_all() == held
        if self.pages.index is not None:
            assert self.pages.index.match("", [0, 1, 2]).tokens == 0

    def step(self) -> None:
        some = list(self.rows)
        act = self.dice.choices(list(ACTS), list(ACTS.values()))[0]
        if act == "reset":
            self.reset()
        elif act == "join" or not some:
            self.join()
        else:
            getattr(self, act)(self.dice.choice(some))
        check(self.pages, self.pages.tables.values())
        for id_, row in self.rows.items():
            self.see(id_, row.computed)


@pytest.mark.parametrize(("windows", "slots"), [((), 0), ((1,), 0), ((7, 16), 0), ((), 60), ((9,), 60)], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_rows_find_their_own_tokens_whatever_others_do(seed: int, windows: Sequence[int], slots: int) -> None:
    world = World(seed, count=random.Random(seed).choice([6, 12, 40]), windows=windows, slots=slots)
    for _ in range(600):
        world.step()
    assert world.reused > 0 or (slots and world.pages.count == 6)  # states are kept at few places
    assert world.rejected > 0
    for id_ in list(world.rows):
        world.leave(id_)
        check(world.pages, world.pages.tables.values())
    assert world.pages.held == 0
    assert world.pages.free == world.pages.count
    assert all(pages.held == 0 for pages in world.pages.windows)
    assert world.pages.slots is None or world.pages.slots.held == 0


@pytest.mark.parametrize("seed", range(3))
def test_without_an_index_nothing_is_kept(seed: int) -> None:
    world = World(seed, count=12, keep_prefixes=False)
    for _ in range(300):
        world.step()
    assert world.reused == 0
    for id_ in list(world.rows):
        world.leave(id_)
    assert world.pages.free == 12


def test_the_random_lives_run_out_of_pages_and_give_some_up() -> None:
    """Else they would show little."""
    world = World(1, count=8)
    for _ in range(1500):
        world.step()
    index = world.pages.index
    assert index is not None
    assert min(world.refused, index.evicted_tokens, world.pages.copied_pages) > 0
