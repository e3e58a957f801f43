"""Rows for drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treadle.core.messages import Submit


@dataclass(eq=False)
class Row:
    """A row with a prompt and generated tokens."""

    id: str
    request: Submit
    tokens: list[int] = field(default_factory=list)
    salt: str = ""


def row(
    prompt: Sequence[int],
    generated: Sequence[int] = (),
    *,
    id_: str = "row",
    prediction: Sequence[int] = (),
    speculate: bool = True,
) -> Row:
    request = Submit(id=id_, prompt=tuple(prompt), max_tokens=1000, prediction=tuple(prediction), speculate=speculate)
    return Row(id_, request, [*prompt, *generated])
