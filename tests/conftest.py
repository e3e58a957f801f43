from __future__ import annotations

import gc
import sys
from collections.abc import Generator

import pytest
from hypothesis import settings

from treadle.runner.device import cpu_header

# An example may take as long as the machine makes it: what others do there must not fail a test.
settings.register_profile("treadle", deadline=None)
settings.load_profile("treadle")

LONGEST = (
    "serve/test_recovery.py",
    "runner/emulated/test_attention_texts.py",
    "serve/test_shutdown.py",
    "explore/test_explore.py",
    "text/test_worker_pool.py",
    "runner/test_families.py",
    "serve/test_sdks.py",
    "runner/test_lookahead.py",
    "serve/test_gateway.py",
    "runner/emulated/test_steps.py",
    "serve/test_streams.py",
    "runner/fused/test_decoder.py",
    "serve/test_hostile_text.py",
    "runner/recurrent/test_families.py",
    "serve/test_fleet.py",
    "runner/test_snapshots.py",
    "poison/test_folders.py",
    "cli/test_engine_checks.py",
    "serve/test_keys.py",
    "runner/test_with_scheduler.py",
    "serve/test_logs.py",
    "runner/test_constrained_rows.py",
    "serve/test_chaos.py",
    "runner/emulated/test_packed_gemm_texts.py",
    "serve/test_start.py",
    "poison/test_fuzz.py",
    "serve/test_floods.py",
    "serve/test_openapi_conformance.py",
)
"""Files that take more than about 15 s, those that wait for processes between those that compute."""


def pytest_configure(config: pytest.Config) -> None:
    """Compile the header of MLX's compiled functions while tests are collected, once for all workers."""
    if not hasattr(config, "workerinput"):
        cpu_header.prepare()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: workers take files in this order, and so end at about the same time."""
    order = {f"tests/{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def pytest_collection_finish() -> None:
    """Exclude the collected tests, about a million objects, from each garbage collection of the tests."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the `summary` that tests recorded as a property, such as the number of generated cases."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "summary":
                terminalreporter.write_line(str(value))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test marked `untraced` without the trace function by which coverage is measured. pytest-cov's `no_cover`
    has no effect in a worker of pytest-xdist, where coverage.py has been started three times."""
    if item.get_closest_marker("untraced") is None:
        return (yield)
    trace = sys.gettrace()
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(trace)
