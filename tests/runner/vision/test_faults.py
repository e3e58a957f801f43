"""Images that can't be encoded, and steps that fail with them: nothing else is lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from tests.runner.looped import Looped
from tests.runner.noted_switch import NotedSwitch
from tests.runner.vision.asked import Asked, Picture, VisionModel
from treadle.core.messages import FinishReason, Image, Pooling
from treadle.core.plan import Admit, DecodeRow, Encode, PrefillChunk, StepPlan
from treadle.runner import step_images

ModelOf = Callable[[str], VisionModel]
CAT, DOG = Picture(1), Picture(2, 1)


@pytest.fixture
def model(model_of: ModelOf) -> VisionModel:
    made = model_of("qwen3_vl")
    made.runner.forget_prefixes()
    return made


def changed(asked: Asked, **fields: Any) -> Asked:
    """The same request with another first image."""
    first, *others = asked.submit.images
    images = (msgspec.structs.replace(first, **fields), *others)
    return Asked(msgspec.structs.replace(asked.submit, images=images), asked.pixels)


def error_of(loop: Looped, id_: str) -> str:
    (finish,) = [output.finish for output in loop.outputs[id_] if output.finish is not None]
    assert finish.reason is FinishReason.ERROR
    return finish.message


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"shm": "/treadle-0-0"}, "can't be encoded: .*No such file"),
        ({"shape": (24, 1000)}, "can't be encoded"),
        ({"shape": (24, 10)}, "can't be encoded"),
        ({"grid": ((1, 2, 4),)}, "an image of 1 by 2 features has 6 tokens"),
    ],
    ids=["gone", "smaller", "other numbers", "other grid"],
)
def test_pixels_that_do_not_fit_fail_their_request_alone(
    fields: dict[str, Any], error: str, model: VisionModel
) -> None:
    good, text = model.ask("good", DOG, text=1), model.ask("text", head=20)
    bad = changed(model.ask("bad", CAT, text=1), hash=b"bad", **fields)
    loop = Looped(model.runner)
    loop.run(good.submit, bad.submit, text.submit)
    assert re.search(error, error_of(loop, "bad"))
    for asked in (good, text):
        assert loop.tokens(asked.submit.id) == model.expected(asked)
    assert model.runner.statistics().features.needed_bytes == 0


def test_a_picture_with_other_placeholders_than_features_fails(model: VisionModel) -> None:
    bad = model.ask("bad", CAT, text=1)
    first = bad.submit.images[0]
    prompt = list(bad.submit.prompt)
    prompt[first.start] = 7
    loop = Looped(model.runner)
    loop.run(msgspec.structs.replace(bad.submit, prompt=tuple(prompt)))
    assert "5 tokens stand for an image of 6 features" in error_of(loop, "bad")


@pytest.mark.parametrize("number", range(1, 6))
def test_a_step_that_fails_is_computed_again(number: int, model: VisionModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it computed: layers of the first image, its tokens, layers of the second."""
    asked, other = model.ask("two", CAT, DOG, text=1), model.ask("one", DOG, text=2)
    launch, steps = model.runner._launch, 0

    def fails_once(*arguments: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == number:
            raise ValueError("a step fails by lot")
        launch(*arguments)

    monkeypatch.setattr(model.runner, "_launch", fails_once)
    loop = Looped(model.runner, prefill_tokens=16)
    loop.run(asked.submit, other.submit)
    for one in (asked, other):
        assert loop.tokens(one.submit.id) == model.expected(one)


def test_cancels_at_each_stage_leave_nothing(model: VisionModel) -> None:
    for steps in range(1, 9):
        gone, stays = model.ask("gone", CAT, DOG, text=1), model.ask("stays", DOG, text=2)
        loop = Looped(model.runner, prefill_tokens=16)
        loop.submit(gone.submit, stays.submit)
        for _ in range(steps):
            loop.step()
        loop.cancel("gone")
        loop.run()
        assert loop.tokens("stays") == model.expected(stays)
        model.runner.forget_prefixes()
        features = model.runner.statistics().features
        assert (features.held, features.needed_bytes) == (0, 0)
        assert not model.runner._images._begun


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_an_image_that_does_not_fit_fails_its_embedding_alone(pooling: Pooling, model: VisionModel) -> None:
    """By its own words, and without a step that is computed again."""
    bad, good = model.ask("bad", CAT, text=1, tokens=0, pooling=pooling), model.ask("good", DOG, text=2)
    prompt = list(bad.submit.prompt)
    prompt[bad.submit.images[0].start] = 7
    loop = Looped(model.runner)
    loop.run(msgspec.structs.replace(bad.submit, prompt=tuple(prompt)), good.submit)
    assert "tokens stand for an image of 6 features" in error_of(loop, "bad")
    assert loop.tokens("good") == model.expected(good)
    assert loop.scheduler._counters.recovered_steps == 0


def test_features_that_there_was_no_memory_for_are_computed_again(
    model: VisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, evaluate, left = model.ask("a", CAT, text=1), mx.async_eval, 5

    def fails(*arrays: Any) -> None:
        nonlocal left
        if arrays[0]:
            left -= 1
        if not left:
            left -= 1
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        evaluate(*arrays)

    monkeypatch.setattr(step_images, "mx", SimpleNamespace(async_eval=fails))
    loop = Looped(model.runner)
    loop.submit(asked.submit)
    while not loop.scheduler._counters.recovered_steps:
        loop.step()
    assert not model.runner.has_features(asked.submit.images[0].hash)
    loop.run()
    assert loop.tokens("a") == model.expected(asked)


def test_sequences_that_decode_use_graphs_beside_an_image(model: VisionModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a tower are launched one by one: they come in all sizes."""
    switch, encoded, passes = NotedSwitch(), list[bool](), list[bool]()
    runner = model.runner
    monkeypatch.setattr(runner, "_model", replace(runner._model, graphs=switch))  # type: ignore[arg-type]
    encode, compute = runner._images.encode, runner._backend.compute

    def encoding(*args: Any) -> Any:
        encoded.append(switch.off)
        return encode(*args)

    def computing(*args: Any, **named: Any) -> Any:
        passes.append(switch.off)
        return compute(*args, **named)

    monkeypatch.setattr(runner._images, "encode", encoding)
    monkeypatch.setattr(runner._backend, "compute", computing)
    text, asked = model.ask("text", head=8).submit, model.ask("a", CAT, text=3)
    prompt = PrefillChunk("text", 0, len(text.prompt) - 1)
    runner.execute(StepPlan(step=1, admit=(Admit(text),), prefill=(prompt,), decode=(DecodeRow("text", 0),)))
    plan = StepPlan(
        step=2, admit=(Admit(asked.submit),), encode=(Encode("a", 0, 0, 5),), decode=(DecodeRow("text", 1),)
    )
    assert [row.id for row in runner.execute(plan).rows] == ["text"]
    assert (encoded, passes) == ([True], [True, False])
    for id_ in ("a", "text"):
        runner.release(id_)


def test_layers_without_those_before_them_send_their_row_back(model: VisionModel) -> None:
    asked = model.ask("a", CAT, text=1)
    result = model.runner.execute(
        StepPlan(step=1, admit=(Admit(asked.submit),), encode=(Encode("a", 0, start=2, count=1),))
    )
    assert result.evicted == ("a",)
    assert model.runner.execute(StepPlan(step=2, admit=(Admit(asked.submit),), encode=(Encode("a", 0, 0, 5),)))
    model.runner._images.drop([asked.submit.images[0].hash])
    result = model.runner.execute(StepPlan(step=3, prefill=(PrefillChunk("a", 0, 12),)))
    assert result.evicted == ("a",)
    assert result.failures == ()
    model.runner.release("a")


def test_a_model_without_a_tower_takes_no_images(model: VisionModel) -> None:
    encoder = model.runner._images
    asked = model.ask("a", CAT)
    runner = type(encoder)(None)
    with pytest.raises(ValueError, match="this model takes no images"):
        runner.admit(asked.submit, 0)
    with pytest.raises(ValueError, match="for a reason"):
        type(encoder)(encoder._vision, "for a reason").admit(asked.submit, 0)
    assert runner.admit(msgspec.structs.replace(asked.submit, images=()), 0) is None


def test_what_is_drafted_ends_in_front_of_images(model: VisionModel) -> None:
    """Keys of images are in the prefix index, and are no tokens."""
    asked = model.ask("a", CAT, text=1, head=40)
    Looped(model.runner).run(asked.submit)
    begun = asked.submit.prompt[:32]
    found = model.runner.continuation("", begun, 64)
    assert list(found) == list(asked.submit.prompt[32 : 32 + len(found)])
    assert isinstance(asked.submit.images[0], Image)
