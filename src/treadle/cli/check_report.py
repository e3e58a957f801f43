"""Report of `treadle doctor --check`: Markdown to paste into an issue, or plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ..core.capabilities import Capabilities
from ..units import count, size
from .findings import Findings, Mark

_WORDS = {Mark.OK: "pass", Mark.WARN: "pass, with a remark", Mark.FAIL: "**FAIL**"}
_FACTS = (
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
    """Result of one check. `text` holds its figures, or the reason of its failure."""

    name: str
    mark: Mark
    text: str


@dataclass(frozen=True)
class CheckReport:
    """All checks of one model. `capabilities` are the engine's, None if it never started."""

    model: str
    outcomes: tuple[Outcome, ...]
    capabilities: Capabilities | None = None

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(outcome.mark is not Mark.FAIL for outcome in self.outcomes)

    def to_plain(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        return {
            "ok": self.ok,
            "model": self.model,
            "engine": None if self.capabilities is None else msgspec.to_builtins(self.capabilities),
            "outcomes": {o.name: {"mark": o.mark.value, "said": o.text} for o in self.outcomes},
        }

    def to_markdown(self, findings: Findings) -> str:
        """Format two tables: the machine with its software, and the outcome of each check. The model goes by its name,
        not its path."""
        about = [(name, found.value) for section, name in _FACTS if (found := findings.of(section, name))]
        lines = [
            f"### Treadle check: {'PASS' if self.ok else 'FAIL'}",
            "",
            *_table(("what", "here"), [*about, ("model", self._engine())]),
            "",
            *_table(("check", "result", "figures"), [(o.name, _WORDS[o.mark], o.text) for o in self.outcomes]),
        ]
        return "\n".join(lines)

    def _engine(self) -> str:
        if (capabilities := self.capabilities) is None:
            return f"{self.model} (did not start)"
        cache = f", {size(capabilities.kv.budget_bytes)} of cache" if capabilities.kv.budget_bytes else ""
        architecture = f"{capabilities.architecture}, {count(capabilities.parameters)} parameters, {capabilities.dtype}"
        return (
            f"{self.model} ({architecture}, {capabilities.path}: {capabilities.compute.summary()}; "
            f"{size(capabilities.weight_bytes)} of weights{cache}, context {capabilities.context:,})"
        )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    cells = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |" for row in cells]
