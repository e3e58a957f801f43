"""Rows for drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.core.messages import Submit


@dataclass(eq=False)
class Row:
    """A row as the runner has it."""

    id: str = "a"
    tokens: list[int] = field(default_factory=lambda: [1, 2])
    salt: str = ""
    request: Submit = field(default_factory=lambda: Submit(id="", prompt=(0,), max_tokens=100))
    skipped: int = 0
    positions: Any = None


def row(
    prompt: Sequence[int],
    generated: Sequence[int] = (),
    *,
    id_: str = "row",
    prediction: Sequence[int] = (),
    speculate: bool = True,
) -> Row:
    request = Submit(id=id_, prompt=tuple(prompt), max_tokens=1000, prediction=tuple(prediction), speculate=speculate)
    return Row(id_, [*prompt, *generated], request=request)
