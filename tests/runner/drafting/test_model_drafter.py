"""The drafter with a model, alone: its drafts are what mlx-lm generates greedily behind the same tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runner.backends import configured
from tests.runner.conftest import Tiny
from tests.runner.drafting.rows import Row
from tests.runner.paged.models import loaded, make, paged
from tests.runner.reference import reference
from tests.support.tiny import make_tiny
from treadle.core.messages import Submit
from treadle.errors import ModelError
from treadle.runner.base import RunnerBroken
from treadle.runner.drafting.model import READY_BACKLOG, ModelDrafter
from treadle.runner.kv.backend import MOST_DRAFTS
from treadle.runner.loading.loader import load
from treadle.runner.loading.model import LoadedModel

SHARED = list(range(40, 110))


def drafter(model: LoadedModel, vocabulary: int | None = None) -> ModelDrafter:
    return ModelDrafter(model, vocabulary or model.vocabulary)


def in_pages(kind: str) -> LoadedModel:
    module = make("llama windowed" if "windows" in kind else "qwen3")
    return loaded(module, paged(module))


def greedy(model: LoadedModel, tokens: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """What mlx-lm generates behind `tokens`; fast where `drafts` are that."""
    return reference(model, Submit(id="", prompt=tuple(tokens), max_tokens=len(drafts)), drafts)


def follow(made: ModelDrafter, rows: Sequence[Row]) -> None:
    """Until all rows are caught up."""
    for _ in range(40):
        assert made.follow(rows, 1.0) == [], "a proposal costs passes: none is made to be tried"


def steps_to_chunk(made: ModelDrafter, row: Row) -> int:
    """Steps of 0.1 s until the next chunk of the row is computed."""
    before, steps = made.statistics().backlog, 0
    while made.statistics().backlog == before:
        made.follow([row], 0.1)
        steps += 1
    return steps


@pytest.mark.parametrize("kind", ["llama", "gemma3", "pages", "pages with windows"])
def test_drafts_are_what_mlx_lm_generates_after_any_history(tiny: Tiny, kind: str) -> None:
    """Rows join with shared prompts and leave, drafts are accepted in part or not asked for, plain tokens come between;
    past windows, blocks of the prefix cache, and pages."""
    model, dice = in_pages(kind) if kind.startswith("pages") else tiny(kind), random.Random(7)
    made, live, seen = drafter(model), {}, 0
    for turn in range(60):
        if len(live) < 5 and dice.random() < 0.4:
            prompt = SHARED[: dice.randint(0, 70)] + [dice.randrange(256) for _ in range(dice.randint(1, 9))]
            live[f"row {turn}"] = Row(f"row {turn}", prompt)
        made.follow(list(live.values()), 1.0)
        rows = [row for row in live.values() if made.ready(row) and dice.random() < 0.8]
        most = [dice.randint(0, made.ready(row)) for row in rows]
        proposed = made.propose(rows, most)
        assert [len(drafts) for drafts in proposed] == most
        for row, drafts in zip(rows, proposed, strict=True):
            assert list(drafts) == greedy(model, row.tokens, drafts)
            seen += len(drafts)
            row.tokens += [*drafts[: dice.randint(0, len(drafts))], dice.randrange(256)]
        for row in list(live.values()):
            if row not in rows and dice.random() < 0.5:
                row.tokens += [dice.randrange(256) for _ in range(dice.randint(1, 3))]
            if dice.random() < 0.06:
                made.release(live.pop(row.id).id)
    assert seen > 200
    assert made.statistics().prefix.reused > 0, "shared prompts are computed once"
    for id_ in live:
        made.release(id_)
    assert made.statistics().kv_bytes == 0


def test_drafts_go_on_where_the_last_ones_were_all_accepted_and_cut_off(tiny: Tiny) -> None:
    """The step may verify fewer than were proposed, and sample the next one by itself."""
    model = tiny()
    made, row = drafter(model), Row("a", [1, 2, 3])
    (drafts,) = made.propose([row], [6])
    row.tokens += drafts[:3]
    (more,) = made.propose([row], [3])
    assert list(more) == list(drafts[3:])
    (again,) = made.propose([row], [3])
    assert again == more, "a row may gain nothing"


def test_a_long_prompt_is_computed_in_chunks_for_a_share_of_the_steps_and_keeps_no_other_row_waiting(
    tiny: Tiny,
) -> None:
    model = tiny()
    made = drafter(model)
    made.warm_up()
    made.token_s = 0.001
    long, short = Row("long", [5, 6] * 400), Row("short", [7] * (READY_BACKLOG + 2))
    assert (made.ready(long), made.propose([long], [4])) == (0, [()])
    made.follow([long, short], 0.1)
    assert made.ready(short) == MOST_DRAFTS, "the fewest tokens first"
    assert made._rows["long"].backlog == 799 - (100 - READY_BACKLOG - 1), "a chunk takes no longer than a step"
    assert 15 <= steps_to_chunk(made, long) <= 18, "a chunk is paid by the steps that follow"
    for _ in range(400):
        made.follow([], 0.0)
    assert 50 < steps_to_chunk(made, long) < 70, "steps that ask for no drafts pay little: a 64th"
    made.token_s = 0.0001
    assert steps_to_chunk(made, long) > 150, "a 200th, where that keeps up with one row"
    soon = Row("soon", [8] * 200)
    made.follow([soon], 0.1)
    assert made._rows["soon"].backlog == 199
    assert made.ready(soon) == MOST_DRAFTS, "a quarter of a step is worth no waiting"
    made.token_s = 0.0
    follow(made, [long, short])
    (drafts,) = made.propose([long], [made.ready(long)])
    assert len(drafts) == MOST_DRAFTS
    assert list(drafts) == greedy(model, long.tokens, drafts)


def test_a_long_prompt_catches_up_though_nobody_can_ask_for_drafts_meanwhile(tiny: Tiny) -> None:
    made, row = drafter(tiny()), Row("a", [5, 6] * 150)
    made.token_s, step_s = 0.001, 0.032  # a sixteenth is two tokens, a 64th half a one
    for _ in range(400):
        made.follow([row], step_s)
        row.tokens.append(7)
        if made.ready(row):
            return
    raise AssertionError(f"{made._rows['a'].backlog} tokens are left")


def test_rows_that_nobody_asks_for_drafts_pay_little(tiny: Tiny) -> None:
    made, row = drafter(tiny()), Row("a", [5, 6])
    made.token_s = 0.001
    for _ in range(400):
        made.follow([row], 0.032)
    assert made._asking < 0.01


def test_drafts_end_where_the_context_of_the_draft_does(tiny: Tiny) -> None:
    model = tiny(context=64)
    made, row = drafter(model), Row("a", [9] * 60)
    follow(made, [row])
    assert made.ready(row) == 5, "the last draft is not computed"
    (drafts,) = made.propose([row], [8])
    assert len(drafts) == 5
    assert list(drafts) == greedy(model, row.tokens, drafts)
    row.tokens += [*drafts, 1]
    made.follow([row], 1.0)
    assert (made.ready(row), made.propose([row], [8])) == (0, [()])
    beyond = Row("b", [9] * 65)
    made.follow([beyond], 1.0)
    assert (made.ready(beyond), made.propose([beyond], [8])) == (0, [()])


def test_a_row_has_no_drafts_while_there_is_no_memory_for_it(tiny: Tiny) -> None:
    """The draft's cache may run out first: that is never an error."""
    made = drafter(configured(tiny(), blocks=2))
    first, second, third = Row("a", [1] * 9), Row("b", [2] * 9), Row("c", [3] * 9)
    rows = [first, second, third]
    made.follow(rows, 1.0)
    assert [len(drafts) for drafts in made.propose(rows, [4, 4, 4])] == [4, 4, 0]
    made.follow(rows, 1.0)
    assert [made.ready(row) > 0 for row in rows] == [True, True, False]
    made.release("a")
    made.follow(rows[1:], 1.0)
    assert made.ready(third)
    assert len(made.propose([third], [4])[0]) == 4


def test_the_first_pass_of_a_proposal_is_no_longer_than_a_chunk(tiny: Tiny) -> None:
    """Rows that many plain steps have left behind: there is memory for passes of so many tokens."""
    model = tiny()
    model = replace(model, choice=replace(model.choice, prefill_tokens=50))
    made, rows = drafter(model), [Row(id_, [i] * 20) for i, id_ in enumerate("abcd")]
    most = [3] * len(rows)
    assert [len(drafts) for drafts in made.propose(rows, most)] == [3, 3, 0, 0]
    assert [len(drafts) for drafts in made.propose(rows, most)] == [3, 3, 3, 3]


class Faulty:
    """A module that raises when its turn has come."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


@pytest.mark.parametrize(
    "error", [MemoryError("no blocks"), ValueError("bad shape"), RuntimeError("unable to allocate 5 bytes")]
)
def test_a_failure_turns_the_drafts_of_its_rows_off_and_is_told_once(
    tiny: Tiny, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    module = Faulty(tiny().module)
    made = drafter(replace(tiny(), module=module))
    well, ill, late = Row("well", [1, 2]), Row("ill", [3, 4]), Row("late", [5] * 99)
    made.propose([well], [2])
    well.tokens.append(7)
    module.error = error
    assert made.propose([ill], [3]) == [()]
    made.follow([well, ill, late], 1.0)
    assert [made.ready(row) for row in (ill, late)] == [0, 0]
    assert sum("draft model failed" in record.message for record in caplog.records) == 1
    module.error = None
    made.follow([well, ill, late], 1.0)
    assert [made.ready(row) for row in (well, ill, late)] == [MOST_DRAFTS, 0, 0]
    (drafts,) = made.propose([well], [3])
    assert list(drafts) == greedy(tiny(), well.tokens, drafts)
    made.release("ill")
    assert len(made.propose([ill], [3])[0]) == 3, "it is another request now"


def test_a_fault_of_the_runtime_comes_through(tiny: Tiny) -> None:
    module = Faulty(tiny().module)
    made = drafter(replace(tiny(), module=module))
    module.error = RuntimeError("stream lost")
    with pytest.raises(RunnerBroken):
        made.propose([Row("a", [1, 2])], [3])


def test_ids_beyond_either_vocabulary_are_neither_drafted_nor_fed(tiny: Tiny, tmp_path: Path) -> None:
    """Rows of padding in the embedding may differ; their logits may be anything."""
    wide = load(make_tiny(tmp_path / "wide", vocabulary_extra=2000, seed=3))
    made, row = drafter(wide, 261), Row("a", [1, 2, 3])
    for _ in range(8):
        (drafts,) = made.propose([row], [8])
        assert max(drafts) < 261
        row.tokens += drafts
    narrow = drafter(tiny(), wide.vocabulary)
    fits, beyond, later = Row("a", [1, 2]), Row("b", [2000, 2]), Row("c", [1, 2])
    assert [len(one) for one in narrow.propose([fits, beyond, later], [2, 2, 2])] == [2, 0, 2]
    later.tokens.append(2000)
    narrow.follow([fits, beyond, later], 1.0)
    assert [narrow.ready(row) for row in (fits, beyond, later)] == [MOST_DRAFTS, 0, 0]


def test_a_row_that_is_admitted_again_starts_anew(tiny: Tiny) -> None:
    made = drafter(tiny())
    made.propose([Row("a", [1, 2, 3])], [4])
    other = Row("a", [9, 8, 7, 6])
    assert made.ready(other) == 0
    (drafts,) = made.propose([other], [4])
    assert list(drafts) == greedy(tiny(), other.tokens, drafts)


def test_a_row_that_may_not_be_drafted_takes_no_memory(tiny: Tiny) -> None:
    made, row = drafter(tiny()), Row("a", [1] * 99)
    row.request = Submit(id="a", prompt=(1,), max_tokens=9, speculate=False)
    made.follow([row], 1.0)
    assert (made.ready(row), made.propose([row], [3]), made.statistics().kv_bytes) == (0, [()], 0)


@pytest.mark.parametrize(
    ("architecture", "options", "reason"),
    [
        ("llama", {"padded": True}, "mlx-lm's caches can be cut for all sequences of a batch alike"),
        ("qwen3_next", {}, "it has recurrent layers, whose states can't be cut"),
    ],
)
def test_a_model_whose_drafts_can_not_be_taken_back_is_refused(
    tiny: Tiny, architecture: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=f"can't draft tokens: {reason}.*give another model, or leave it out") as error:
        drafter(tiny(architecture, **options))
    assert error.value.param == "draft"


@pytest.mark.parametrize("kind", ["llama", "pages"])
def test_the_warm_up_leaves_nothing(tiny: Tiny, kind: str) -> None:
    model = tiny(kind) if kind == "llama" else replace(in_pages(kind), max_running=2)
    made = drafter(model)
    made.warm_up()
    assert made.token_s > 0
    assert (made.statistics().kv_bytes, made.statistics().prefix.held) == (0, 0)
    made.close()


def test_a_row_that_is_ready_fits_into_a_proposal(tiny: Tiny) -> None:
    """With chunks that are shorter than what a fast model might leave to a proposal's first pass."""
    model = tiny("llama")
    made = drafter(replace(model, choice=replace(model.choice, prefill_tokens=100)))
    made.token_s = 1e-4
    row = Row("a", list(range(40)) * 5)
    for _ in range(40):
        made.follow([row], 1.0)
        if made.ready(row):
            assert len(made.propose([row], [4])[0]) == 4
            return
    raise AssertionError("it is never ready")
