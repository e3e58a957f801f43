from __future__ import annotations

import gc

from hypothesis import settings

# An example may take as long as the machine makes it: what others do there must not fail a test.
settings.register_profile("treadle", deadline=None)
settings.load_profile("treadle")


def pytest_collection_finish() -> None:
    """Exclude the collected tests, about a million objects, from each garbage collection of the tests."""
    gc.collect()
    gc.freeze()
