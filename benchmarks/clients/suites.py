"""Conformance suites: llm-comply for three APIs, and schemathesis over the server's own OpenAPI document."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.clients.results import ROOT, Row

FORMATS = {"openai-chat": "chat", "anthropic": "Anthropic", "open-responses": "Responses"}
"""Formats of llm-comply, with their APIs."""
WITH_IMAGE = "Image Input"
TEST_LIMIT_S = 120
CASES = re.compile(r"\d[\d,]* generated.*")
ENDS = re.compile(r"^.*\b(?:Error|ERROR|Timeout)\b.*$", re.MULTILINE)


def comply(python: Path, url: str, model: str, format_: str, vision: tuple[str, str] | None = None) -> Iterator[Row]:
    """Run llm-comply of an environment's `python` for one format; yield a row per test that was not skipped. A test
    with an image is run against the server and the model of `vision`, where these are given.

    A test that fails is run once more: the answers of a random model may be empty.
    """
    program = python.parent / "llm-comply"
    if not program.exists():
        return
    version = _version(python, "llm-comply")
    command = [str(program), "--format", format_, "-k", "none", "--json"]
    usual = [*command, "-u", f"{url}/v1", "-m", model]
    for test in _tests(usual):
        where = usual
        if vision is not None and test["name"] == WITH_IMAGE:
            where = [*command, "-u", f"{vision[0]}/v1", "-m", vision[1]]
        again = _tests([*where, "--filter", str(test["id"])])[:1] if _failed(test) else []
        test = next(iter(again), test)
        if test["status"] != "skipped":
            detail = _reason(test) if _failed(test) else ""
            yield Row(
                "suite", f"llm-comply {format_}", version, FORMATS[format_], test["name"], not _failed(test), detail
            )


def _failed(test: dict[str, Any]) -> bool:
    return test["status"] in ("failed", "error")


def _reason(test: dict[str, Any]) -> str:
    """Return why a test failed, without the random text of the model."""
    errors = [re.sub(r"\{.*\} is not valid", "the value is not valid", str(e), flags=re.DOTALL) for e in test["errors"]]
    return "; ".join(dict.fromkeys(errors))[:200] or str(test["status"])


def _tests(command: list[str]) -> list[dict[str, Any]]:
    """Return the results of a run of llm-comply; a failed one of its own where it wrote none."""
    done = subprocess.run(
        [*command, "--timeout", str(TEST_LIMIT_S)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    try:
        return list(json.loads(done.stdout)["results"])
    except ValueError:
        detail = " ".join((done.stderr or done.stdout).split())[-200:]
        return [{"id": "", "name": "all", "status": "error", "errors": [detail]}]


def schemathesis(python: Path, seconds: int) -> Iterator[Row]:
    """Run `benchmarks/conformance.py` with schemathesis of an environment's `python`."""
    program = python.parent / "schemathesis"
    if not program.exists() or not seconds:
        return
    began = time.perf_counter()
    script = ROOT / "benchmarks" / "conformance.py"
    command = [sys.executable, str(script), "--schemathesis", str(program), "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    output = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)
    counted, errors = CASES.search(output), ENDS.findall(output) if done.returncode else []
    detail = "; ".join([*([counted[0]] if counted else []), *dict.fromkeys(map(str.strip, errors))])[:200]
    version, took = _version(python, "schemathesis"), round(time.perf_counter() - began, 1)
    yield Row("suite", "schemathesis", version, "all routes", "the OpenAPI document", not done.returncode, detail, took)


def _version(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
