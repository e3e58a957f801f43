"""A client of bare HTTP/2 frames."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def raw() -> ModuleType:
    """`benchmarks/raw_grpc.py`."""
    path = Path(__file__).parents[3] / "benchmarks" / "raw_grpc.py"
    spec = importlib.util.spec_from_file_location("raw_grpc", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
