"""The most tokens of an image where one step has to compute all of them: what can't be read is said at the start."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.bytes_text import BytesTexts
from tests.support.images import inline_service, vision_text
from treadle.compose.images import warn_of_long_images
from treadle.core.capabilities import Capabilities, StepCapabilities
from treadle.core.image import VisionCapabilities
from treadle.fronts.served_models import ServedModel
from treadle.text.images.gemma import Gemma3Images, Gemma4Images

TEXT = vision_text()
NAMES: Any = {name: getattr(TEXT.images, name) for name in ("token", "token_id", "placeholder", "placeholder_id")}
FIXED, UP_TO = Gemma3Images(**NAMES, tokens=256), Gemma4Images(**NAMES, tokens=280)


def served(settings: Any, *, asked: int, can: int = 0, whole: bool = True, loaded: bool = True) -> ServedModel:
    """A model with these settings of images, whose runner computes up to `can` tokens in a step."""
    capabilities = Capabilities(
        model="m",
        architecture="a",
        vocabulary=300,
        context=4096,
        device="cpu",
        dtype="float32",
        steps=StepCapabilities(prefill_tokens=can),
        modalities=("text", "image"),
        vision=VisionCapabilities(layers=2, whole=whole),
    )
    engine: Any = SimpleNamespace(capabilities=capabilities if loaded else None)
    texts = BytesTexts(replace(TEXT, images=settings))
    return ServedModel(("m",), engine, texts, images=inline_service(), prefill_tokens=asked)


@pytest.mark.parametrize(
    ("model", "most", "reason"),
    [
        (served(FIXED, asked=256), 256, ""),
        (served(FIXED, asked=255), 255, "at least 256 tokens and a step of this server computes 255 (raise --prefill-"),
        (served(FIXED, asked=2048, can=128), 128, "a step of this server computes 128 (its memory is short)"),
        (served(FIXED, asked=0, can=0), 0, ""),
        (served(FIXED, asked=64, whole=False), 0, ""),
        (served(FIXED, asked=64, loaded=False), 0, ""),
        (served(UP_TO, asked=64), 64, ""),
    ],
)
def test_images_are_not_read_where_none_would_fit_a_step(model: ServedModel, most: int, reason: str) -> None:
    assert model.most_image_tokens == most
    found = model.limits().no_images
    assert reason in found
    assert bool(found) == bool(reason)
    assert ("image" in model.modalities) is (not reason and model.engine.capabilities is not None)
    images = model.images_for("t", "s")
    assert images is not None
    assert images.most == most


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (served(FIXED, asked=256), ""),
        (served(FIXED, asked=255), "m takes no images: an image has at least 256 tokens"),
        (served(UP_TO, asked=280), ""),
        (served(UP_TO, asked=64), "an image may have 64 tokens, as a step computes no more, and usual ones have 280"),
        (served(None, asked=64), ""),
    ],
)
def test_a_server_that_reads_no_usual_images_logs_it(
    model: ServedModel, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_long_images(model)
    assert words in caplog.text
    assert bool(caplog.text) == bool(words)
