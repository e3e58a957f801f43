"""Tokens with positions of their own, and such that see tokens behind them, in every backend's attention."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.backends import Driven, segment
from tests.runner.columns import blocks, logits_of, places, sees, sparse
from tests.runner.conftest import Tiny
from tests.runner.family_paths import chosen, passes_of
from tests.runner.paged.models import PAGE, loaded, make, paged
from tests.support.architectures import ARCHITECTURES
from tests.support.cuda import ReferenceKernels
from treadle.runner.forward.positions import SequencePositions
from treadle.runner.forward.ragged import RaggedBatch
from treadle.runner.forward.segments import KvSequence, RowSegment
from treadle.runner.kv.contiguous.backend import ContiguousConfig
from treadle.runner.kv.cost import KvCost
from treadle.runner.kv.paged.backend import PagedConfig
from treadle.runner.kv.paged.memory import LayerConfig
from treadle.runner.loading.model import LoadedModel

DIM, HEADS, REP = 64, 2, 3


# Positions of a sequence -------------------------------------------------------------------------------------------


def test_positions_follow_those_that_are_known() -> None:
    known = SequencePositions()
    assert known.of(0, 3).tolist() == [0, 1, 2]
    known.put(4, np.array([9, 12], np.int32))
    assert known.of(0, 8).tolist() == [0, 1, 2, 3, 9, 12, 13, 14]
    known.put(5, np.arange(20, 320, dtype=np.int32))
    assert known.of(304, 3).tolist() == [319, 320, 321]
    known.put(2, np.array([[5, 5, 5], [5, 5, 9]], np.int32))
    assert known.of(0, 5).tolist() == [[0, 0, 0], [1, 1, 1], [5, 5, 5], [5, 5, 9], [10, 10, 10]]
    assert known.of(4, 2).tolist() == [10, 11]
    assert known.first_within(2, 2, window=2, chunk=0).tolist() == [1, 2], "windows count indices of three axes"


def test_a_sequences_owner_may_know_all_positions() -> None:
    """Segments need none then, wherever the first of them begins, and what is behind them stays known."""
    sequence = KvSequence("a", "", ())
    sequence.positions = SequencePositions(np.array([0, 1, 5, 6, 9], np.int32))
    for _ in range(2):
        assert RaggedBatch([RowSegment(sequence, (0, 0), 2)]).positions.tolist() == [5, 6]
        assert RaggedBatch([RowSegment(sequence, (0, 0), 4)]).positions.tolist() == [9, 10]


def test_a_part_of_a_segment_has_its_columns() -> None:
    row = segment("a", (7, 8, 9, 10), 3, positions=np.array([3, 9, 11, 12]), last_visible=np.array([4, 4, 5, 6]))
    part = row.part(4, 6, wants=1)
    assert (part.tokens, part.start, part.wants) == ((8, 9), 4, 1)
    assert part.positions.tolist() == [9, 11]
    assert part.last_visible.tolist() == [4, 5]


# Layers ------------------------------------------------------------------------------------------------------------


def _paged(window: int, chunk: int) -> Driven:
    kernels = ReferenceKernels(HEADS, DIM, PAGE, mx.float32, rep=REP)
    layers = [LayerConfig(window or chunk, kernels, chunked=chunk > 0)]
    return Driven(PagedConfig(layers, None, pages=400, keep_prefixes=False))


def _contiguous(window: int, chunk: int, device: str = "cpu") -> Driven:
    own = [window or chunk]
    return Driven(ContiguousConfig(own, None, device, KvCost(0, 0), keep_prefixes=False, chunked=[chunk > 0]))


class Rows:
    """Rows of random keys and values in one layer, and again as plain arrays."""

    def __init__(self, made: Driven, window: int, chunk: int) -> None:
        self.made, self.window, self.chunk = made, window, chunk
        self.known: dict[str, dict[str, Any]] = {}

    def step(self, segments: Sequence[RowSegment]) -> None:
        """Compute the segments; check what their tokens attend to, and the positions that they are turned by."""
        for one in segments:
            if one.id not in self.known:
                self.made.admit(one.id)
                empty = {name: np.zeros((0, HEADS, DIM), np.float32) for name in ("keys", "values")}
                self.known[one.id] = {**empty, "positions": np.zeros(0, np.int32)}
        batch = self.made.begin(self.made.order(segments))
        (layer,) = self.made.backend.layers
        keys, values = (mx.random.normal((batch.count, HEADS, 1, DIM)) for _ in range(2))
        queries = mx.random.normal((batch.count, HEADS * REP, 1, DIM)) * 3
        layer.update_and_fetch(keys, values)
        found = np.array(layer.attend(queries, keys, values, DIM**-0.5, 0, None))
        offsets = np.array(layer.offset)
        for row, first in zip(batch.segments, batch.firsts.tolist(), strict=True):
            own = slice(first, first + len(row.tokens))
            known = self.known[row.id]
            positions = self._positions(row, known["positions"])
            known["positions"] = positions
            known["keys"], known["values"] = (
                np.concatenate([known[name], np.array(new[own, :, 0])])
                for name, new in (("keys", keys), ("values", values))
            )
            assert offsets[own].tolist() == positions[row.start :].tolist()
            wanted = self._plain(np.array(queries[own, :, 0]), row, known)
            np.testing.assert_allclose(found[own, :, 0], wanted, atol=2e-5, rtol=2e-5)

    @staticmethod
    def _positions(row: RowSegment, before: Any) -> Any:
        if row.positions is not None:
            return np.concatenate([before, row.positions])
        first = int(before[-1]) + 1 if len(before) else 0
        return np.concatenate([before, np.arange(first, first + len(row.tokens), dtype=np.int32)])

    def _plain(self, queries: Any, row: RowSegment, known: dict[str, Any]) -> Any:
        last = np.arange(row.end, dtype=np.int32)
        if row.last_visible is not None:
            last[row.start :] = row.last_visible
        mask = sees(known["positions"], last, self.window, self.chunk)[row.start :]
        keys, values = (np.repeat(known[name], REP, axis=1) for name in ("keys", "values"))
        scores = np.einsum("nhd,shd->hns", queries, keys) * DIM**-0.5
        scores = np.where(mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.einsum("hns,shd->nhd", weights / weights.sum(axis=-1, keepdims=True), values)


@pytest.mark.parametrize("backend", [_paged, _contiguous], ids=["paged", "contiguous"])
@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (40, 0), (0, 64)], ids=["all", "window", "chunk"])
def test_tokens_see_by_position(backend: Callable[..., Driven], window: int, chunk: int) -> None:
    """Windows and chunks count positions; some tokens see a block that ends behind them; plain rows beside them."""
    dice = random.Random(window + chunk)
    mx.random.seed(1)
    rows = Rows(backend(window, chunk), window, chunk)
    lengths: dict[str, int] = {}
    for _ in range(5):
        pieces = []
        for id_ in dice.sample(["plain", "a", "b", "c"], 3):
            start, count = lengths.get(id_, 0), dice.choice([1, 1, 3, 17, 90, 150])
            lengths[id_] = start + count
            columns: dict[str, Any] = {}
            if id_ != "plain" and not (count == 1 and start):  # what is decoded follows by itself
                known = rows.known[id_]["positions"] if start else [-1]
                columns = {"positions": sparse(dice, count, int(known[-1]) + 1)}
            if id_ == "c":
                columns["last_visible"] = blocks(dice, start, count)
            pieces.append(segment(id_, (0,) * count, start, **columns))
        rows.step(pieces)


def test_single_tokens_are_attended_to_together_or_by_themselves() -> None:
    """As on a device other than the CPU."""
    rows = Rows(_contiguous(24, 0, "gpu"), 24, 0)
    rows.step([segment("a", (0,) * 50, 0, positions=sparse(random.Random(3), 50))])
    rows.step([segment("a", (0,), 50), segment("plain", (0,), 0)])


# Models ------------------------------------------------------------------------------------------------------------

NAMES = ("llama", "gemma3", "gpt_oss", "glm4_moe_lite", "llama windowed")
_MODULES: dict[str, Any] = {}


def _module(name: str) -> Any:
    if name not in _MODULES:
        _MODULES[name] = make(name)
    return _MODULES[name]


def _model(name: str, way: str) -> LoadedModel:
    module = _module(name)
    model = loaded(module, paged(module), fused=way == "fused")
    if way != "contiguous":
        return model
    library = model.library
    windows = library.windows(module)
    assert windows is not None
    latent = [name == "glm4_moe_lite"] * len(windows)
    config: Any = ContiguousConfig(windows, model.choice.config.selection, "cpu", KvCost(0, 0), latent=latent)
    return replace(model, choice=replace(model.choice, config=config))


def _driven(model: LoadedModel) -> Driven:
    return Driven(model.choice.config, model.module)


def _run(rows: Driven, tokens: Sequence[int], chunks: Sequence[int], **columns: Any) -> Any:
    """All logits (n, V) of one sequence in chunks, beside a plain one."""
    rows.admit("a", tokens=tokens)
    rows.admit("plain", tokens=tokens)
    found, beside, start = [], [], 0
    for count in chunks:
        end = start + count
        own = {name: value[start:end] for name, value in columns.items() if len(value) >= end}
        pieces = [segment("a", tokens[start:end], start, wants=count, **own)]
        pieces.append(segment("plain", tokens[start:end], start, wants=count))
        done = places(rows.compute(pieces))
        found.append(done["a"])
        beside.append(done["plain"])
        start = end
    rows.release("a")
    rows.release("plain")
    return np.concatenate(found), np.concatenate(beside)


@pytest.mark.parametrize("way", ["fused", "routed", "contiguous"])
@pytest.mark.parametrize("name", NAMES)
def test_a_sparse_prompt_is_computed_at_its_positions(name: str, way: str) -> None:
    """In chunks beside a plain sequence; the tokens behind it follow its last position. Against mlx-lm's module in one
    pass, with positions and masks written by hand."""
    model, dice = _model(name, way), random.Random(4)
    tokens = [dice.randrange(256) for _ in range(84)]
    positions = sparse(dice, 80)
    behind = np.arange(positions[-1] + 1, positions[-1] + 5, dtype=np.int32)
    rows = _driven(model)
    found, beside = _run(rows, tokens, [41, 39, 1, 1, 2], positions=positions)
    wanted = logits_of(model, tokens, np.concatenate([positions, behind]))
    np.testing.assert_allclose(found, wanted, atol=2e-3, rtol=2e-3)
    plain = logits_of(model, tokens, np.arange(84, dtype=np.int32))
    np.testing.assert_allclose(beside, plain, atol=2e-3, rtol=2e-3)
    assert np.abs(found - plain).max() > 0.05
    rows.backend.close()


def test_compiled_modules_take_positions() -> None:
    model, dice = chosen({"model_type": "gpt_neox", **ARCHITECTURES["gpt_neox"]}, "cuda"), random.Random(8)
    assert passes_of(model) == "compiled"
    tokens, positions = [dice.randrange(256) for _ in range(44)], sparse(dice, 40)
    rows = _driven(model)
    found, _ = _run(rows, tokens, [33, 7, 1, 1, 2], positions=positions)
    behind = np.arange(positions[-1] + 1, positions[-1] + 5, dtype=np.int32)
    wanted = logits_of(model, tokens, np.concatenate([positions, behind]))
    np.testing.assert_allclose(found, wanted, atol=2e-3, rtol=2e-3)
    rows.backend.close()


@pytest.mark.parametrize("way", ["fused", "contiguous"])
def test_recurrent_layers_go_on_beside_positions(way: str, tiny: Tiny) -> None:
    """In chunks as whole, which differs from plain text."""
    model = _model("qwen3_next", "fused") if way == "fused" else tiny("qwen3_next")
    dice = random.Random(7)
    tokens, positions = [dice.randrange(256) for _ in range(60)], sparse(dice, 58)
    rows = _driven(model)
    found, _ = _run(rows, tokens, [40, 18, 1, 1], positions=positions)
    whole, plain = _run(rows, tokens, [58, 2], positions=positions)
    np.testing.assert_allclose(found, whole, atol=2e-3, rtol=2e-3)
    assert np.abs(found - plain).max() > 0.01
    rows.backend.close()


def test_a_narrowed_layer_sees_by_position(tiny: Tiny) -> None:
    """Where the last layer computes only the token that reaches the head."""
    model, dice = tiny("gemma3"), random.Random(3)
    assert getattr(model.choice.config, "narrows", False)
    tokens, positions = [dice.randrange(256) for _ in range(70)], sparse(dice, 70)
    rows = _driven(model)
    rows.admit("a", tokens=tokens)
    whole = segment("a", tokens, 0, positions=positions)
    rows.compute([whole.part(0, 41)])
    found = places(rows.compute([whole.part(41, 70, wants=1)]))["a"]
    np.testing.assert_allclose(found, logits_of(model, tokens, positions)[-1:], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("way", ["fused", "routed", "contiguous"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_blocks_see_all_of_themselves(name: str, way: str) -> None:
    """Tokens of a block see those behind them up to its end, within a chunk."""
    model, dice = _model(name, way), random.Random(5)
    tokens = [dice.randrange(256) for _ in range(66)]
    last = np.concatenate([blocks(dice, 0, 40), blocks(dice, 40, 24)])
    rows = _driven(model)
    found, _ = _run(rows, tokens, [40, 24, 1, 1], last_visible=last)
    behind = np.arange(64, 66, dtype=np.int32)
    wanted = logits_of(model, tokens, np.arange(66, dtype=np.int32), np.concatenate([last, behind]))
    np.testing.assert_allclose(found, wanted, atol=2e-3, rtol=2e-3)
    rows.backend.close()


@pytest.mark.parametrize("way", ["fused", "routed", "contiguous"])
def test_positions_equal_to_the_index_change_nothing(way: str) -> None:
    """Bit for bit, with a window."""
    model, dice = _model("gemma3", way), random.Random(6)
    tokens = [dice.randrange(256) for _ in range(60)]
    rows = _driven(model)
    plain, _ = _run(rows, tokens, [50, 8, 1, 1])
    found, _ = _run(rows, tokens, [50, 8, 1, 1], positions=np.arange(60, dtype=np.int32))
    assert (found == plain).all()
    rows.backend.close()


def test_plain_passes_have_no_columns(tiny: Tiny) -> None:
    """Nothing beside what plain passes need is made for them, nor for such with positions without windows."""
    model = _model("llama", "fused")
    rows = _driven(model)
    rows.admit("a")
    rows.compute([segment("a", (1,) * 40, 0)])
    step = rows.backend._step
    assert step.columns is None
    assert all(len(tiles.arrays) == 1 for tiles in step.tiles.values())
    programs = len(step.compiled)
    rows.admit("b")
    rows.compute([segment("b", (1,) * 40, 0, positions=sparse(random.Random(1), 40))])
    assert all(len(tiles.arrays) == 1 for tiles in step.tiles.values())
    assert len(step.compiled) == programs
    rows.backend.close()


def test_caches_of_mlx_lm_take_no_positions(tiny: Tiny) -> None:
    rows = _driven(tiny("llama", padded=True))
    assert "take the number for the position" in rows.backend.no_positions
    row = RowSegment(KvSequence("a", "", ()), (1, 2), 0, positions=np.array([3, 5]))
    with pytest.raises(AssertionError, match="take the number"):
        rows.backend.compute([row], None)
