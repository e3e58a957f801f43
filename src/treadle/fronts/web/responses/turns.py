"""Conversation of a request: its items as the turns that a chat template renders.

Consecutive items of the assistant are one turn, as the model wrote them: its reasoning, its text, and its calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....text.images.prompt import image_part
from ...media.parts import read_url_part
from .items import IMAGE_TYPE, LOCAL_CALLS, Item
from .opaque import REASONING, SUMMARY, unwrap
from .tool_names import prompt_name

Turn = dict[str, Any]

SUMMARY_TURN = "Summary of the conversation so far:\n\n"


def turns_of(items: Sequence[Item], carried: int = 0) -> list[Turn]:
    """Return the turns of checked items, without those that the prompt leaves out. The first `carried` items are of
    earlier responses: refusals of images name the others by their places in `input`."""
    turns = _Turns()
    for i, item in enumerate(items):
        turns.at = f"input[{i - carried}]" if i >= carried else "previous_response_id"
        if (add := _ADD.get(item["type"])) is not None:
            add(turns, item)
    return turns.found


class _Turns:
    """Turns under construction."""

    def __init__(self) -> None:
        self.found: list[Turn] = []
        self.at = ""

    def message(self, item: Item) -> None:
        role, content = item["role"], _contents(item["content"], f"{self.at}.content")
        if role == "assistant":
            turn = self._assistant(lambda turn: not turn["content"] and "tool_calls" not in turn)
            turn["content"] = content
        else:
            self.found.append({"role": "system" if role == "developer" else role, "content": content})

    def reasoning(self, item: Item) -> None:
        if not (text := _reasoning_text(item)):
            return
        turn = self._assistant(lambda turn: not turn["content"] and "tool_calls" not in turn)
        before = turn.get("reasoning_content")
        turn["reasoning_content"] = text if before is None else f"{before}\n\n{text}"

    def call(self, item: Item) -> None:
        self._add_call(item, prompt_name(item["name"], item.get("namespace")), item["arguments"])

    def custom_call(self, item: Item) -> None:
        arguments = json.dumps({"input": item["input"]}, ensure_ascii=False)
        self._add_call(item, prompt_name(item["name"], item.get("namespace")), arguments)

    def local_call(self, item: Item) -> None:
        kind = item["type"]
        self._add_call(item, kind.removesuffix("_call"), json.dumps(item[LOCAL_CALLS[kind]], ensure_ascii=False))

    def result(self, item: Item) -> None:
        output = item["output"]
        self._add_result(item, output if isinstance(output, str) else _contents(output, f"{self.at}.output"))

    def local_result(self, item: Item) -> None:
        output = item.get("output")
        self._add_result(item, output if isinstance(output, str) else json.dumps(output, ensure_ascii=False))

    def compaction(self, item: Item) -> None:
        """Put a summary in the place of the turns before it; instructions stay."""
        summary = unwrap(SUMMARY, item["encrypted_content"]) or ""
        self.found = [turn for turn in self.found if turn["role"] == "system"]
        self.found.append({"role": "user", "content": SUMMARY_TURN + summary})

    def _add_result(self, item: Item, content: str | list[dict[str, Any]]) -> None:
        self.found.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})

    def _add_call(self, item: Item, name: str, arguments: str) -> None:
        call = {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant(lambda turn: True).setdefault("tool_calls", []).append(call)

    def _assistant(self, fits: Callable[[Turn], bool]) -> Turn:
        """Return the assistant's last turn, if it is the last of all and `fits`; else a new one."""
        last = self.found[-1] if self.found else {"role": ""}
        if last["role"] != "assistant" or not fits(last):
            self.found.append({"role": "assistant", "content": ""})
        return self.found[-1]


def _contents(parts: Sequence[Mapping[str, Any]], at: str) -> str | list[dict[str, Any]]:
    """Return the text of one part, or parts of text and images."""
    if len(parts) < 2 and not any(part["type"] == IMAGE_TYPE for part in parts):
        return "".join(_text(part) for part in parts)
    return [
        image_part(read_url_part(part, f"{at}[{i}]"))
        if part["type"] == IMAGE_TYPE
        else {"type": "text", "text": _text(part)}
        for i, part in enumerate(parts)
    ]


def _text(part: Mapping[str, Any]) -> str:
    text: str = part["refusal"] if part["type"] == "refusal" else part["text"]
    return text


def _reasoning_text(item: Item) -> str:
    """Return the reasoning itself; its summary where there is nothing else."""
    if content := item.get("content"):
        return "\n\n".join(part["text"] for part in content)
    if (text := unwrap(REASONING, item.get("encrypted_content", ""))) is not None:
        return text
    return "\n\n".join(part["text"] for part in item["summary"])


_ADD: Mapping[str, Callable[[_Turns, Item], None]] = {
    "message": _Turns.message,
    "reasoning": _Turns.reasoning,
    "function_call": _Turns.call,
    "custom_tool_call": _Turns.custom_call,
    "function_call_output": _Turns.result,
    "custom_tool_call_output": _Turns.result,
    "compaction": _Turns.compaction,
    **dict.fromkeys(LOCAL_CALLS, _Turns.local_call),
    **{f"{kind}_output": _Turns.local_result for kind in LOCAL_CALLS},
}
