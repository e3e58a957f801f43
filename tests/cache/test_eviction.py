"""Eviction order of blocks."""

from __future__ import annotations

import pytest

from treadle.cache.eviction import MAX_LIFE, MIN_STALE
from treadle.cache.prefix_index import PrefixIndex

BLOCK = 4
LONG = 10_000


class Cache:
    """An index that holds `room` blocks. A prompt is its letters; requests are numbered."""

    def __init__(self, room: int) -> None:
        self.index = PrefixIndex(BLOCK)
        self.room = room
        self.requests = 0

    def serve(self, prompt: str, request: str | None = None) -> int:
        """Return the cached length of the prompt, and store the rest, evicting blocks as needed."""
        self.requests += 1
        request = f"{self.requests}" if request is None else request
        tokens = [ord(letter) for letter in prompt]
        match = self.index.match("", tokens, request)
        held = [*match.path]
        self.index.acquire(held)
        parent = match.nodes[-1] if match.nodes else None
        for start in range(len(match.nodes) * BLOCK, len(tokens), BLOCK):
            if self.index.size >= self.room:
                self.index.evict(1)
            parent = self.index.insert(parent, "", tokens[start : start + BLOCK], start, 1, request).node
            assert parent is not None
            self.index.acquire([parent])
            held.append(parent)
        self.index.release(held)
        return match.tokens

    def one_offs(self, blocks: int) -> None:
        """Store `count` blocks that are never used again, in prompts of half the capacity."""
        while blocks > 0:
            length = min(blocks, self.room // 2)
            self.serve("".join(chr(LONG + self.requests) + "..." for _ in range(length)))
            blocks -= length

    def has(self, prompt: str) -> bool:
        """Whether the whole prompt is cached; does not count as a use."""
        node = self.index._roots.get("")
        tokens = [ord(letter) for letter in prompt]
        for start in range(0, len(tokens), BLOCK):
            if node is None:
                return False
            node, agree = node.best_child(
                b"".join(token.to_bytes(8, "little") for token in tokens[start : start + BLOCK])
            )
            if agree < min(BLOCK, len(tokens) - start):
                return False
        return True


def test_the_least_recently_used_goes_first() -> None:
    cache = Cache(room=3)
    for prompt in ("aaaa", "bbbb", "cccc"):
        cache.serve(prompt)
    cache.serve("aaaa")
    cache.serve("dddd")
    assert [cache.has(p) for p in ("aaaa", "bbbb", "cccc", "dddd")] == [True, False, True, True]


def test_who_used_a_child_used_its_parents() -> None:
    cache = Cache(room=3)
    cache.serve("aaaabbbb")
    cache.serve("cccc")
    cache.serve("aaaabbbb")
    cache.index.evict(2)
    assert cache.has("aaaa")
    assert not cache.has("cccc")


def test_a_long_prompt_goes_from_its_end() -> None:
    cache = Cache(room=4)
    cache.serve("aaaabbbbccccdddd")
    cache.index.evict(2)
    assert cache.has("aaaabbbb")
    assert not cache.has("aaaabbbbcccc")


def test_a_one_off_prompt_does_not_flush_a_shared_trunk() -> None:
    cache = Cache(room=10)
    cache.serve("system: one user")
    cache.serve("system: two user")
    cache.one_offs(8)
    assert cache.has("system: ")
    assert not cache.has("system: one")
    assert not cache.has("system: two")


def test_a_trunk_is_known_by_where_the_ways_part_inside_a_block() -> None:
    cache = Cache(room=10)
    cache.serve("rules. one user!")
    cache.serve("rules. two user!")
    cache.one_offs(8)
    assert cache.has("rules. ")


def lifetime(ways: int) -> float:
    """How many turnovers of the cache a trunk lives, where so many ways parted, once nobody uses it any more."""
    cache, prompts = Cache(room=100), 0
    for number in range(ways + 1):
        cache.serve(f"system: {number}...")
    while cache.has("system: "):
        cache.one_offs(10)
        prompts += 1
    return 10 * prompts / cache.room


def test_the_more_a_trunk_is_shared_the_longer_it_stays_and_never_for_ever() -> None:
    for ways in range(1, MAX_LIFE + 1):
        assert lifetime(ways) == pytest.approx(1 + ways, rel=0.1)
    assert lifetime(MAX_LIFE + 5) == pytest.approx(lifetime(MAX_LIFE), abs=0.1)


def test_the_turns_of_one_conversation_make_no_trunk() -> None:
    cache = Cache(room=12)
    cache.serve("other...")
    for turns in range(1, 6):
        assert cache.serve("talk" * turns) == 4 * (turns - 1)
    cache.serve("other...")
    cache.one_offs(7)
    assert cache.has("other...")
    assert not cache.has("talk" * 5)
    cache.one_offs(5)
    assert not cache.has("talk")


@pytest.mark.parametrize(("request_name", "stays"), [("same", False), ("", True), (None, True)])
def test_sequences_of_one_request_make_no_trunk(request_name: str | None, stays: bool) -> None:
    """`n` of one prompt is one request; one without a name is another each time."""
    cache = Cache(room=8)
    for letter in "abc":
        cache.serve(f"prompt.. {letter}..", request_name)
    cache.one_offs(8)
    assert cache.has("prompt..") == stays


def test_the_first_few_tokens_in_common_are_no_use_of_a_block() -> None:
    """Prompts of one template begin alike: that must not keep whoever happened to be first."""
    cache = Cache(room=4)
    cache.serve("<sys")
    cache.serve("aaaa")
    for letter in "bcdefg":
        cache.serve(f"<{letter}{letter}{letter}")
    assert not cache.has("<sys")


def test_repeated_prompts_are_kept_as_shared() -> None:
    cache = Cache(room=4)
    for _ in range(3):
        cache.serve("same")
    cache.one_offs(4)
    assert cache.has("same")


def test_the_waiting_line_does_not_grow_with_what_leaves_otherwise() -> None:
    """Tails whose place is taken and salts that are cleared are swept out without any eviction."""
    index = PrefixIndex(BLOCK)
    index.insert(None, "stays", [1], 0, 1)
    for number in range(20 * MIN_STALE):
        for length in (1, 2, 3, 4):
            index.insert(None, "goes", range(length), number, 1)
        index.clear("goes")
    assert len(index._order) <= 2 * MIN_STALE + 2
    index.check()
    assert index.evict(1) == [(0, 1)]


def test_eviction_goes_on_past_what_has_left_otherwise() -> None:
    index = PrefixIndex(BLOCK)
    for length in (1, 2, 3, 4):
        index.insert(None, "", range(length), length, 1)
    assert index.evict(5) == [(4, 1)]
    assert index.evict(5) == []
    assert len(index._order) == 0


def test_what_was_used_otherwise_than_by_a_match_stays_as_if_a_match_had_ended_there() -> None:
    cache = Cache(room=3)
    for prompt in ("aaaa", "bbbb", "cccc"):
        cache.serve(prompt)
    (node,) = cache.index.match("", [ord("a")] * BLOCK).nodes
    for prompt in ("bbbb", "cccc"):
        cache.serve(prompt)
    cache.index.use(node, "other")
    cache.serve("dddd")
    assert [cache.has(p) for p in ("aaaa", "bbbb", "cccc", "dddd")] == [True, False, True, True]
    cache.index.check()
