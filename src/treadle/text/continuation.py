"""Prompts that end within the last message, for the model to continue it (`continue_final_message`).

The method is that of transformers' `apply_chat_template`: append a marker to the last message's text, render the
template, and cut the prompt at the marker. It works with any template that writes the text unchanged, regardless of
its end-of-turn tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequest

MARKER = "CONTINUE_FINAL_MESSAGE_TAG "
"""transformers' own marker, as some templates look for it. The trailing space shows whether a template trims."""


def with_marker(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with the marker after its text, or after its last part."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + MARKER}
    *before, last = content if content and "text" in content[-1] else [*content, {"type": "text", "text": ""}]
    return {**message, "content": [*before, {**last, "text": last["text"] + MARKER}]}


def cut_at_marker(rendered: str, message: Mapping[str, Any]) -> str:
    """Return the prompt up to the marker of `message`. If the template trimmed the marker, trim the prompt's end too.

    Raises InvalidRequest when the template did not write the marker.
    """
    end = rendered.rfind(MARKER.strip())
    if end < 0:
        raise InvalidRequest(
            "continue_final_message can't be used here: the model's chat template does not write the last message's "
            "text as it was given; leave it out",
            param="continue_final_message",
        )
    prompt = rendered[:end]
    trims = not rendered.startswith(MARKER, end) and bool(_text(message).strip())
    return prompt.rstrip() if trims else prompt


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
