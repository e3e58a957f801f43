"""Each family of vision models against mlx-vlm's own generation: the same tokens, however they are computed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.runner.looped import Looped
from tests.runner.vision.asked import Asked, Picture, VisionModel
from tests.support.tiny_vision import BREAK, FAMILIES
from treadle.core.plan import Admit, DecodeRow, Encode, PrefillChunk, StepPlan

CAT, DOG, OWL = Picture(1), Picture(2, 1), Picture(3, 2)
ModelOf = Callable[[str], VisionModel]


def requests(model: VisionModel, name: str) -> list[Asked]:
    """Requests with an image, with several where mlx-vlm takes them, with the same one twice, and without any."""
    some = [
        model.ask(f"{name} one", CAT, text=1),
        model.ask(f"{name} text", text=2, head=30),
        model.ask(f"{name} other", DOG, text=1),
    ]
    if model.family != "llava":
        some += [
            model.ask(f"{name} two", DOG, OWL, text=3),
            model.ask(f"{name} twice", CAT, CAT, text=4),
        ]
    return some


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_mlx_vlm(family: str, model_of: ModelOf) -> None:
    """Alone; together with text and other images; in short chunks; from the prefix cache; and preempted."""
    model = model_of(family)
    model.runner.forget_prefixes()
    first = model.ask("alone", CAT, text=1)
    expected = model.expected(first)
    alone = Looped(model.runner)
    assert alone.run(first.submit)["alone"] == expected
    for name, prefill_tokens, cached in (("chunked", 16, False), ("cached", 512, True)):
        if not cached:
            model.runner.forget_prefixes()
        some = requests(model, name)
        loop = Looped(model.runner, prefill_tokens=prefill_tokens)
        loop.submit(*(asked.submit for asked in some))
        loop.step()
        preempted = 0
        while loop.has_work:
            loop.step()
            if not cached and loop.now % 5 == 0 and preempted < 4:
                preempted += loop.preempt_last()
        for asked in some:
            assert loop.tokens(asked.submit.id) == model.expected(asked), (name, asked.submit.id)
        assert cached or preempted > 1
    assert model.runner.statistics().features.needed_bytes == 0


@pytest.mark.parametrize("family", ["pixtral", "mistral3"])
def test_a_chunk_may_be_a_mark_between_rows_of_an_image(family: str, model_of: ModelOf) -> None:
    """F5. Before, a step without another image failed, as it took features from none."""
    model = model_of(family)
    runner = model.runner
    runner.forget_prefixes()
    asked = model.ask("a", CAT, text=1)
    prompt = asked.submit.prompt
    mark, end = prompt.index(BREAK), len(prompt) - 1
    runner.execute(StepPlan(step=1, admit=(Admit(asked.submit),), encode=(Encode("a", 0, 0, 9),)))
    for step, (start, stop) in enumerate(pairwise((0, mark, mark + 1, end)), 2):
        runner.execute(StepPlan(step=step, prefill=(PrefillChunk("a", start, stop - start),)))
    tokens = [runner.execute(StepPlan(9 + i, decode=(DecodeRow("a", i),))).rows[0].tokens[0] for i in range(10)]
    runner.release("a")
    assert tokens == model.expected(asked)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_second_question_skips_tower_and_prefill(family: str, model_of: ModelOf) -> None:
    model = model_of(family)
    model.runner.forget_prefixes()
    one = model.ask("one", CAT, text=1, head=36, tail=3)
    loop = Looped(model.runner, prefill_tokens=512)
    loop.run(one.submit)
    model.runner._images.clear()
    stored = model.runner.statistics().features.stored
    again, other = model.ask("again", CAT, text=1, head=36, tail=10), model.ask("other", DOG, text=1, head=36, tail=3)
    loop.run(again.submit, other.submit)
    image = one.submit.images[0]
    assert loop.cached("again") > image.end
    assert loop.cached("other") <= image.start
    assert model.runner.statistics().features.stored == stored + 1, "that of the other picture alone"
    for asked in (one, again, other):
        assert loop.tokens(asked.submit.id) == model.expected(asked)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma3"])
def test_drafts_behind_an_image_change_no_token(family: str, model_of: ModelOf) -> None:
    """Also those that are rejected, of which states are computed again."""
    model = model_of(family)
    runner = model.runner
    runner.forget_prefixes()
    asked = model.ask("a", CAT, text=1, tokens=12)
    expected = model.expected(asked)
    prompt = len(asked.submit.prompt)
    runner.execute(StepPlan(step=1, admit=(Admit(asked.submit),), encode=(Encode("a", 0, 0, 5),)))
    runner.execute(StepPlan(step=2, prefill=(PrefillChunk("a", 0, prompt - 1),)))
    tokens: list[int] = []
    drafted = 0
    with runner.filled_drafts():
        while len(tokens) < 12:
            drafts = min(2, 11 - len(tokens))
            result = runner.execute(
                StepPlan(step=3 + len(tokens), decode=(DecodeRow("a", len(tokens), drafts),), propose=True)
            )
            tokens += result.rows[0].tokens
            drafted += result.rows[0].drafted
    runner.release("a")
    assert tokens == expected
    assert drafted > 0
