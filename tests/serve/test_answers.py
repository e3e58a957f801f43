"""Scripted answers, as protocol tests use them: through the real server in its own processes."""

from __future__ import annotations

from pathlib import Path

from tests.serve.conftest import Start
from tests.support.answering import answered, write_answers
from tests.support.tiny import make_tiny


def test_a_real_server_gives_scripted_answers_with_special_tokens(start: Start, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", added=("<think>", "</think>"), special=("[TOOL_CALLS]",))
    answers = tmp_path / "answers.json"
    environment = write_answers(
        answers, "<think>hm</think>Grüße", by_prompt={"weather": "[TOOL_CALLS]sunny"}, steps=(3, 1)
    )
    server = start(folder, module="tests.support.answering", env=environment).ready()
    said = server.complete("hello", max_tokens=40).json()["choices"][0]
    assert said["text"] == "<think>hm</think>Grüße"
    assert said["finish_reason"] == "stop"
    hidden = server.complete("the weather", max_tokens=40).json()["choices"][0]
    assert hidden["text"] == "sunny"
    shown = server.complete("the weather", max_tokens=40, skip_special_tokens=False).json()["choices"][0]
    assert shown["text"].startswith("[TOOL_CALLS]sunny")
    assert [len(request.prompt) for request in answered(answers)] == [5, 11, 11]
