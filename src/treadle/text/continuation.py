"""Prompts that end inside of the last message, for the model to continue it (`continue_final_message`).

The method is transformers': the last text gets a mark, the template writes the messages, and the prompt is cut at the
mark. So it works with any template that writes the text, wherever its end-of-turn tokens come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequest

MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""The name is transformers' own, as some templates look for it. The space shows whether a template trims."""


def marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the mark after its text; parts have it after the last one."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + MARK}
    *others, last = content or [{"type": "text", "text": ""}]
    return {**message, "content": [*others, {**last, "text": last["text"] + MARK}]}


def cut_at_mark(rendered: str, message: Mapping[str, Any]) -> str:
    """The prompt up to the mark of `message`. Where the template trimmed the mark, it trims the text before it too.

    Raises InvalidRequest when the template did not write the mark.
    """
    end = rendered.rfind(MARK.strip())
    if end < 0:
        raise InvalidRequest(
            "continue_final_message can't be used here: the model's chat template does not write the last message's "
            "text as it was given; leave it out",
            param="continue_final_message",
        )
    prompt = rendered[:end]
    trims = not rendered.startswith(MARK, end) and bool(_text(message).strip())
    return prompt.rstrip() if trims else prompt


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
