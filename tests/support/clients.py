"""The environment of clients that `make clients` installs: SDKs of Python and JavaScript, node, and schemathesis."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-clients"
PYTHON = FOLDER / "bin" / "python"
NODE_MODULES = FOLDER / "node_modules"


def require_clients() -> None:
    """Skip the test if the environment is not installed. `make test` installs it first."""
    if not (FOLDER / ".made").is_file():
        pytest.skip("the clients are not installed: make clients")
