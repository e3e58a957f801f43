from __future__ import annotations

import contextlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from treadle.errors import ConfigError, InvalidRequest, ModelError
from treadle.text import ChatTemplate, TextModel

from . import builders

USER = [{"role": "user", "content": "Hi <b> & 'you'"}]
TURNS = [*USER, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "Yes"}]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, name="test", special_tokens=NAMED, **options)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


# What templates of the wild print


def test_chatml() -> None:
    expected = "<|im_start|>user\nHi <b> & 'you'<|im_end|>\n<|im_start|>assistant\n"
    assert template(builders.CHATML).render(USER) == expected


def test_no_generation_prompt() -> None:
    rendered = template(builders.CHATML).render(TURNS, add_generation_prompt=False)
    assert rendered.endswith("<|im_start|>user\nYes<|im_end|>\n")


def test_llama3_with_date_system_and_tools() -> None:
    made = template(builders.LLAMA3, now=lambda: datetime(2024, 7, 26))
    messages = [{"role": "system", "content": " Be brief. "}, *USER]
    rendered = made.render(messages, tools=[{"name": "f<x>", "über": 1}])
    assert rendered == (
        "<s><|head|>system<|/head|>\n\nToday: 26 Jul 2024\nBe brief.<|eot|>"
        '{\n    "name": "f<x>",\n    "über": 1\n}'
        "<|head|>user<|/head|>\n\nHi <b> & 'you'<|eot|><|head|>assistant<|/head|>\n\n"
    )


def test_gemma() -> None:
    expected = "<s><turn>user\nHi <b> & 'you'</turn>\n<turn>model\nHo</turn>\n<turn>user\nYes</turn>\n<turn>model\n"
    assert template(builders.GEMMA).render(TURNS) == expected


def test_mistral_with_loop_controls_and_the_generation_tag() -> None:
    rendered = template(builders.MISTRAL).render([{"role": "system", "content": "x"}, *TURNS])
    assert rendered == "<s>[INST] Hi <b> & 'you' [/INST]Ho</s>[INST] Yes [/INST]"


def test_the_generation_tag_makes_no_scope() -> None:
    made = template("{% set ns = namespace(n=0) %}{% generation %}{% set ns.n = 2 %}{% endgeneration %}{{ ns.n }}")
    assert made.render(USER) == "2"


def test_extra_variables_reach_the_template() -> None:
    made = template("{% if enable_thinking %}<think>{% endif %}{{ messages[0].content }}")
    assert made.render([{"role": "user", "content": "x"}], extra={"enable_thinking": True}) == "<think>x"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_extra_variables_can_not_replace_the_servers_own(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        template(builders.CHATML).render(USER, extra={name: []})


# Contents


def test_parts_are_joined_for_templates_that_take_text() -> None:
    made = template(builders.CHATML)
    assert made.render([{"role": "user", "content": parts("one ", "two")}]) == made.render(
        [{"role": "user", "content": "one two"}]
    )


def test_parts_reach_templates_that_take_them() -> None:
    rendered = template(builders.GEMMA).render([{"role": "user", "content": parts(" one ", " two ")}])
    assert "onetwo" in rendered


def test_text_becomes_a_part_for_templates_that_take_parts_alone() -> None:
    assert template(builders.PARTS_ONLY).render(USER) == "[user]Hi <b> & 'you'"


def test_no_content_is_empty_text() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": []}
    assert template(builders.CHATML).render([message]).startswith("<|im_start|>assistant\n<|im_end|>")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (5, r"messages\[0\]\.content"),
        ({"type": "text"}, r"messages\[0\]\.content"),
        (["x"], r"messages\[0\]\.content\[0\]"),
        ([{"text": "x"}], r"messages\[0\]\.content\[0\]"),
        ([{"type": "text", "text": 5}], r"messages\[0\]\.content\[0\]\.text"),
        ([*parts("x"), {"type": "image_url", "image_url": {}}], r"content\[1\].*image_url.*text only"),
    ],
)
@pytest.mark.parametrize("source", [builders.CHATML, builders.GEMMA, builders.PARTS_ONLY])
def test_contents_that_are_no_text_are_refused_by_place(content: Any, place: str, source: str) -> None:
    with pytest.raises(InvalidRequest, match=place):
        template(source).render([{"role": "user", "content": content}])


# Templates that refuse, fail or misbehave


def test_a_templates_own_refusal_is_the_answer() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template(builders.GEMMA).render([USER[0], USER[0]])
    assert caught.value.param == "messages"


def test_messages_the_template_can_not_take_are_a_clear_error() -> None:
    with pytest.raises(InvalidRequest, match=r"can't write these messages.*TypeError"):
        template("{{ messages[0].content + (1 if '<' in messages[0].content else '') }}").render(USER)


FAULTS = [
    ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    ("{{ raise_exception('no chats') }}", "no chats"),
    ("{% include 'other' %}", "TypeError: no loader"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{% for a in range(10 ** 9) %}{% endfor %}", "OverflowError: Range too big"),
    ("{{ messages.append(1) }}", "it does what is not allowed: access to attribute 'append'"),
    ("{% for a in range(99) %}xxxxxxxxxx{% endfor %}", "the chat template writes more than 500 characters"),
]


@pytest.mark.parametrize(("source", "cause"), FAULTS)
def test_a_template_that_writes_no_chat_says_so_and_blames_no_message(source: str, cause: str) -> None:
    made = template(source, max_chars=500)
    assert made.fault.startswith(f"can't write even one user's turn ({cause}")
    with pytest.raises(InvalidRequest) as caught:
        made.render(USER)
    assert caught.value.message.startswith(f"the model's chat template can't write even one user's turn ({cause}")
    assert caught.value.message.endswith("use /v1/completions, or start the server with --chat-template FILE")
    assert caught.value.param is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        "{% if messages[0].role != 'system' %}{{ raise_exception('system') }}{% endif %}{{ messages[1].content }}",
        "{% if not tools %}{{ raise_exception('tools') }}{% endif %}{{ messages[0].content }}",
        "{{ tools[0].function.name }}{{ messages[1].content if messages[0].role == 'system' else 1 / 0 }}",
        builders.PARTS_ONLY,
        builders.GEMMA,
    ],
)
def test_a_template_that_asks_for_a_system_turn_or_tools_writes_chats(source: str) -> None:
    assert template(source).fault == ""


def test_a_model_that_can_t_chat_says_why_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = builders.byte_level()
    sources = {"broken": {"chat_template": "{{ 1 / 0 }}"}, "none": {}, "whole": {"chat_template": builders.CHATML}}
    made = {
        name: TextModel.load(builders.write_folder(tmp_path / name, tokenizer, **files))
        for name, files in sources.items()
    }
    fault = "the chat template in chat_template.jinja can't write even one user's turn "
    fault += "(ZeroDivisionError: division by zero)"
    assert made["broken"].no_chats == fault
    assert made["none"].no_chats == "this model has no chat template"
    assert made["whole"].no_chats == ""
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (
        "WARNING",
        f"{fault}: chats are refused; give another with --chat-template",
    )


@pytest.mark.parametrize("source", ["{% for x in %}", "{{ unclosed", "{% nonsense %}"])
def test_a_broken_template_is_a_model_error_with_its_line(source: str) -> None:
    with pytest.raises(ModelError, match="line 2"):
        template("\n" + source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__closure__[0] }}",
    ],
)
def test_templates_can_not_leave_the_sandbox(source: str) -> None:
    with contextlib.suppress(ModelError, InvalidRequest):
        assert template(source).render(USER) == ""


def test_output_has_a_bound() -> None:
    made = template(
        "{% for a in range(1000 if '<' in messages[0].content else 1) %}{% for b in range(50) %}xxxxxxxxxx{% endfor %}"
        "{% endfor %}",
        max_chars=999,
    )
    with pytest.raises(InvalidRequest, match="999"):
        made.render(USER)


def test_rendering_has_a_time_bound_also_where_nothing_is_written() -> None:
    made = template(
        "{% if '<' in messages[0].content %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
        "{% endfor %}{% endif %}",
        max_s=0.05,
    )
    with pytest.raises(InvalidRequest, match="fewer messages"):
        made.render(USER)


def test_no_tools_and_no_documents_are_none() -> None:
    made = template("{{ tools is none }} {{ documents is none }}")
    assert made.render(USER, tools=[]) == "True True"
    assert made.render(USER, extra={"documents": ["x"]}) == "True False"


def test_a_deep_message_is_an_error_of_its_own_request() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest):
        template("{{ x | tojson }}").render(USER, extra={"x": deep})


# Where templates come from


def load(tmp_path: Path, override: str | None = None, **files: Any) -> str | None:
    folder = builders.write_folder(tmp_path, builders.byte_level(), **files)
    path = None
    if override is not None:
        path = tmp_path / "mine.jinja"
        path.write_text(override, encoding="utf-8")
    found = TextModel.load(folder, chat_template=path).chat_template
    return None if found is None else found.render(USER)


def test_order_of_sources(tmp_path: Path) -> None:
    config = {"chat_template": "config"}
    assert load(tmp_path / "a", "flag", chat_template="jinja", tokenizer_config=config) == "flag"
    assert load(tmp_path / "b", chat_template="jinja", tokenizer_config=config) == "jinja"
    assert load(tmp_path / "c", tokenizer_config=config) == "config"
    assert load(tmp_path / "d") is None


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}], "plain"),
        ([{"name": "only", "template": "one"}], "one"),
        ([{"name": "a", "template": "1"}, {"name": "b", "template": "2"}], None),
        ([], None),
        (None, None),
        ({"tool_use": "tools", "default": "plain"}, "plain"),
    ],
)
def test_of_named_templates_the_default_is_used(tmp_path: Path, named: Any, expected: str | None) -> None:
    assert load(tmp_path, tokenizer_config={"chat_template": named}) == expected


@pytest.mark.parametrize("value", [5, True, [1], ["x"], [{"name": "default", "template": 5}], {"default": 5}, [{}]])
def test_a_template_of_the_wrong_type_is_ignored_with_a_warning(
    tmp_path: Path, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"chat_template": value}
    assert load(tmp_path, "flag", tokenizer_config=config) == "flag"
    assert not caplog.records
    assert load(tmp_path, tokenizer_config=config) is None
    (tmp_path / "chat_template.json").write_text(json.dumps(config))
    assert load(tmp_path, tokenizer_config={}) is None
    files, told = ("tokenizer_config.json", "chat_template.json"), [r.getMessage() for r in caplog.records]
    assert [line.partition(" is ")[0] for line in told] == [f"chat_template in {name}" for name in files]
    assert all("neither a template nor a list of named ones: it is ignored" in line for line in told)


def test_a_processors_template_file_is_found(tmp_path: Path) -> None:
    folder = builders.write_folder(tmp_path, builders.byte_level())
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "older"}))
    model = TextModel.load(folder)
    assert model.render_chat(USER) == "older"


def test_a_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    folder = builders.write_folder(tmp_path, builders.byte_level())
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        TextModel.load(folder)


def test_a_template_file_that_can_not_be_read_names_the_setting(tmp_path: Path) -> None:
    folder = builders.write_folder(tmp_path, builders.byte_level())
    with pytest.raises(ConfigError, match="absent") as caught:
        TextModel.load(folder, chat_template=tmp_path / "absent.jinja")
    assert caught.value.param == "chat_template"
