"""Prompts that end inside of the last message, with templates of the shapes that models come with."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.errors import InvalidRequest
from treadle.text import ChatTemplate

from . import builders

USER = {"role": "user", "content": "Hi"}


def continued(source: str, last: dict[str, Any], **extra: Any) -> str:
    made = ChatTemplate(source, name="test", special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    return made.render([USER, last], continue_final_message=True, extra=extra)


def said(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


SHAPES = {
    "chatml": (builders.CHATML, "<|im_start|>assistant\n"),
    "llama 3": (builders.LLAMA3, "<|head|>assistant<|/head|>\n\n"),
    "gemma": (builders.GEMMA, "<turn>model\n"),
    "mistral": (builders.MISTRAL, "<s>[INST] Hi [/INST]"),
    "qwen 3": (builders.QWEN3, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    "parts only": (builders.PARTS_ONLY, "[user]Hi[assistant]"),
}


@pytest.mark.parametrize(("source", "opening"), SHAPES.values(), ids=SHAPES)
def test_the_prompt_ends_with_the_last_text(source: str, opening: str) -> None:
    prompt = continued(source, said("Once upon"))
    assert prompt.endswith(opening + "Once upon")
    assert prompt.count("Once upon") == 1


@pytest.mark.parametrize(("source", "opening"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("content", ["", []])
def test_an_empty_text_leaves_the_turn_open(source: str, opening: str, content: Any) -> None:
    assert continued(source, said(content)).endswith(opening)


@pytest.mark.parametrize("source", [builders.CHATML, builders.MISTRAL, builders.QWEN3, builders.PARTS_ONLY])
def test_spaces_at_the_end_stay_where_the_template_keeps_them(source: str) -> None:
    assert continued(source, said("Once \n")).endswith("Once \n")


@pytest.mark.parametrize("source", [builders.LLAMA3, builders.GEMMA])
def test_spaces_at_the_end_go_where_the_template_trims(source: str) -> None:
    assert continued(source, said("Once \n")).endswith("\nOnce")


@pytest.mark.parametrize("source", [builders.LLAMA3, builders.GEMMA])
def test_a_text_of_spaces_alone_keeps_the_openings_own_line_end(source: str) -> None:
    assert continued(source, said("  ")).endswith("\n")


@pytest.mark.parametrize("source", [builders.CHATML, builders.GEMMA, builders.PARTS_ONLY])
def test_parts_are_continued_after_the_last(source: str) -> None:
    parts = [{"type": "text", "text": "Once "}, {"type": "text", "text": "upon"}]
    assert continued(source, said(parts)).endswith("upon")


def test_a_thought_is_part_of_the_prompt() -> None:
    opening = "<think>\nhm\n</think>\n\n"
    assert continued(builders.QWEN3, said("Once") | {"reasoning_content": "hm"}).endswith(opening + "Once")
    assert continued(builders.QWEN3, said("<think>\nhm\n</think>\n\nOnce")).endswith(opening + "Once")


def test_a_users_last_message_is_continued_too() -> None:
    made = ChatTemplate(builders.CHATML, name="test")
    assert made.render([USER], continue_final_message=True) == "<|im_start|>user\nHi"


def test_templates_may_look_for_the_mark_themselves() -> None:
    """As LFM2's does, which has more to write before the turn's end."""
    assert continued(builders.MOVES_THE_MARK, said("Once")) == "[user]Hi(end of text)[/][assistant]Once(end of text)"


def test_a_text_that_holds_the_mark_is_text() -> None:
    prompt = continued(builders.CHATML, said("a CONTINUE_FINAL_MESSAGE_TAG b"))
    assert prompt.endswith("assistant\na CONTINUE_FINAL_MESSAGE_TAG b")


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ messages[-1].content | lower }}"])
def test_a_template_that_does_not_write_the_last_text_is_a_clear_error(source: str) -> None:
    with pytest.raises(InvalidRequest, match="does not write the last message's text") as caught:
        continued(source, said("Once"))
    assert caught.value.param == "continue_final_message"
