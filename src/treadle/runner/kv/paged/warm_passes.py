"""Steps that a paged backend warms up with: batch sizes for which kernels are loaded, or passes compiled.

A matrix product's kernel is loaded at its first use, which takes 10 ms and more. MLX keeps its own kernels on disk once
they are compiled; custom ones it compiles at each start. A pass that is not compiled yet takes 10 to 20 ms longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....core.plan import MAX_SCORED_TOKENS
from ...forward.batch_buckets import decode_bucket, mixed_bucket
from ..backend import WarmLimits, WarmPass

_KERNEL_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
_PASS_SIZES = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_LONG = 2048
"""The longest chunk for which passes are compiled ahead."""
_MOST_MIXED = 400
"""Passes of sequences that decode beside a chunk, of which fewer than there are programs are compiled ahead."""


def kernel_passes(chunk_sizes: Sequence[int], tokens: int, limits: WarmLimits) -> list[WarmPass]:
    """Prompts of as many tokens as kernels differ for, of a cache for `tokens` tokens; of short ones all logits are
    computed."""
    longest = min(min(limits.context, tokens) - 1, limits.prefill_tokens or _PASS_SIZES[-1])
    scored = [WarmPass(chunks=(size,), scored=1) for size in _KERNEL_SIZES]
    longer = [WarmPass(chunks=(size,)) for size in chunk_sizes or _PASS_SIZES]
    return [one for one in [*scored, *longer] if one.chunks[0] <= longest]


def compiled_passes(chunk_sizes: Sequence[int], block: int, blocks: int, limits: WarmLimits) -> list[WarmPass]:
    """Batches that decode, with and without a chunk of a prompt beside them, where passes are compiled for buckets."""
    longest = min(_LONG, limits.prefill_tokens or _LONG, limits.context - 1)
    chunks = [size for size in chunk_sizes if size <= longest]
    mixed = [WarmPass(rows, (chunk,)) for rows in _buckets(mixed_bucket, limits.max_running) for chunk in chunks]
    decoding = [WarmPass(rows) for rows in _buckets(decode_bucket, limits.max_running)]
    passes = [*mixed[:_MOST_MIXED], *decoding]
    return [one for one in passes if one.decoding + -(-sum(one.chunks) // block) <= blocks]


def short_passes(short: int, block: int, blocks: int, limits: WarmLimits) -> list[WarmPass]:
    """Short chunks, as what a cached prefix leaves of a prompt: of up to `short` tokens, which are computed with the
    sequences that decode, alone and beside these. Attention has one program for up to half of `short`."""
    longest, known = min(short, limits.context - 1), dict[tuple[int, int, bool], WarmPass]()
    for size in _buckets(decode_bucket, limits.max_running + longest):
        for count in range(min(size, longest), 1, -1):
            decoding = size - count
            if decoding <= limits.max_running:
                key = size, mixed_bucket(decoding) if decoding else 0, count > short // 2
                known.setdefault(key, WarmPass(decoding, (count,)))
    return [one for one in known.values() if one.decoding + -(-one.chunks[0] // block) <= blocks]


def verifying_passes(short: int, block: int, blocks: int, limits: WarmLimits) -> list[WarmPass]:
    """Batches that verify drafts: of one sequence any number of them, and of more for each bucket of tokens those for
    which attention has another program: no sequence has more than half of `short` tokens, or than `short`, or one
    has."""
    needed = -(-(2 + limits.draft_tokens) // block)  # blocks of a sequence
    most = min(limits.max_running, blocks // needed)
    passes = [WarmPass(1, drafts=count) for count in range(1, limits.draft_tokens + 1) if most]
    known = set()
    for rows in range(1, most + 1):
        for drafts in range(1, limits.draft_tokens + 1):
            size = decode_bucket(rows * (1 + drafts))
            key = size, drafts >= short // 2, drafts >= short
            if key not in known and size <= MAX_SCORED_TOKENS:
                known.add(key)
                passes += [WarmPass(rows, drafts=drafts)] if rows > 1 else []
    return passes


def _buckets(bucket: Callable[[int], int], most: int) -> list[int]:
    """Buckets of up to `most` sequences."""
    return sorted({bucket(count) for count in range(1, most + 1)})
