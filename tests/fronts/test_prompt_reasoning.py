"""Reasoning at the end of a prompt: open, over, or ahead."""

from __future__ import annotations

import pytest

from tests.support.bytes_text import bytes_text
from treadle.fronts.prompt_reasoning import PromptReasoning, reasoning_after
from treadle.text.formats.reasoning import MARKERS

AHEAD, OPEN, OVER = PromptReasoning
TURN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (f"{TURN}<think>\n", OPEN),
        (f"{TURN}<think>\nFirst, the", OPEN),
        (f"{TURN}<think>a</think>b<think>c", OPEN),
        (f"{TURN}<think>\n\n</think>\n\n", OVER),
        (f"{TURN}<think>a</think>The answer", OVER),
        (f"{TURN}</think>", OVER),
        (TURN, AHEAD),
        (f"<|im_start|>user\nWhat is <think>?<|im_end|>\n{TURN}", AHEAD),
        (f"{TURN}<think>a<|im_end|>{TURN}", AHEAD),
        ("<bos>Explain <think> to me", AHEAD),
        ("Explain <think> to me", AHEAD),
        ("Q: 2+2? A: <think>\n", OPEN),
        ("Q: 2+2? A: <think>4</think> ", OVER),
        ("", AHEAD),
    ],
)
def test_the_last_marker_of_the_last_turn_counts(prompt: str, expected: PromptReasoning) -> None:
    model = bytes_text(added=("<think>", "</think>"))
    ids = model.encode(prompt.removeprefix("<bos>"), add_special_tokens=prompt.startswith("<bos>"))
    assert reasoning_after(model, MARKERS["think"], ids) is expected


def test_markers_that_are_special_tokens_begin_no_turn() -> None:
    model = bytes_text(special=("[THINK]", "[/THINK]"))
    for prompt, expected in ((f"{TURN}[THINK]a", OPEN), (f"{TURN}[THINK]a[/THINK]b", OVER), (TURN, AHEAD)):
        assert reasoning_after(model, MARKERS["mistral"], model.encode(prompt)) is expected
