"""Order of the text workers' queue."""

from __future__ import annotations

import pytest

from treadle.text.work.fair_queue import FairQueue


def test_tenants_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for tenant, item in [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("b", "b2")]:
        queue.put(tenant, item, 100)
    assert taken(queue) == ["a1", "b1", "a2", "b2", "a3"]


def test_small_items_of_a_tenant_pass_its_large_ones() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(100):
        queue.put("a", f"large{i}", 100_000)
    assert queue.take() == "large0"
    for i in range(50):
        queue.put("a", f"small{i}", 1000 + i % 2)
    order = taken(queue)
    assert order[:50] == [f"small{i}" for i in range(50)]
    assert order[50:] == [f"large{i}" for i in range(1, 100)]


def test_large_items_get_their_turn_while_small_ones_come() -> None:
    queue: FairQueue[str] = FairQueue()
    order = list[str]()
    queue.put("a", "large", 10_000)
    queue.put("a", "larger", 12_000)
    for _ in range(60):
        queue.put("a", "small", 600)
        order.append(queue.take())
    assert order.index("large") < order.index("larger") < 40


def test_an_item_that_is_put_back_is_first() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put("a", "large", 100_000)
    queue.put("b", "other", 10)
    first = queue.take()
    queue.put("a", "small", 10)
    queue.put_back("a", first)
    assert taken(queue) == ["large", "other", "small"]


def test_the_newest_item_of_the_tenant_with_the_most_is_displaced() -> None:
    queue: FairQueue[str] = FairQueue()
    for item, size in [("a1", 10), ("a2", 9000), ("a3", 10)]:
        queue.put("a", item, size)
    assert queue.displace("b") == "a3"
    assert queue.remove("a", "a1")
    assert not queue.remove("a", "a1")
    assert queue.displace("b") is None
    assert (len(queue), queue.held("a"), queue.held("b")) == (1, 1, 0)
    assert taken(queue) == ["a2"]
    with pytest.raises(IndexError):
        queue.take()


def test_items_that_do_not_fit_are_passed() -> None:
    queue: FairQueue[str] = FairQueue()
    for tenant, item in [("a", "a1"), ("a", "a2"), ("b", "b1"), ("c", "c2")]:
        queue.put(tenant, item, 100)
    assert queue.take(lambda item: item.endswith("2")) == "a2"
    assert queue.take(lambda item: item.endswith("2")) == "c2"
    with pytest.raises(IndexError):
        queue.take(lambda item: item.endswith("2"))
    assert taken(queue) == ["b1", "a1"]


def taken(queue: FairQueue[str]) -> list[str]:
    return [queue.take() for _ in range(len(queue))]
