"""The `treadle` command in forks of one interpreter that has imported it: a run takes milliseconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = """
import json, os, sys
import treadle.cli.app, treadle.cli.fleet, treadle.cli.foreign_options, treadle.cli.serve
sys.argv[0] = "treadle"
for line in sys.stdin:
    arguments, folder = json.loads(line)
    if not (pid := os.fork()):
        for name, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(os.path.join(folder, name), os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
        sys.argv[1:] = arguments
        treadle.cli.main()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class ForkedCommand:
    """Interpreter that runs the command in a fork, again and again. Outputs go through files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, "-c", PROGRAM], **pipes)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `treadle` with these arguments to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([arguments, str(self._folder)]) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        stdout, stderr = ((self._folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(arguments, code, stdout, stderr)

    def close(self) -> None:
        """End the interpreter."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
