"""The core and its tests need no tensor library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
MODULES = [f"tests.core.{path.stem}" for path in sorted(HERE.glob("*.py")) if path.stem != "__init__"]
SCRIPT = """
import importlib, sys
sys.path[:0] = {paths}
for name in {modules}:
    importlib.import_module(name)
print(*sorted(name for name in sys.modules if name.split(".")[0].startswith(("mlx", "torch"))))
"""


def test_the_cores_tests_load_no_mlx() -> None:
    paths = [str(HERE.parents[1]), *sys.path]
    script = SCRIPT.format(paths=paths, modules=MODULES)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
