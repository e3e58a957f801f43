from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from treadle.errors import ConfigError
from treadle.runner.device import memory
from treadle.runner.device.cgroups import Group

MEMINFO = "MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:   4000 kB\n"


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(MEMINFO)
    return path


def test_a_container_cannot_take_more_than_its_limit(meminfo: Path) -> None:
    groups = [Group(9_000_000, 1, 0), Group(3_000_000, 1_000_000, 0)]
    assert memory.host_available_bytes(meminfo, groups) == 2_000_000


@pytest.mark.parametrize("groups", [[], [Group(99_999_999_999, 5, 0)]])
def test_without_a_limit_that_binds_the_machine_decides(meminfo: Path, groups: list[Group]) -> None:
    assert memory.host_available_bytes(meminfo, groups) == 4000 * 1024


def test_where_nothing_tells_it_is_half_of_the_machines_memory(tmp_path: Path) -> None:
    assert memory.host_available_bytes(tmp_path / "none", []) > 1 << 20


def test_files_that_the_kernel_drops_on_demand_do_not_count_against_a_containers_limit(meminfo: Path) -> None:
    assert memory.host_available_bytes(meminfo, [Group(3_000_000, 2_500_000, 2_000_000)]) == 2_500_000


def test_an_asked_budget_is_taken_as_it_is() -> None:
    assert memory.kv_budget(12345, "cpu") == 12345


def test_a_budget_beyond_what_the_weights_leave_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 7 << 30})
    monkeypatch.setattr(mx, "get_active_memory", lambda: 1 << 30)
    assert memory.kv_budget(6 << 30, "metal") == 6 << 30
    with pytest.raises(
        ConfigError, match=r"`memory` is 100\.0 GiB, and 6\.0 GiB are left beside the weights: give at most"
    ) as caught:
        memory.kv_budget(100 << 30, "metal")
    assert caught.value.param == "memory"
    monkeypatch.setattr(mx, "device_info", dict)
    assert memory.kv_budget(100 << 30, "metal") == 100 << 30, "nothing says how much there is"


def test_a_budget_that_other_programs_hold_now_is_taken_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that died must start again, whatever else came to hold memory meanwhile."""
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": 80 << 30, "free_memory": 10 << 30})
    monkeypatch.setattr(mx, "get_active_memory", lambda: 2 << 30)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 0)
    with caplog.at_level("WARNING", logger="treadle.runner.device.memory"):
        assert memory.kv_budget(40 << 30, "cuda") == 40 << 30
    assert "only 10.0 GiB are free now" in caplog.text


def test_a_containers_limit_is_all_the_memory_there_is() -> None:
    assert memory.host_total_bytes([Group(3_000_000, 1, 0)]) == 3_000_000


def test_a_device_that_does_not_tell_its_memory_sets_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "riddle"})
    assert memory.usable_bytes("cuda") == 0
    assert memory.kv_budget(None, "cuda") == 0


def test_metal_tells_what_it_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 7 << 30})
    monkeypatch.setattr(mx, "get_active_memory", lambda: 1 << 30)
    assert memory.usable_bytes("metal") == 7 << 30
    assert memory.kv_budget(None, "metal") == 3 << 30


def test_cuda_tells_what_others_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": 80 << 30, "free_memory": 10 << 30})
    monkeypatch.setattr(mx, "get_active_memory", lambda: 2 << 30)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 1 << 30)
    assert memory.usable_bytes("cuda") == 13 << 30
    assert memory.kv_budget(None, "cuda", 0.8) == int((11 << 30) * 0.8)


def test_the_free_pool_takes_what_the_budget_leaves() -> None:
    before = mx.set_cache_limit(0)
    try:
        pool = memory.FreePool(ceiling=100 << 20, most=64 << 20, least=8 << 20)
        for active, limit in ((0, 64), (60 << 20, 40), (58 << 20, 40), (99 << 20, 8), (200 << 20, 8), (0, 64)):
            pool.follow(active)
            held = [mx.zeros(1 << 20) + 1 for _ in range(20)]  # 4 MiB each, freed at once
            mx.eval(held)
            del held
            wanted = limit << 20 if active else 64 << 20
            assert mx.get_cache_memory() <= wanted + (4 << 20)
    finally:
        mx.set_cache_limit(before)
        mx.clear_cache()


@pytest.mark.parametrize(("kind", "budget"), [("metal", 1 << 30), ("cuda", 1 << 30), ("cpu", 0)])
def test_where_buffers_cost_much_to_make_the_pool_stays_as_it_is(kind: str, budget: int) -> None:
    assert memory.free_pool(kind, budget, 1000) is None


def test_malloc_gives_its_pages_back_where_it_can() -> None:
    assert memory.trim() in (False, True)


def test_freed_buffers_go_back() -> None:
    mx.eval(mx.zeros(1 << 20) + 1)
    memory.give_back()
    assert mx.get_cache_memory() == 0
