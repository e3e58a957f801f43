"""Estimates of prompts with images, before these are read: small images are no reason to refuse, nor to wait."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.images import MARKS, data_url, inline_service, vision_text
from treadle.errors import ContextLengthExceeded
from treadle.fronts.chat_messages import read_turns
from treadle.fronts.generation.embedding_inputs import ListedInputs
from treadle.fronts.generation.prompts import MessagesPrompt
from treadle.fronts.media.parts import size_with_images
from treadle.fronts.media.prompt import MediaPrompt
from treadle.fronts.validate import HOPELESS, Limits
from treadle.text.images.prompt import images_of

CONTEXT = 256
LIMITS = Limits(vocabulary=300, context=CONTEXT)
TEXT = vision_text(CONTEXT)
SETTINGS: Any = TEXT.images
LEAST = SETTINGS.least_tokens


def messages(images: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url()}}] * images}]


def of_media(images: int) -> MediaPrompt:
    sources = list(images_of(read_turns(messages(images), "messages")))
    service: Any = inline_service().of_request(SETTINGS, "t", "s")
    return MediaPrompt([TEXT.named_ids[MARKS[1]]] * images, sources, service)


@pytest.mark.parametrize(
    ("prompts_of", "of_text"),
    [
        (lambda images: MessagesPrompt(messages(images)), 1),
        (lambda images: ListedInputs(read_turns(messages(images), "input")), 1),
        (of_media, 0),
    ],
)
def test_images_count_as_the_smallest_up_to_the_context(prompts_of: Any, of_text: int) -> None:
    """Less a token, so that an answer beside them is no more than the context either. An image that is larger takes its
    tokens when these are known: an estimate that claims more keeps others out for nothing."""
    for images in (1, 70):
        assert 0 <= prompts_of(images).size(TEXT, LIMITS) - images * LEAST - of_text <= 2
    assert prompts_of(CONTEXT // LEAST).size(TEXT, LIMITS) == CONTEXT - 1


def test_several_inputs_count_up_to_a_context_each() -> None:
    many = ListedInputs(read_turns(messages(CONTEXT) * 2, "input"))
    assert many.size(TEXT, LIMITS) == 2 * (CONTEXT - 1)


def test_a_text_that_is_too_long_beyond_doubt_is_refused_with_its_images() -> None:
    size = HOPELESS * CONTEXT
    assert size_with_images(size, 0, SETTINGS, LIMITS, "messages") == size
    with pytest.raises(
        ContextLengthExceeded, match=f"length is 256 tokens. However, your messages resulted in about {size + 1} "
    ):
        size_with_images(size, 1, SETTINGS, LIMITS, "messages")
    assert size_with_images(size, 1, SETTINGS, LIMITS, "input", 2) == 2 * (CONTEXT - 1)
