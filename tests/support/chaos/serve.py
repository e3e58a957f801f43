"""`treadle serve` whose engine fails on orders: `python -m tests.support.chaos.serve MODEL OPTION...`.

The server is the real one. Its engine's process starts from `engine.entry`, which adds the faults.
"""

from __future__ import annotations

import sys

from treadle.cli import main
from treadle.compose import engine

ENTRY = "tests.support.chaos.engine:entry"

if __name__ == "__main__":
    engine.OWNER_ENTRY = ENTRY
    sys.argv[1:1] = ["serve"]
    main()
