"""schemathesis: generated requests hold a real server to its own OpenAPI document, for a bounded time."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from benchmarks.clients.suites import CASES

from tests.support.clients import FOLDER, ROOT, require_clients

SECONDS = 8


@pytest.mark.timeout(300)
def test_every_route_answers_as_the_document_says(record_property: Callable[[str, object], None]) -> None:
    require_clients()
    script = str(ROOT / "benchmarks" / "conformance.py")
    options = ["--schemathesis", str(FOLDER / "bin" / "schemathesis"), "--seconds", str(SECONDS)]
    done = subprocess.run(
        [sys.executable, script, *options], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    output = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)
    counted = CASES.search(output)
    if done.returncode or not counted:
        pytest.fail(f"{output}\n{done.stderr}", pytrace=False)
    record_property("summary", f"schemathesis, {SECONDS} s: {counted[0]}")
