"""In-flight prefix sharing: a sequence waits while another one computes a prefix of its prompt.

A sequence that could join waits for a leader: a sequence of its salt that has joined, is in PREFILL, and still has
`min_shared` tokens or more to compute of the prefix that both prompts share, more than any other sequence has committed
of it. The wait ends when the leader has committed the whole prefix, or leads no longer. Then the sequence looks for
another leader, and joins if there is none.

- A leader has joined and a waiting sequence has not, so none waits in a circle, and a sequence that needs memory before
  it can join keeps no other waiting.
- A sequence that computes its whole prompt, for results of each token, neither waits nor leads. Nor does one whose
  prompt is prefilled in part: it has nothing to share, and would wait longer than its own prefill takes.
- If a runner can share only checkpoints of running sequences (`Sharing.marks`), what others have committed is of no
  use, and the leader's chunks name the checkpoints to keep.
- The last token of a prompt is never reused, so it is not part of the shared prefix.
- Most pairs of prompts differ in one token that is compared first, at most MAX_LEADERS leaders are compared further,
  and a sequence remembers its leader: this is cheap.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Collection
from itertools import islice

from .capabilities import Sharing
from .sequence import Sequence
from .states import State

MAX_LEADERS = 4


def waits_for_prefix(
    seq: Sequence, joined: Collection[Sequence], min_shared: int, sharing: Sharing = Sharing.COPIED
) -> bool:
    """Whether `seq`, which could join, waits for one of the `joined` sequences instead."""
    leader = seq.prefix_leader
    if leader is None or not _can_lead(leader) or leader.committed_tokens >= seq.awaited_tokens:
        seq.prefix_leader = _find_leader(seq, joined, min_shared, marked=sharing.marks)
    return seq.prefix_leader is not None


def checkpoints(leader: Sequence, waiting: Collection[Sequence]) -> tuple[int, ...]:
    """Return the token counts, not yet computed, after which `waiting` sequences go on from `leader`; ascending."""
    counts = {seq.awaited_tokens for seq in waiting if seq.prefix_leader is leader}
    return tuple(sorted(count for count in counts if count > leader.num_computed_tokens))


def common_prefix(a: abc.Sequence[int], b: abc.Sequence[int]) -> int:
    """Return how many tokens both prompts share at their start, without the last token of each. The time grows with
    the shared length only."""
    same, most, piece = 0, min(len(a), len(b)) - 1, 64
    while same < most and a[same : (end := min(same + piece, most))] == b[same:end]:
        same, piece = end, 2 * piece
    high = min(same + piece, most)  # the prefix ends before this, unless it is `most`
    while same < high:
        middle = (same + high + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            high = middle - 1
    return same


def _find_leader(seq: Sequence, joined: Collection[Sequence], min_shared: int, *, marked: bool) -> Sequence | None:
    if seq.request.computes_whole_prompt or seq.sparse is not None:
        return None
    candidates = (other for other in joined if _can_lead(other) and _begins_alike(seq, other, min_shared))
    for leader in islice(candidates, MAX_LEADERS):
        seq.awaited_tokens = common_prefix(seq.keys, leader.keys)
        if leader.committed_tokens < seq.awaited_tokens:
            useful = seq.awaited_tokens - min_shared + 1
            if marked or not _committed_elsewhere(seq, useful, leader, joined):
                return leader
    return None


def _can_lead(seq: Sequence) -> bool:
    whole = seq.request.computes_whole_prompt or seq.sparse is not None
    return seq.joined and seq.state is State.PREFILL and not whole


def _begins_alike(seq: Sequence, leader: Sequence, min_shared: int) -> bool:
    """Whether the first `min_shared` tokens that the leader had to compute are those of `seq`."""
    a, b = seq.keys, leader.keys
    start, end = leader.cached_tokens, leader.cached_tokens + min_shared
    if end >= min(len(a), len(b)) or seq.request.salt != leader.request.salt:
        return False
    return a[end - 1] == b[end - 1] and a[start:end] == b[start:end]


def _committed_elsewhere(seq: Sequence, tokens: int, leader: Sequence, joined: Collection[Sequence]) -> bool:
    """Whether a sequence other than `leader` has committed the first `tokens` tokens of the prompt of `seq`."""
    prompt = seq.keys
    return any(
        other.committed_tokens >= tokens
        and other is not leader
        and other.sparse is None
        and other.request.salt == seq.request.salt
        and other.keys[tokens - 1 : tokens] == prompt[tokens - 1 : tokens]
        and other.keys[:tokens] == prompt[:tokens]
        for other in joined
    )
