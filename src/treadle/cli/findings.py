"""Findings of the doctor: each with a mark, and with cause and fix if it is not OK."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.text import Text


class Mark(StrEnum):
    """FAIL: Treadle can't serve. WARN: it can, but worse than possible."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


_COLOURS = {Mark.OK: "green", Mark.WARN: "yellow", Mark.FAIL: "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report: `value` is for people, `facts` are the same as plain values. A finding that is not OK has
    its reason in `value` and its cure in `fix`."""

    section: str
    name: str
    value: str
    mark: Mark = Mark.OK
    fix: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """All findings, in the order of the report."""

    items: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether Treadle could serve."""
        return all(item.mark is not Mark.FAIL for item in self.items)

    def of(self, section: str, name: str) -> Finding | None:
        """Return the finding of that name; None if there is none."""
        return next((i for i in self.items if (i.section, i.name) == (section, name)), None)

    def first_failure(self) -> str:
        """Return the first failure with its cure, in one line; empty if there is none."""
        failed = next((item for item in self.items if item.mark is Mark.FAIL), None)
        if failed is None:
            return ""
        return f"{failed.value}: {failed.fix}" if failed.fix else failed.value

    def to_plain(self) -> dict[str, Any]:
        """Return values for JSON: `ok`, and per section and name the mark, the value, the fix and the facts."""
        sections: dict[str, dict[str, Any]] = {}
        for item in self.items:
            entry: dict[str, Any] = {"mark": item.mark.value, "value": item.value}
            entry |= {"fix": item.fix} if item.fix else {}
            entry |= {"facts": dict(item.facts)} if item.facts else {}
            sections.setdefault(item.section, {})[item.name] = entry
        return {"ok": self.ok, "sections": sections}


def show(findings: Findings, console: Console) -> None:
    """Print a line for each finding under its section, all aligned, and the verdict."""
    width = max((len(item.name) for item in findings.items), default=0)
    section = ""
    for item in findings.items:
        if item.section != section:
            section = item.section
            console.print(Text(section, style="bold"))
        _show_item(item, width, console)
    failed = [item.name for item in findings.items if item.mark is Mark.FAIL]
    verdict = Text(f"Can't serve: {', '.join(failed)}", style="bold red") if failed else Text("Can serve", "bold green")
    console.print(verdict, soft_wrap=True)


def _show_item(item: Finding, width: int, console: Console) -> None:
    mark = (f"{item.mark.value:>6}  ", _COLOURS[item.mark])
    indent = " " * (width + 10)
    console.print(Text.assemble(mark, f"{item.name:<{width}}  ", _folded(item.value, indent, console)), soft_wrap=True)
    if item.fix:
        console.print(Text(indent + _folded(f"-> {item.fix}", indent, console), style="dim"), soft_wrap=True)


def _folded(text: str, indent: str, console: Console) -> str:
    """Wrap text to a terminal's width; elsewhere leave it unbroken, so that it can be searched."""
    if not console.is_terminal:
        return text
    lines = textwrap.wrap(text, max(20, console.width - len(indent)), break_on_hyphens=False)
    return f"\n{indent}".join(lines)
