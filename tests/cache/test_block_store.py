"""Store of cached blocks."""

from __future__ import annotations

import mlx.core as mx

from treadle.cache.block_store import BlockStore


def test_blocks_are_copies_that_join_in_order() -> None:
    """What they were copied from may change, and may go."""
    store = BlockStore()
    buffer = mx.arange(24, dtype=mx.float32).reshape(1, 2, 4, 3)
    first, second = store.new_handle(), store.new_handle()
    store.put(first, [(buffer[:, :, :2], buffer[:, :, :2] * 2)])
    store.put(second, [(buffer[:, :, 2:], buffer[:, :, 2:] * 2)])
    store.flush()
    buffer[:] = 0
    keys, values = store.parts(0, [first, second], [2, 1])
    wanted = mx.arange(24, dtype=mx.float32).reshape(1, 2, 4, 3)[:, :, :3]
    assert mx.array_equal(mx.concatenate(keys, axis=2), wanted).item()
    assert mx.array_equal(mx.concatenate(values, axis=2), 2 * wanted).item()


def test_a_copy_holds_its_own_part_alone() -> None:
    store = BlockStore()
    buffer = mx.zeros((1, 1, 100_000, 4))
    mx.eval(buffer)
    mx.clear_cache()
    before = mx.get_active_memory()
    store.put(store.new_handle(), [(buffer[:, :, :32], buffer[:, :, 32:64])])
    store.flush()
    size = int(buffer.nbytes)
    del buffer
    assert mx.get_active_memory() < before - size + 4096
    assert len(store) == 1


def test_a_block_that_is_dropped_is_gone() -> None:
    store = BlockStore()
    handle = store.new_handle()
    store.put(handle, [(mx.zeros((1, 1, 2, 2)), mx.zeros((1, 1, 2, 2)))])
    store.drop(handle)
    store.drop(handle)
    for _ in range(2):
        store.flush()
    assert len(store) == 0
