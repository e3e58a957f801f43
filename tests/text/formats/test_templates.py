"""Detection of the format from a chat template. The templates have the structure and the markers of models' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from treadle.text.events import CallArguments, CallEnd, CallStart
from treadle.text.formats.reader import ReaderSetup
from treadle.text.formats.reasoning import MARKERS, pick_reasoning
from treadle.text.formats.registry import FORMATS, pick
from treadle.text.formats.typed_values import parameter_types
from treadle.text.past_calls import PastCallWriter
from treadle.text.templates import ChatTemplate
from treadle.text.turn_forms import forms

from .vectors.family import TOOLS
from .vectors.vector import read

FOLDER = Path(__file__).parent / "templates"
ROOT = Path(__file__).parents[3]
EXPECTED: dict[str, tuple[str | None, str | None]] = {
    "command_r": ("command_r", "command_r"),
    "deepseek_v3": ("deepseek_v3", "think"),
    "deepseek_v31": ("deepseek_v31", "think"),
    "deepseek_v32": ("deepseek_v32", "think"),
    "functiongemma": ("functiongemma", None),
    "gemma3": ("gemma3", None),
    "gemma3_json": ("gemma3", None),
    "gemma3_pythonic": ("gemma3_pythonic", None),
    "gemma3_tool_code": ("gemma3_tool_code", None),
    "gemma4": ("gemma4", "gemma4"),
    "glm_45": ("glm", "think"),
    "glm_47": ("glm47", "think"),
    "granite": ("granite", "think"),
    "granite4": ("hermes", None),
    "harmony": ("harmony", None),
    "hermes": ("hermes", None),
    "hunyuan_a13b": ("hunyuan_a13b", "think"),
    "kimi_k2": ("kimi_k2", None),
    "lfm2": ("lfm2", None),
    "lfm25": ("lfm2", None),
    "llama3": ("llama3_json", None),
    "llama_pythonic": ("llama_pythonic", None),
    "minimax": ("minimax", "think"),
    "mistral_v3": ("mistral_array", None),
    "mistral_v11": ("mistral", None),
    "mistral_v13": ("mistral", "mistral"),
    "nemotron": ("nemotron", "think"),
    "olmo3": ("olmo3", None),
    "phi4_mini": ("phi4_mini", None),
    "phi4_mini_calls": ("phi4_mini", None),
    "phi4_mini_functools": ("phi4_mini_functools", None),
    "plain": (None, None),
    "qwen3": ("hermes", "think"),
    "qwen3_coder": ("qwen3_coder", None),
    "seed_oss": ("seed_oss", "seed"),
}
WRITES_CALLS = (
    *("deepseek_v3", "deepseek_v31", "functiongemma", "gemma3_pythonic", "gemma4", "glm_45", "glm_47", "granite4"),
    *("harmony", "hermes", "kimi_k2", "lfm25", "llama3", "llama_pythonic", "minimax"),
    *("command_r", "hunyuan_a13b", "mistral_v3", "mistral_v11", "mistral_v13", "nemotron", "olmo3", "phi4_mini_calls"),
    *("qwen3", "seed_oss"),
)
"""Templates that write the calls of past turns."""
BARE = ("[search(", "<|start|>assistant to=functions.search", '{"name": "search"')
ARGUMENTS = {"query": 'é東🙂 "}', "limit": 3, "exact": True}


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def test_every_template_is_tested() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(EXPECTED)


def test_the_documentation_lists_every_format() -> None:
    text = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
    rows = text.partition("### Formats")[2].partition("\n## ")[0].splitlines()
    assert {row.split("`")[1] for row in rows if row.startswith("| `")} == set(FORMATS)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_template_is_of_its_format(name: str) -> None:
    assert (pick(source(name)), pick_reasoning(source(name))) == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_no_other_family_takes_a_template(name: str) -> None:
    family = (EXPECTED[name][0] or "").partition("_")[0]
    found = {tool_format.name for tool_format in FORMATS.values() if tool_format.detect(source(name))}
    others = {other.partition("_")[0] for other in found} - {family}
    assert others <= ({"llama3"} if name == "gemma3_json" else set())  # both prompt for JSON in the same words


@pytest.mark.parametrize("name", WRITES_CALLS)
def test_the_call_that_a_template_writes_is_read(name: str) -> None:
    text = answer(name, "search", ARGUMENTS)
    tool_format = EXPECTED[name][0]
    reasoning = EXPECTED[name][1]
    setup = ReaderSetup(
        tool_format,
        MARKERS[reasoning] if reasoning else None,
        tools=tuple(tool.name for tool in TOOLS),
        types=parameter_types(TOOLS),
    )
    started, arguments, ended = read(setup, [[(text, False)]])
    assert isinstance(started, CallStart)
    assert isinstance(arguments, CallArguments)
    assert (started.name, ended) == ("search", CallEnd(0))
    assert json.loads(arguments.delta) == ARGUMENTS


def test_the_calls_of_a_turn_and_its_reasoning_are_written_as_gpt_oss_takes_them() -> None:
    template = ChatTemplate(source("harmony"), name="harmony")
    calls = [
        {"id": one, "type": "function", "function": {"name": f"f{one}", "arguments": f'{{"a": {one}}}'}} for one in "12"
    ]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "r1"},
        {"role": "tool", "tool_call_id": "2", "content": "r2"},
    ]
    text = template.render(next(forms(turns, None, template.traits, PastCallWriter().write)))
    thought = "<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>"
    called = (
        '<|start|>assistant to=functions.f{0}<|channel|>commentary json<|message|>{{"a": {0}}}<|call|>'
        '<|start|>functions.f{0} to=assistant<|channel|>commentary<|message|>"r{0}"<|end|>'
    )
    assert text.endswith(f"<|start|>assistant{thought}{called.format(1)}{called.format(2)}<|start|>assistant")


def answer(name: str, tool: str, arguments: dict[str, Any]) -> str:
    """Return the text that a template writes for an answer that is one call, from the first marker on."""
    tool_format = FORMATS[EXPECTED[name][0] or ""]
    as_text = name.startswith(("deepseek", "kimi"))
    function = {"name": tool, "arguments": json.dumps(arguments) if as_text else arguments}
    calls = [
        {"id": "functions.search:0" if name == "kimi_k2" else "abcDEF123", "type": "function", "function": function}
    ]
    template = ChatTemplate(source(name), name=name, special_tokens={"bos_token": "", "eos_token": ""})
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    text = template.render(messages, add_generation_prompt=False)
    starts = BARE if tool_format.own_reasoning else (*tool_format.starts, *BARE)
    begin = min(text.find(start) for start in starts if start in text)
    ends = (
        "<turn|>",
        "<|eot_id|>",
        "<end_of_turn>",
        "<｜end▁of▁sentence｜>",
        "<|im_end|>",
        "<|end_of_text|>",
        "[e~[",
        "<|end|>",
        "<seed:eos>",
        "<|END_OF_TURN_TOKEN|>",
    )
    text = text[begin:].rstrip()
    for end in ends:
        text = text.removesuffix(end)
    return text
