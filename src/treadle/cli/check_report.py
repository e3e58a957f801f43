"""The report of `treadle doctor --check`: Markdown to paste into an issue, or plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ..core.messages import Capabilities
from ..units import size
from .findings import Findings, Mark, count

_WORDS = {Mark.OK: "pass", Mark.WARN: "pass, with a remark", Mark.FAIL: "**FAIL**"}
_SHOWN = (
    ("System", "platform"),
    ("System", "CPU cores"),
    ("System", "memory"),
    ("Software", "Python"),
    ("Software", "treadle"),
    ("Software", "mlx"),
    ("Software", "mlx-lm"),
    ("MLX", "device"),
    ("MLX", "BLAS"),
)


@dataclass(frozen=True)
class Outcome:
    """How one check went: `said` holds its figures, or why it failed."""

    name: str
    mark: Mark
    said: str


@dataclass(frozen=True)
class CheckReport:
    """All checks of one model; `can` is what the engine said of itself, None when it never started."""

    model: str
    outcomes: tuple[Outcome, ...]
    can: Capabilities | None = None

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(outcome.mark is not Mark.FAIL for outcome in self.outcomes)

    def to_plain(self) -> dict[str, Any]:
        """As JSON shows it."""
        return {
            "ok": self.ok,
            "model": self.model,
            "engine": None if self.can is None else msgspec.to_builtins(self.can),
            "outcomes": {o.name: {"mark": o.mark.value, "said": o.said} for o in self.outcomes},
        }

    def to_markdown(self, findings: Findings) -> str:
        """Two tables: what ran where, and how each check went. The model goes by its name, not its path."""
        about = [(name, found.value) for section, name in _SHOWN if (found := findings.of(section, name))]
        lines = [
            f"### Treadle check: {'PASS' if self.ok else 'FAIL'}",
            "",
            *_rows(("what", "here"), [*about, ("model", self._engine())]),
            "",
            *_rows(("check", "result", "figures"), [(o.name, _WORDS[o.mark], o.said) for o in self.outcomes]),
        ]
        return "\n".join(lines)

    def _engine(self) -> str:
        if (can := self.can) is None:
            return f"{self.model} (did not start)"
        cache = f", {size(can.kv_budget_bytes)} of cache" if can.kv_budget_bytes else ""
        return (
            f"{self.model} ({can.architecture}, {count(can.parameters)} parameters, {can.dtype}, {can.path}; "
            f"{size(can.weight_bytes)} of weights{cache}, context {can.context:,})"
        )


def _rows(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    cells = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |" for row in cells]
