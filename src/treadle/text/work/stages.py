"""Stages of a text job: numbers in shared memory, names in messages."""

from __future__ import annotations

STAGES = (
    "",
    "reading the request's JSON",
    "the model's chat template",
    "the model's tokenizer",
    "compiling the request's grammar",
)
IDLE, PARSING, RENDERING, TOKENIZING, COMPILING = range(len(STAGES))

_USUAL_ADVICE = "send fewer or shorter messages"
_ADVICE = {STAGES[COMPILING]: "use a smaller schema or grammar, or leave it out"}


def refusal(stage: str, how: str) -> str:
    """Return the message of a request that broke a limit of its worker in `stage`, with advice."""
    return f"{stage} {how}: {_ADVICE.get(stage, _USUAL_ADVICE)}"
