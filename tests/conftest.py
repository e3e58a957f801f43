from __future__ import annotations

from hypothesis import settings

# An example may take as long as the machine makes it: what others do there must not fail a test.
settings.register_profile("treadle", deadline=None)
settings.load_profile("treadle")
