"""The attention kernels' own text, over work as the planners cut it, against float32."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from tests.runner.emulated.twins import PEAKED, STEEP, Attention, Twins
from treadle.runner.kv.paged import tiling

KINDS = {
    "64": Attention(64, mx.bfloat16, heads=2, rep=2),
    "64 of 8 bits, windowed": Attention(64, mx.float16, heads=3, rep=1, window=20, bits=8),
    "128, on a small chip": Attention(128, mx.float16, heads=1, rep=5, shared=90),
    "128 of 8 bits": Attention(128, mx.bfloat16, heads=2, rep=4, bits=8),
    "80": Attention(80, mx.bfloat16, heads=2, rep=2),
    "80 of 8 bits, windowed": Attention(80, mx.float16, heads=1, rep=4, window=50, bits=8),
    "96, windowed": Attention(96, mx.float16, heads=2, rep=1, window=40),
    "96 of 8 bits, on a small chip": Attention(96, mx.bfloat16, heads=1, rep=3, bits=8, shared=90),
    "256": Attention(256, mx.float16, heads=1, rep=2),
    "256, windowed, on a small chip": Attention(256, mx.bfloat16, heads=1, rep=3, window=100, shared=99),
    "256 of 8 bits": Attention(256, mx.float16, heads=1, rep=2, bits=8),
}
OTHERS = {
    "64 with sinks, windowed": Attention(64, mx.bfloat16, heads=1, rep=8, window=48, sinks=True),
    "192 and 128, capped": Attention(192, mx.bfloat16, heads=2, rep=1, value_dim=128, softcap=5.0),
    "112 and 144 of 8 bits": Attention(112, mx.float16, heads=1, rep=2, value_dim=144, bits=8),
    "512 with sinks, capped, windowed": Attention(512, mx.float16, heads=2, rep=8, window=50, sinks=True, softcap=5.0),
    "latents": Attention(576, mx.bfloat16, heads=1, rep=20, value_dim=512, latent=True),
    "narrow latents of many heads, on a small chip": Attention(
        288, mx.float16, heads=1, rep=40, value_dim=256, latent=True, shared=99
    ),
}


def few_slots(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """A device that runs `blocks` blocks at a time: many pieces of work for one block, or short ranges split."""
    monkeypatch.setattr(tiling, "DECODE_BLOCKS", blocks)
    monkeypatch.setattr(tiling, "PREFILL_SLOTS", dict.fromkeys(tiling.PREFILL_SLOTS, blocks))
    monkeypatch.setattr(tiling, "WIDE_SLOTS", blocks)
    for name in ("_PREFILL_LEAST", "_WIDE_LEAST"):  # what pays for long rows only
        monkeypatch.setattr(tiling, name, 32)
    for name in ("_MERGE", "_MERGE_EACH"):
        monkeypatch.setattr(tiling, name, 0)


@pytest.mark.parametrize(("seed", "name"), [(i % 2, name) for i, name in enumerate(KINDS)])
def test_tokens_that_decode_see_their_rows(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any length, one token or a few of each: one tile each, of 8 or 16 rows; few blocks with many pieces, and
    many with one each that are merged."""
    kind = KINDS[name]
    dice = random.Random(seed)
    twins = Twins(kind, dice, seed=seed)
    few = tiling.DECODE_ROWS[-1] // kind.rep
    lengths = [2, 17, 33, 180] if seed else [few + 1, 40, 96]
    twins.step({f"r{i}": length for i, length in enumerate(lengths)})
    for blocks in (264, 6, 16):
        few_slots(monkeypatch, blocks)
        for most in (tiling.DECODE_ROWS[0] // kind.rep, few):
            counts = {f"r{i}": dice.randint(1, most) for i in range(dice.randint(3, 9))}
            twins.step(counts, scale=STEEP if blocks == 6 else PEAKED)


@pytest.mark.parametrize(("seed", "name"), [(i % 2, name) for i, name in enumerate(KINDS, 1)])
def test_prompts_in_pieces_see_their_rows(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows that decode, with tiles that end anywhere, in pages that were others' before; whole and in parts that
    are merged."""
    kind = KINDS[name]
    dice = random.Random(seed)
    twins = Twins(kind, dice, seed=seed)
    ids = ["a", "b", "c", "d"]
    for blocks in (264, 16, 40):
        few_slots(monkeypatch, blocks)
        counts = {id_: dice.choice([1, 2, 17, 33, 64, 65, 90, 140]) for id_ in dice.sample(ids, 3)}
        twins.step(counts, scale=STEEP if blocks == 40 and kind.bits == 16 else PEAKED)
        if blocks == 16:
            twins.release("a" if "a" in twins.rows else twins.rows[0])


@pytest.mark.parametrize("name", OTHERS)
def test_other_attention_sees_its_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that decode and prompts, alone and side by side, whole and in parts that are merged."""
    twins = Twins(OTHERS[name], random.Random(7), seed=7)
    twins.step({"a": 70, "b": 3})
    few_slots(monkeypatch, 16)
    twins.step({"a": 1, "b": 1})
    twins.step({"a": 1, "b": 45, "c": 1}, scale=STEEP if OTHERS[name].bits == 16 else PEAKED)
    twins.step({"c": 1, "b": 1, "a": 1})


BOUNDED = {
    "64, windowed": Attention(64, mx.bfloat16, heads=2, rep=2, window=48),
    "128 of 8 bits, windowed": Attention(128, mx.float16, heads=1, rep=4, window=40, bits=8),
    "256, windowed, on a small chip": Attention(256, mx.bfloat16, heads=1, rep=3, window=100, shared=99),
    "512 with sinks, windowed": Attention(512, mx.float16, heads=2, rep=8, window=50, sinks=True),
    "64 with sinks": Attention(64, mx.float16, heads=1, rep=8, sinks=True),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_tokens_see_what_their_columns_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of positions with gaps, and blocks that see all of themselves: in decode and prefill tiles, whole and in
    parts that are merged."""
    twins = Twins(BOUNDED[name], random.Random(9), seed=1, columns=True)
    twins.step({"a": 90, "b": 3, "c": 37})
    few_slots(monkeypatch, 16)
    twins.step({"a": 1, "b": 1, "c": 2})
    twins.step({"a": 1, "b": 150, "c": 2}, scale=STEEP if BOUNDED[name].bits == 16 else PEAKED)
    twins.step({"c": 1, "b": 1, "a": 1})


def test_a_long_row_is_merged_out_of_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts than a merge looks at together, in both kernels."""
    kind = KINDS["64"]
    twins = Twins(kind, random.Random(5), seed=5)
    few_slots(monkeypatch, 264)
    twins.step({"a": 300, "b": 5})
    twins.step({"a": 400, "b": 1})
    twins.step({"a": 70})
    twins.step({"a": 1, "b": 3})


@pytest.mark.parametrize("name", ["64", "128, on a small chip"])
def test_a_long_row_is_gone_through_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than a warp knows the pages of, and than a ring has places."""
    kind = KINDS[name]
    monkeypatch.setattr(tiling, "PREFILL_SLOTS", dict.fromkeys(tiling.PREFILL_SLOTS, 1))
    monkeypatch.setattr(tiling, "DECODE_BLOCKS", 1)
    twins = Twins(kind, random.Random(6), seed=6)
    for count in (*[100] * 11, 1):
        twins.step({"a": count})
