"""Drafts of MTP heads: what they compute, what they keep of a row, and what a row gains with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.drafting.headed import OPTIONS, Headed, check_drafts, maker
from tests.runner.drafting.rows import Row as PlainRow
from tests.runner.drafting.test_draft_in_steps import mixed
from tests.runner.speculated import Speculated
from tests.support.mtp_models import ADDED, aligned, make_headed, tensors, text_config, write_tensors
from treadle.core.image import Image
from treadle.core.messages import Submit
from treadle.runner.drafting.drafter import NewStates
from treadle.runner.drafting.either import Either
from treadle.runner.drafting.head import HeadDrafter
from treadle.runner.drafting.lookup import LookupDrafter
from treadle.runner.forward.positions import SequencePositions
from treadle.runner.forward.segments import KvSequence, RowSegment
from treadle.runner.loading.headed import HeadedModel
from treadle.runner.loading.loader import load
from treadle.runner.loading.model import build_backend
from treadle.runner.loading.mtp import load_head
from treadle.runner.model_runner import ModelRunner
from treadle.runner.vision.positions import axes_positions

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "glm4_moe", "glm4_moe_lite", "mimo")
TOKENS = [(7 * i * i + 3 * i + 5) % 250 for i in range(20)]
Get = Callable[[str], Headed]


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Get:
    return maker(tmp_path_factory.mktemp("headed"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_computes_what_its_description_says(headed: Get, family: str) -> None:
    one = headed(family)
    states = one.states(TOKENS[:-1])
    sequence = KvSequence("a", "", TOKENS)
    backend = build_backend(one.model.head, {"a": sequence}, lambda: 0.0)
    backend.admit(sequence)
    fed = mx.array(states.astype(np.float32))
    segment = RowSegment(sequence, tuple(TOKENS[1:]), 0, wants=len(TOKENS) - 1, states=fed)
    found = np.array(backend.compute([segment], None).logits)
    wanted = one.reference.logits(states, TOKENS)
    assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "glm4_moe_lite", "mimo"])
def test_drafts_are_those_of_a_new_head_that_sees_the_whole_row(headed: Get, family: str) -> None:
    one = headed(family)
    check_drafts(one, one.model)


def test_a_head_that_knows_the_next_token_drafts_it(tmp_path: Path) -> None:
    """Of a model whose next token depends on the last one alone, as its layers add nothing, and of a head like it."""
    size = text_config("glm4_moe")["hidden_size"]
    folder = make_headed(tmp_path, "glm4_moe", **aligned(size))
    write_tensors(folder, {name: value * 0 for name, value in tensors(folder).items() if name.endswith(ADDED)})
    model = load_head(load(folder, **OPTIONS), folder, OPTIONS)
    some = [Submit(id=f"r{i}", prompt=tuple(range(i, 9 + 7 * i)), max_tokens=30) for i in range(4)]
    wanted = Speculated(ModelRunner(model.target), some, drafts=0).run()
    run = Speculated(ModelRunner(model.target, drafter=HeadDrafter(model)), some, drafts=5)
    assert run.run() == wanted
    assert run.accepted == run.drafted > 80
    assert run.steps < 12


def test_every_request_gains_what_it_gains_without_drafts(headed: Get) -> None:
    """Beside look-up, with some that are preempted, and some that leave."""
    one, some = headed("qwen3_5"), mixed(2)[:8]
    wanted = Speculated(ModelRunner(one.plain), some, drafts=0).run()
    drafter, left = HeadDrafter(one.model), [some[1].id, some[2].id]
    runner = ModelRunner(one.model.target, drafter=Either(LookupDrafter(), drafter))
    runner.warm_up()
    run = Speculated(runner, some, drafts=4, chunk=16)
    for id_, tokens in run.run(preempt=1, cancel=left).items():
        assert tokens == wanted[id_][: len(tokens)]
        assert id_ in left or len(tokens) == len(wanted[id_])
    assert run.failures == {}
    assert run.drafted > 15
    assert drafter.statistics().kv_bytes == 0
    runner.close()
    with pytest.raises(AttributeError):
        drafter.statistics()


def test_a_head_that_fails_costs_no_request_its_answer(headed: Get, caplog: pytest.LogCaptureFixture) -> None:
    one, some = headed("mimo"), mixed(2)[:4]
    wanted = Speculated(ModelRunner(one.plain), some, drafts=0).run()
    drafter = HeadDrafter(one.model)
    run = Speculated(ModelRunner(one.model.target, drafter=drafter), some, drafts=4)
    for _ in range(3):
        run.step()

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no page is left")

    drafter._backend.compute = fail  # type: ignore[method-assign, assignment]
    before = run.drafted
    assert run.run() == wanted
    assert run.drafted == before > 0
    assert sum("no page is left" in record.getMessage() for record in caplog.records) == 1
    assert drafter.statistics().kv_bytes == 0


class Row(PlainRow):
    """A row of `tokens`, of which the head gets made-up states."""

    def states(self, start: int, end: int, seed: int = 0) -> NewStates:
        every = np.random.default_rng(seed).standard_normal((100, 256)).astype(np.float32)
        return NewStates(self, start, mx.array(every[start:end]))


def test_a_row_that_misses_states_begins_anew_and_known_ones_count_once(headed: Get) -> None:
    drafter, row = HeadDrafter(headed("mimo").model), Row("a", list(range(1, 41)))
    assert drafter.ready(row) == 0
    drafter.observe([row.states(0, 10)])
    assert drafter.ready(row) == 0, "the last states are missing"
    drafter.observe([row.states(0, 10), row.states(6, 39)])
    assert drafter.ready(row) > 0
    (whole,) = drafter.propose([row], [4])
    row.tokens += [50]
    assert drafter.ready(row) == 0, "the head's own states are none of the model's"
    other = HeadDrafter(headed("mimo").model)
    other.observe([row.states(0, 39)])
    drafter.observe([row.states(39, 40)])
    other.observe([row.states(39, 40)])
    assert drafter.propose([row], [4]) == other.propose([row], [4]) != [whole]
    row.tokens += range(60, 80)
    drafter.observe([row.states(45, 60)])
    assert drafter._rows["a"].start == 45
    drafter.release("a")
    drafter.release("nobody")
    assert drafter.statistics().kv_bytes == 0
    assert drafter.follow([row], 0.1) == []


def test_a_head_has_the_positions_of_a_prompt_that_is_computed_in_part(headed: Get) -> None:
    """Each state is followed by the next token of the text, also where that is not computed."""
    model, chance = headed("mimo").model, np.random.default_rng(2)
    assert model.scale is not None
    tokens, places = [*TOKENS, 9, 4, 1], np.array([0, 1, 2, 9, 10, 16, 17, 18, 19, 20, 21], np.int32)
    apart = list[bool]()
    for _ in range(8):
        states = mx.array(chance.standard_normal((11, model.scale.size)).astype(np.float32))
        row = PlainRow("a", tokens, request=Submit("a", tuple(TOKENS), 9), skipped=11)
        row.positions = SequencePositions(places[:9])
        drafter = HeadDrafter(model)
        drafter.observe([NewStates(row, 0, states[:5]), NewStates(row, 5, states[5:])])
        (drafts,) = drafter.propose([row], [1])
        drafter.close()
        fed = states * model.scale
        following = [tokens[place + 1] for place in places]
        own, gapless = (first_of(model, following, fed, positions) for positions in (places, None))
        assert list(drafts) == [own]
        apart.append(own != gapless)
    assert any(apart)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_head_has_the_positions_on_three_axes_behind_an_image(headed: Get, family: str) -> None:
    """States come in parts, in the middle of the image and behind the prompt, whose positions follow."""
    model, chance = headed(family).model, np.random.default_rng(3)
    tokens, image = [*TOKENS, 9, 4, 1], Image(3, 8, b"", "", (1,), grid=((1, 4, 8),))
    for _ in range(60):  # most first drafts are those of other positions, too
        states = mx.array(chance.standard_normal((22, 256)).astype(np.float32))
        row = PlainRow("a", tokens, request=Submit("a", tuple(TOKENS), 9, images=(image,)))
        row.positions = SequencePositions(axes_positions(len(TOKENS), [image], merge=2))
        drafter = HeadDrafter(model)
        drafter.observe([NewStates(row, start, states[start:end]) for start, end in ((0, 7), (7, 21), (21, 22))])
        (drafts,) = drafter.propose([row], [1])
        drafter.close()
        positions = row.positions.of(0, 22)
        assert positions.shape == (22, 3)
        own, text = (first_of(model, tokens[1:], states, some) for some in (positions, None))
        assert list(drafts) == [own]
        if own != text:
            return
    pytest.fail("no draft depends on positions")


def first_of(model: HeadedModel, following: Sequence[int], states: mx.array, positions: Any) -> int:
    """The first draft behind pairs of `states` and `following` tokens, by one pass of the head's backend."""
    sequence = KvSequence("a", "", following)
    backend = build_backend(model.head, {"a": sequence}, lambda: 0.0)
    backend.admit(sequence)
    segment = RowSegment(sequence, tuple(following), 0, wants=1, states=states, positions=positions)
    logits = backend.compute([segment], None).logits
    backend.release(sequence)
    assert logits is not None
    return int(mx.argmax(logits[0]))


def test_pairs_that_nobody_asks_for_are_computed_for_a_share_of_the_time_or_dropped(headed: Get) -> None:
    drafter, row = HeadDrafter(headed("mimo").model), Row("a", [1] * 20)
    row.request = Submit(id="a", prompt=(1,) * 20, max_tokens=100)
    drafter.token_s = 0.01
    drafter.observe([row.states(0, 19)])
    for end in range(20, 60):
        row.tokens.append(1)
        drafter.observe([row.states(end - 1, end)])
    assert drafter._rows["a"].known == 32, "those of the prompt are computed at once"
    row.tokens += [1] * 40
    drafter.observe([row.states(59, 85)])
    assert drafter._rows["a"].waiting == 53, "there is no time"
    drafter.follow([row], 50.0)
    drafter.observe([row.states(85, 86)])
    assert drafter._rows["a"].waiting == 54, "no more time is saved up than for a few"
    drafter.token_s = 0.001
    drafter.observe([row.states(86, 87)])
    assert drafter._rows["a"].waiting == 1
    drafter.token_s = 0.01
    row.tokens += [1] * 70
    drafter.observe([row.states(87, 99)])
    drafter.observe([NewStates(row, 99, mx.zeros((60, 256)))])
    assert "a" not in drafter._rows
    drafter.observe([NewStates(row, 159, mx.zeros((10, 256)))])
    assert drafter._rows["a"].start == 159


def test_the_time_of_a_pair_is_measured(headed: Get) -> None:
    """Where the head's memory holds few, too."""
    one = headed("mimo").model
    small = one.head.choice.with_memory(256 * one.head.kv.token_bytes + 8 * one.head.kv.row_bytes)
    for model in (one, replace(one, head=replace(one.head, choice=small))):
        drafter = HeadDrafter(model)
        drafter.warm_up()
        assert drafter.token_s > 0
        assert drafter.statistics().kv_bytes == 0


def test_another_row_with_the_same_id_begins_anew(headed: Get) -> None:
    drafter, row = HeadDrafter(headed("mimo").model), Row("a", [1, 2, 3])
    drafter.observe([row.states(0, 2)])
    other = Row("a", [1, 2, 3])
    assert drafter.ready(other) == 0
    drafter.observe([other.states(0, 2)])
    assert drafter.ready(other) > 0
    assert drafter.ready(row) == 0


def test_rows_without_room_have_no_drafts(headed: Get) -> None:
    one = headed("mimo").model
    budget = 300 * one.head.kv.token_bytes + 8 * one.head.kv.row_bytes
    head = replace(one.head, choice=one.head.choice.with_memory(budget))
    drafter, rows = HeadDrafter(replace(one, head=head)), [Row("a", [1] * 40), Row("b", [2] * 40)]
    assert drafter._backend.blocks == 1
    drafter.observe([row.states(0, 39) for row in rows])
    assert [drafter.ready(row) > 0 for row in rows] == [True, False]
    drafter.observe([rows[1].states(30, 39)])
    assert drafter.ready(rows[1]) == 0
    assert [len(tokens) for tokens in drafter.propose(rows, [3, 3])] == [3, 0]
    drafter.release("a")
    drafter.observe([rows[1].states(30, 39)])
    assert drafter.ready(rows[1]) > 0


def test_rows_hold_no_blocks_of_rejected_drafts(headed: Get) -> None:
    drafter, row = HeadDrafter(headed("mimo").model), Row("a", [1] * 252)
    free = drafter._backend.free_blocks()
    drafter.observe([NewStates(row, 0, mx.ones((251, 256)))])
    assert len(drafter.propose([row], [8])[0]) == 8
    assert free - drafter._backend.free_blocks() == 1


def test_states_of_a_prompt_that_is_computed_in_parts_are_all_there(headed: Get) -> None:
    """A prompt that begins as another one does: its recurrent state is kept where they part."""
    drafter = HeadDrafter(headed("qwen3_next").model)
    runner = ModelRunner(headed("qwen3_next").model.target, drafter=drafter)
    prompt = tuple(range(100))
    Speculated(runner, [Submit(id="a", prompt=prompt, max_tokens=2)], drafts=0).run()
    other = Speculated(runner, [Submit(id="b", prompt=(*prompt[:70], *prompt[:50]), max_tokens=9)], drafts=0)
    other.step()
    assert drafter._rows["b"].start == 0


def test_a_row_ends_where_the_context_of_the_head_does(headed: Get) -> None:
    one = headed("mimo").model
    drafter, row = HeadDrafter(replace(one, head=replace(one.head, context=30))), Row("a", [1] * 22)
    drafter.observe([row.states(0, 21)])
    assert drafter.ready(row) > 0
    row.tokens += [1, 1]
    drafter.observe([row.states(21, 23)])
    assert drafter.ready(row) == 0
