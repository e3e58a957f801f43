"""A process whose runner lived on a thread ends in order, also when the start failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import make_tiny

LIVE = """
import sys, threading
from treadle.errors import TreadleError
from treadle.runner.build import build

def live():
    try:
        runner = build(sys.argv[1], memory=int(sys.argv[2]), max_running=2)
    except TreadleError as error:
        print(error)
        return
    runner.warm_up()
    runner.close()
    print("closed")

thread = threading.Thread(target=live)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(("memory", "says"), [(1 << 24, "closed"), (5, "lower `max_running`")])
def test_the_process_exits_cleanly(tmp_path: Path, memory: int, says: str) -> None:
    folder = make_tiny(tmp_path / "m")
    for _ in range(3):
        command = [sys.executable, "-c", LIVE, str(folder), str(memory)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, says in done.stdout) == (0, True), done
