"""Where nobody says how much memory caches may take, they get what the weights and the largest steps leave."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest

from tests.runner.paged.models import PAGE_BYTES, VOCABULARY, make
from tests.support.capabilities import capabilities
from tests.support.cuda import ReferenceKernels
from treadle.engine.owner import OwnerLimits, scheduler_for
from treadle.errors import ConfigError
from treadle.runner.device import memory
from treadle.runner.device.owner_thread import OutOfMemory
from treadle.runner.kv.cost import KvCost
from treadle.runner.kv.paged.backend import PagedBackend, PagedConfig
from treadle.runner.loading import choose_backend
from treadle.runner.loading.backend_choice import BackendChoice, BackendRequest
from treadle.runner.loading.choose_backend import choose
from treadle.runner.loading.probe import Probe
from treadle.runner.loading.profile_run import step_bytes
from treadle.runner.loading.reference import Reference
from treadle.runner.mlxlm import connect

ROOM = 64 << 20


def a_device_with(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """So much of its memory is free, whatever else the tests hold."""
    gc.collect()  # of what earlier tests left nothing is freed while memory is measured
    monkeypatch.setattr(memory, "usable_bytes", lambda kind: room + mx.get_active_memory())


def chosen(budget: int | None = None, prefill_tokens: int = 256) -> BackendChoice:
    request = BackendRequest("cuda", budget, 4, True, prefill_tokens=prefill_tokens)
    found = Probe(VOCABULARY, mx.float32, KvCost(1, 2), Reference(connect(), make("llama"), 2048))
    return choose(found, request, ReferenceKernels)


def pages_of(choice: BackendChoice) -> PagedConfig:
    assert isinstance(choice.config, PagedConfig)
    return choice.config


def test_longer_steps_take_more_and_leave_less(monkeypatch: pytest.MonkeyPatch) -> None:
    a_device_with(monkeypatch, ROOM)
    short, long = chosen(prefill_tokens=64), chosen(prefill_tokens=1024)
    needs = [step_bytes(pages_of(short), make("llama"), tokens) for tokens in (64, 1024)]
    assert 0 < needs[0] < needs[1]
    assert long.budget < short.budget <= 0.9 * ROOM
    assert pages_of(long).pages == long.budget // PAGE_BYTES


def test_two_steps_are_counted_where_one_is_started_before_the_other_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    a_device_with(monkeypatch, ROOM)
    config, seen = pages_of(chosen()), []
    compute = PagedBackend.compute

    def spy(backend: PagedBackend, pieces: Any, previous: Any) -> Any:
        seen.append([(len(piece.tokens), piece.wants) for piece in pieces])
        return compute(backend, pieces, previous)

    monkeypatch.setattr(PagedBackend, "compute", spy)
    peaks = iter([900_000_000, 100_000_000, 1_000_000])
    held = iter([5, 5, 12, 12, 12])
    monkeypatch.setattr(mx, "get_active_memory", lambda: next(held))
    monkeypatch.setattr(mx, "get_peak_memory", lambda: 5 + next(peaks))
    found = step_bytes(config, make("llama"), 700)
    assert seen == [[(701, 1)], [(701, 1)], [(512, 512)]]
    assert found == 7 + 2 * (100_000_000 - 7) + 1_000_000 - 7 + 2 * 4 * 512 * VOCABULARY


def test_what_is_asked_for_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_backend, "step_bytes", lambda *_: pytest.fail("nobody has to measure"))
    found = chosen(budget=10 * PAGE_BYTES)
    assert (found.budget, pages_of(found).pages) == (10 * PAGE_BYTES, 10)


def test_steps_are_shorter_where_long_ones_leave_too_little(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where those don't fit at all; what a step may compute is told to the scheduler."""

    def take(config: PagedConfig, module: Any, tokens: int) -> int:
        if tokens > 4096:
            raise OutOfMemory("no memory")
        return tokens * 20_000

    a_device_with(monkeypatch, ROOM)
    monkeypatch.setattr(choose_backend, "step_bytes", take)
    with caplog.at_level("INFO"):
        found = chosen(prefill_tokens=8192)
    assert (found.prefill_tokens, found.budget) == (1024, ROOM - int(1024 * 20_000 * 1.1))
    assert "a step computes up to 1024 prompt tokens, not 8192" in caplog.text
    can = capabilities(prefill_tokens=1024)
    assert scheduler_for(can, OwnerLimits(4, 8192)).limits.prefill_tokens == 1024


def test_no_memory_for_the_shortest_step_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OutOfMemory("no memory")

    a_device_with(monkeypatch, ROOM)
    monkeypatch.setattr(choose_backend, "step_bytes", fail)
    with pytest.raises(ConfigError, match="no memory for a step of 256 tokens of prompts") as caught:
        chosen(prefill_tokens=2048)
    assert caught.value.param == "prefill_tokens"


def test_measuring_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages it ran in are gone, also where it fails."""
    a_device_with(monkeypatch, ROOM)
    module, config = make("llama"), pages_of(chosen())
    step_bytes(config, module, 64)
    before = mx.get_active_memory()
    step_bytes(config, module, 64)
    monkeypatch.setattr(PagedBackend, "compute", lambda *_: (_ for _ in ()).throw(MemoryError("out of memory")))
    with pytest.raises(OutOfMemory):
        step_bytes(config, module, 64)
    assert mx.get_active_memory() - before < PAGE_BYTES
