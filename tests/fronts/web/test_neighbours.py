"""Messages of one role in a row: one rule in all dialects, and prompts that begin alike from turn to turn."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.fronts.web.server import Front, front
from tests.support.aio import in_loop
from tests.support.answers import Answers
from tests.support.bytes_text import bytes_text

ALTERNATING = (
    "{% set ns = namespace(last='') %}{% for m in messages %}"
    "{% if m.role == ns.last %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set ns.last = m.role %}{{ m.role ~ ':' ~ m.content ~ ';' }}{% endfor %}"
)
ANY = "{% for m in messages %}{{ m.role ~ ':' ~ m.content ~ ';' }}{% endfor %}"
DIALECTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", "messages", {}),
    "responses": ("/v1/responses", "input", {}),
    "messages": ("/v1/messages", "messages", {"max_tokens": 9}),
    "ollama": ("/api/chat", "messages", {"stream": False}),
}
TURNS = [
    ("user", "a"),
    ("user", "b"),
    ("assistant", "c"),
    ("user", "d"),
    ("assistant", "e"),
    ("assistant", "f"),
    ("user", "g"),
    ("user", "h"),
]


async def prompts(f: Front, dialect: str, ends: list[int]) -> list[str]:
    """Return the prompts of the conversation's beginnings of these lengths."""
    path, name, more = DIALECTS[dialect]
    for end in ends:
        messages = [{"role": role, "content": content} for role, content in TURNS[:end]]
        client = await f.post(path, {"model": "m", name: messages, **more})
        assert client.status == 200, client.body
    return [f.texts.model().decode(request.prompt) for request in f.runner.seen]


@pytest.mark.parametrize("dialect", DIALECTS)
@in_loop
async def test_neighbours_are_joined_where_the_template_refuses_them(dialect: str) -> None:
    model = bytes_text(context=10_000, chat_template=ALTERNATING)
    async with front(Answers(model, "Hello."), text=model) as f:
        found = await prompts(f, dialect, [1, 2, 4, 7, 8])
    joined = {"messages": ("a\nb", "ef", "g\nh")}.get(dialect, ("a\n\nb", "e\n\nf", "g\n\nh"))
    a, e, g = joined  # Anthropic's API defines such messages as one turn
    assert found[-1] == f"user:{a};assistant:c;user:d;assistant:{e};user:{g};"
    for shorter, longer in itertools.pairwise(found):
        assert longer.startswith(shorter.removesuffix(";"))


@pytest.mark.parametrize("dialect", ["chat", "responses", "ollama"])
@in_loop
async def test_neighbours_stay_as_they_were_sent_where_the_template_takes_them(dialect: str) -> None:
    model = bytes_text(context=10_000, chat_template=ANY)
    async with front(Answers(model, "Hello."), text=model) as f:
        found = await prompts(f, dialect, [2, 8])
    assert found[-1] == "".join(f"{role}:{content};" for role, content in TURNS)
    assert found[-1].startswith(found[0])
