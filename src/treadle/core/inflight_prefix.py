"""Rows that wait for the beginning of their prompt, because another one is computing it.

A row that could join waits for a lead: a row of its salt that has joined, is still in PREFILL, and has at least `worth`
tokens to compute of what both prompts begin with, more than any other row has kept of it. The wait is over when the
lead has kept all of that, as of the last step that was applied, or leads no more. Then the row looks for another lead,
and joins where there is none.

- A lead has joined, and who waits has not: nobody waits in a circle, and whoever needs room before it can join keeps
  nobody waiting.
- Who wants the log-probabilities of its prompt computes all of it, also what others have kept: it neither waits nor
  leads.
- Where only what was asked for is kept of a row that runs (`Sharing.MARKED`), what the others have kept is no use, and
  the lead is asked to keep what is waited for (`awaited`).
- The last token of a prompt is never reused, so it is not part of what is shared.
- It costs little: most pairs of prompts are told apart by one token, no more than MOST_LEADS leads of a row are
  compared further, and the row remembers whom it waits for, and how long.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Collection
from itertools import islice

from .messages import Sharing
from .sequence import Sequence
from .states import State

MOST_LEADS = 4


def follows(row: Sequence, joined: Collection[Sequence], worth: int, sharing: Sharing = Sharing.COPIED) -> bool:
    """Whether `row`, which could join, waits for one of those who have `joined` instead."""
    if row.lead is None or not _computes(row.lead) or row.lead.kept >= row.awaits:
        row.lead = _find(row, joined, worth, marked=sharing is Sharing.MARKED)
    return row.lead is not None


def awaited(lead: Sequence, waiting: Collection[Sequence]) -> tuple[int, ...]:
    """After how many tokens that `lead` has still to compute those who wait for it go on."""
    return tuple(sorted({row.awaits for row in waiting if row.lead is lead and row.awaits > lead.cached}))


def shared(a: abc.Sequence[int], b: abc.Sequence[int]) -> int:
    """How many tokens both prompts begin with, but for the last of each. Takes no longer than they are alike."""
    same, most, piece = 0, min(len(a), len(b)) - 1, 64
    while same < most and a[same : (end := min(same + piece, most))] == b[same:end]:
        same, piece = end, 2 * piece
    high = min(same + piece, most)  # not all of these are the same, unless that is `most`
    while same < high:
        middle = (same + high + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            high = middle - 1
    return same


def _find(row: Sequence, joined: Collection[Sequence], worth: int, *, marked: bool) -> Sequence | None:
    if row.request.prompt_logprobs is not None:
        return None
    for lead in islice((lead for lead in joined if _computes(lead) and _alike(row, lead, worth)), MOST_LEADS):
        row.awaits = shared(row.request.prompt, lead.request.prompt)
        if lead.kept < row.awaits and (marked or not _kept(row, row.awaits - worth + 1, lead, joined)):
            return lead
    return None


def _computes(row: Sequence) -> bool:
    return row.joined and row.state is State.PREFILL and row.request.prompt_logprobs is None


def _alike(row: Sequence, lead: Sequence, worth: int) -> bool:
    """Whether the first `worth` tokens that the lead had to compute are those of `row`."""
    a, b = row.request, lead.request
    start, end = lead.reused, lead.reused + worth
    if end >= min(len(a.prompt), len(b.prompt)) or a.salt != b.salt:
        return False
    return a.prompt[end - 1] == b.prompt[end - 1] and a.prompt[start:end] == b.prompt[start:end]


def _kept(row: Sequence, tokens: int, lead: Sequence, joined: Collection[Sequence]) -> bool:
    """Whether another one than `lead` has kept the first `tokens` of the row's prompt."""
    prompt = row.request.prompt
    return any(
        other.kept >= tokens
        and other is not lead
        and other.request.salt == row.request.salt
        and other.request.prompt[tokens - 1 : tokens] == prompt[tokens - 1 : tokens]
        and other.request.prompt[:tokens] == prompt[:tokens]
        for other in joined
    )
