"""Outcomes of clients, SDKs and suites, and their result file."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent.parent

Kind = Literal["client", "sdk", "suite"]


@dataclass
class Row:
    """One case. `name` is the client's or suite's with `version`, `api` the API that it speaks, `detail` what it did or
    why it failed."""

    kind: Kind
    name: str
    version: str
    api: str
    case: str
    passed: bool
    detail: str = ""
    seconds: float = 0.0

    def line(self) -> str:
        """Return the row for a terminal."""
        outcome = "passed" if self.passed else "FAILED"
        return f"{outcome}  {self.name} {self.version}  {self.case}  {self.detail}".rstrip()


@dataclass
class Results:
    """The rows of one server, and what they come from."""

    target: str
    version: str
    commit: str
    measured: str
    rows: list[Row]
    missing: list[str]

    def save(self, path: Path) -> None:
        """Write the result file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a result file."""
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**found, "rows": [Row(**row) for row in found["rows"]]})


def now(target: str, version: str, rows: list[Row], missing: list[str]) -> Results:
    """Return results of today and of the commit that is checked out."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return Results(target, version, done.stdout.strip(), date.today().isoformat(), rows, missing)
