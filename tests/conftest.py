from __future__ import annotations

import gc
import sys
from collections.abc import Generator

import pytest
from hypothesis import settings

# An example may take as long as the machine makes it: what others do there must not fail a test.
settings.register_profile("treadle", deadline=None)
settings.load_profile("treadle")


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
