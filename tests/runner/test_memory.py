from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from treadle.errors import ConfigError
from treadle.runner import memory


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


MEMINFO = "MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:   4000 kB\n"


def test_a_container_cannot_take_more_than_its_limit(tmp_path: Path) -> None:
    write(tmp_path, meminfo=MEMINFO, memory_max="3000000", memory_current="1000000")
    assert memory.host_available_bytes(tmp_path / "meminfo", tmp_path) == 2_000_000


@pytest.mark.parametrize("limit", ["max", "99999999999"])
def test_without_a_limit_that_binds_the_machine_decides(tmp_path: Path, limit: str) -> None:
    write(tmp_path, meminfo=MEMINFO, memory_max=limit, memory_current="5")
    assert memory.host_available_bytes(tmp_path / "meminfo", tmp_path) == 4000 * 1024


def test_where_nothing_tells_it_is_half_of_the_machines_memory(tmp_path: Path) -> None:
    assert memory.host_available_bytes(tmp_path / "none", tmp_path) > 1 << 20


def test_files_that_the_kernel_drops_on_demand_do_not_count_against_a_containers_limit(tmp_path: Path) -> None:
    write(tmp_path, meminfo=MEMINFO, memory_max="3000000", memory_current="2500000")
    write(tmp_path, memory_stat="anon 400\ninactive_file 2000000\nactive_file 7\n")
    assert memory.host_available_bytes(tmp_path / "meminfo", tmp_path) == 2_500_000


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
    with caplog.at_level("WARNING", logger="treadle.runner.memory"):
        assert memory.kv_budget(40 << 30, "cuda") == 40 << 30
    assert "only 10.0 GiB are free now" in caplog.text


def test_a_containers_limit_is_all_the_memory_there_is(tmp_path: Path) -> None:
    write(tmp_path, memory_max="3000000")
    assert memory.host_total_bytes(tmp_path) == 3_000_000
    write(tmp_path, memory_max="max")
    assert memory.host_total_bytes(tmp_path) == memory.host_total_bytes(tmp_path / "none") > 1 << 30


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


def test_freed_buffers_go_back() -> None:
    mx.eval(mx.zeros(1 << 20) + 1)
    memory.give_back()
    assert mx.get_cache_memory() == 0
