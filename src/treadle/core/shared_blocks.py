"""Blocks that a sequence will share with a running one once it joins (`Sharing.holds`). They cost no memory.

Only blocks of applied steps count: until a leader has computed a prompt, every sequence that waits for it is counted in
full. If the running sequence ends first, its blocks are only cached, and sequences admitted because of them may be
preempted. A sequence remembers its peer and is compared with MAX_PEERS at most, so this is cheap.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from .inflight_prefix import common_prefix
from .sequence import Sequence

MAX_PEERS = 4


def shared_blocks(seq: Sequence, running: Collection[Sequence], block_size: int) -> int:
    """Return how many whole blocks at the start of `seq`, which has not joined, one of `running` holds."""
    if seq.joined or seq.request.computes_whole_prompt or seq.sparse is not None:
        return 0
    if seq.prefix_peer is None or not (seq.prefix_peer.live and seq.prefix_peer.joined):
        seq.prefix_peer = _closest_peer(seq, running, block_size)
    if seq.prefix_peer is None:
        return 0
    return min(seq.shared_tokens, seq.prefix_peer.committed_tokens) // block_size


def _closest_peer(seq: Sequence, running: Collection[Sequence], block_size: int) -> Sequence | None:
    salt, first = seq.request.salt, seq.keys[:block_size]
    dense = (r for r in running if r.joined and r.sparse is None)
    alike = (r for r in dense if r.request.salt == salt and r.keys[:block_size] == first)
    peer, seq.shared_tokens = None, 0
    for other in islice(alike, MAX_PEERS):
        length = common_prefix(seq.keys, other.keys)
        if length > seq.shared_tokens:
            peer, seq.shared_tokens = other, length
    return peer
