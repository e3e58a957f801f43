"""What clients send and mean no harm by: messages as they were received, other servers' names, limits that overlap."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from tests.fronts.web.server import Front, forever, front
from tests.support.aio import in_loop
from tests.support.bytes_text import bytes_text
from treadle.core.messages import Submit
from treadle.fronts.web.openai.chat import ParsedChat
from treadle.fronts.web.openai.completions import ParsedCompletion
from treadle.fronts.web.openai.schema import ChatRequest, CompletionRequest

HI = {"role": "user", "content": "hi"}
BARE = {"role": "assistant", "content": "ho"}


def rendered(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns that the template gets."""
    return [dict(turn) for turn in ParsedChat({"messages": [HI, message, HI]}).prompt.turns]


def asked(f: Front) -> Submit:
    return f.runner.seen[-1]


ECHOES: dict[str, dict[str, Any]] = {
    "openai": {"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None},
    "openai stream": {"function_call": None, "refusal": None, "tool_calls": None, "parsed": None},
    "litellm": {"tool_calls": None, "function_call": None, "provider_specific_fields": {"refusal": None}, "images": []},
    "openrouter": {"reasoning": None, "reasoning_details": [{"type": "reasoning.text", "text": "x"}], "refusal": None},
    "anthropic's": {"cache_control": {"type": "ephemeral"}, "id": "msg_1", "stop_reason": "end_turn"},
    "agents": {"finish_reason": "stop", "id": "x", "index": 0, "logprobs": None, "token_ids": [1], "usage": {}},
    "empty tools": {"tool_calls": [], "tool_call_id": ""},
    "misspelt": {"contnet": "x"},
}


@pytest.mark.parametrize("extra", ECHOES.values(), ids=ECHOES)
def test_keys_that_libraries_add_to_a_message_change_nothing(extra: dict[str, Any]) -> None:
    assert rendered(BARE | extra) == rendered(BARE)


def test_keys_that_libraries_add_to_a_part_change_nothing() -> None:
    part = {"type": "text", "text": "ho", "cache_control": {"type": "ephemeral"}, "annotations": [], "image_url": None}
    assert rendered({"role": "user", "content": [part]})[1]["content"] == [{"type": "text", "text": "ho"}]


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_the_responses_dialects_names_of_text_are_text(kind: str) -> None:
    turn = rendered({"role": "assistant", "content": [{"type": kind, "text": "ho"}]})[1]
    assert turn["content"] == [{"type": "text", "text": "ho"}]


def test_a_refusal_that_comes_back_is_what_the_assistant_said() -> None:
    turn = rendered({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]})[1]
    assert turn["content"] == [{"type": "text", "text": "No."}]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}, {"content": ""}])
def test_an_assistants_turn_without_content_is_empty(content: dict[str, Any]) -> None:
    assert rendered({"role": "assistant", **content})[1] == {"role": "assistant", "content": ""}


def test_reasoning_under_either_name_reaches_the_template() -> None:
    for name in ("reasoning", "reasoning_content"):
        assert rendered(BARE | {name: "hm"})[1] == BARE | {"reasoning_content": "hm"}


@in_loop
async def test_a_conversation_goes_on_with_the_message_as_it_was_received() -> None:
    async with front() as f:
        messages: list[dict[str, Any]] = [HI]
        for _ in range(3):
            choice = (await f.post("/v1/chat/completions", {"messages": messages})).json["choices"][0]
            messages += [
                choice["message"] | {"finish_reason": choice["finish_reason"], "provider_specific_fields": {}},
                HI,
            ]
        assert len(messages) == 7


# Fields ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_whole_numbers_may_be_written_as_fractions() -> None:
    async with front() as f:
        whole = {"n": 2.0, "max_tokens": 3.0, "top_k": 4.0, "seed": 5.0, "min_tokens": 1.0, "priority": 1.0}
        client = await f.complete(prompt=[104.0, 105.0], stop_token_ids=[7.0], logprobs=1.0, **whole)
        assert client.status == 200, client.body
        request = asked(f)
        assert (request.prompt, request.max_tokens, request.min_tokens, request.priority) == ((104, 105), 3, 1, 1)
        assert request.sampling.top_k == 4
        assert 7 in request.stop_token_ids


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, 5),
        ({"max_tokens": 6, "max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 7}, 7),
        ({"num_predict": 4}, 4),
        ({"n_predict": 4}, 4),
        ({"max_new_tokens": 4}, 4),
        ({"options": {"num_predict": 4}}, 4),
        ({"num_predict": -1, "options": {"num_predict": 4}}, 4),
        ({"max_tokens": 3, "options": {"num_predict": 4}}, 3),
        ({"num_predict": -1}, 4096 - 21),
        ({"num_predict": -2}, 4096 - 21),
        ({"max_tokens": 4095}, 4096 - 21),
        ({"max_tokens": 32_000}, 4096 - 21),
        ({"max_completion_tokens": 2**31 - 1}, 4096 - 21),
    ],
)
@in_loop
async def test_of_several_limits_the_smallest_counts(fields: dict[str, Any], most: int) -> None:
    """Agents ask for more than a small context leaves: it is a limit, and the context is another."""
    async with front() as f:
        client = await f.chat(**fields)
        assert client.status == 200, client.body
        assert asked(f).max_tokens == most


@in_loop
async def test_an_answer_that_the_context_ends_says_length() -> None:
    async with front(forever, context=64) as f:
        answer = (await f.chat(max_tokens=5000)).json
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 64


@in_loop
async def test_min_tokens_never_moves_a_limit() -> None:
    async with front(forever) as f:
        answer = (await f.chat(min_tokens=5000, max_tokens=7)).json
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 7)


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_completion_of_no_tokens_computes_the_prompt_alone(stream: bool) -> None:
    async with front() as f:
        client = await f.complete(max_tokens=0, stream=stream)
        choice = client.events[0]["choices"][0] if stream else client.json["choices"][0]
        assert (client.status, choice["text"], choice["finish_reason"]) == (200, "", "length")
        assert f.idle()


@in_loop
async def test_ollamas_options_are_sampling() -> None:
    async with front() as f:
        options = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "repeat_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.3,
            "seed": 9,
            "num_ctx": 2048,
            "stop": ["x"],
            "num_thread": 8,
            "mirostat": 0,
            "typical_p": 1.0,
            "num_keep": 4,
        }
        client = await f.chat(options=options, keep_alive="5m")
        assert client.status == 200, client.body
        sampling = asked(f).sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
        assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, 0.3)
        assert sampling.seed == 9


@in_loop
async def test_the_requests_own_fields_win_over_options() -> None:
    async with front() as f:
        await f.chat(
            temperature=0.25, repetition_penalty=1.5, repeat_penalty=1.2, options={"temperature": 1.0, "top_k": 3}
        )
        sampling = asked(f).sampling
        assert (sampling.temperature, sampling.repetition_penalty, sampling.top_k) == (0.25, 1.5, 3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 1, "options": {"temperature": 3}}, "options.temperature"),
        ({"repetition_penalty": 1, "repeat_penalty": 11}, "repeat_penalty"),
        ({"stop": "x", "options": {"stop": ""}}, "options.stop"),
        ({"num_ctx": 1, "options": {"num_ctx": 4097}}, "options.num_ctx"),
        ({"max_tokens": 5, "max_completion_tokens": 10**12}, "max_completion_tokens"),
        ({"max_tokens": 10**12, "max_completion_tokens": 5}, "max_tokens"),
        ({"max_tokens": 5, "num_predict": 0}, "num_predict"),
        ({"num_predict": 10**12, "max_completion_tokens": 5}, "num_predict"),
    ],
    ids=str,
)
@in_loop
async def test_a_value_that_another_wins_over_must_be_in_range_too(fields: dict[str, Any], param: str) -> None:
    async with front() as f:
        client = await f.chat(**fields)
        assert (client.status, client.json["error"]["param"]) == (400, param), client.body


@in_loop
async def test_a_stop_in_options_stops() -> None:
    async with front() as f:
        assert (await f.chat(options={"stop": " ans"})).json["choices"][0]["message"]["content"] == "The"


@pytest.mark.parametrize(
    "fields",
    [
        {"stream_options": {"include_usage": True}},
        {"usage": {"include": True}},
        {"usage": {"include": False}},
        {"usage": {}},
        {"usage": None},
        {"store": True, "metadata": {"a": 1}, "user": "u"},
        {"keep_alive": -1, "ttl": 300, "cache_prompt": False, "id_slot": 0},
        {"num_ctx": 4096},
        {"repeat_last_n": 64, "repeat_penalty": 1.0},
        {"options": {"repeat_last_n": 0, "penalize_newline": True, "repeat_penalty": 1}},
        {"options": {"logits_all": False, "vocab_only": False, "embedding_only": False}},
        {"repeat_last_n": 9, "options": {"repeat_last_n": 64}},
        {"repeat_last_n": -1, "mirostat": 0, "typical_p": 1, "tfs_z": 1.0, "dry_multiplier": 0},
        {"top_logprobs": 0},
        {"logprobs": False, "top_logprobs": 3},
        {"include_reasoning": True},
    ],
    ids=str,
)
@in_loop
async def test_fields_that_ask_for_nothing_here_are_taken(fields: dict[str, Any]) -> None:
    async with front() as f:
        client = await f.chat(**fields)
        assert client.status == 200, client.body
        assert client.json["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "repeat_last_n"),
        ({"repeat_last_n": 0, "presence_penalty": 1}, "repeat_last_n"),
        ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options.repeat_last_n"),
        ({"options": {"repeat_last_n": 64, "frequency_penalty": 0.1}}, "options.repeat_last_n"),
        ({"options": {"penalize_newline": False}}, "options.penalize_newline"),
        ({"options": {"logits_all": True}}, "options.logits_all"),
        ({"options": {"vocab_only": True}}, "options.vocab_only"),
        ({"options": {"embedding_only": 0}}, "options.embedding_only"),
    ],
    ids=str,
)
@pytest.mark.parametrize("large", [False, True])
@in_loop
async def test_ollamas_options_that_would_change_the_answer_are_refused(
    fields: dict[str, Any], param: str, large: bool
) -> None:
    async with front() as f:
        client = await f.chat(**fields, user="x" * (70_000 if large else 1))
        found = client.json["error"]
        assert (client.status, found["code"], found["param"]) == (400, "unsupported_parameter", param)
        assert param in found["message"]


@in_loop
async def test_a_window_of_the_models_own_penalty_is_refused() -> None:
    async with front(text=bytes_text(default_sampling={"repetition_penalty": 1.05})) as f:
        assert (await f.chat(repeat_last_n=64)).status == 400
        assert (await f.chat(repeat_last_n=-1)).status == 200
        assert (await f.chat(repeat_last_n=64, repetition_penalty=1)).status == 200


@in_loop
async def test_top_logprobs_alone_ask_for_log_probabilities() -> None:
    async with front() as f:
        content = (await f.chat(top_logprobs=2)).json["choices"][0]["logprobs"]["content"]
        assert {len(entry["top_logprobs"]) for entry in content} == {2}


@pytest.mark.parametrize(
    ("fields", "enabled"),
    [
        ({}, None),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"enabled": False}}, False),
        ({"think": False}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
    ids=str,
)
def test_no_reasoning_is_what_templates_call_enable_thinking(fields: dict[str, Any], enabled: bool | None) -> None:
    assert ParsedChat({"messages": [HI], **fields}).prompt.variables.get("enable_thinking") is enabled


@in_loop
async def test_a_repetition_penalty_of_next_to_nothing_is_served() -> None:
    """5e-324 is above 0, and was a server error: the runner can't divide by it."""
    async with front() as f:
        assert (await f.chat(repetition_penalty=5e-324)).status == 200
        assert asked(f).sampling.repetition_penalty == 1e-6


def test_every_field_of_the_official_sdk_is_known() -> None:
    chat = set(chat_params.CompletionCreateParamsBase.__annotations__)
    text = set(text_params.CompletionCreateParamsBase.__annotations__)
    assert chat <= set(ChatRequest.model_fields)
    assert text <= set(CompletionRequest.model_fields)


# The last message -----------------------------------------------------------------------------------------------


def prompt(f: Front) -> str:
    """What the model was given, without the special tokens' names."""
    return f.texts.model().decode(asked(f).prompt, skip_special_tokens=False)


CONTINUED: list[dict[str, Any]] = [
    {"continue_final_message": True},
    {"continue_final_message": True, "add_generation_prompt": False},
]


@pytest.mark.parametrize("fields", CONTINUED, ids=str)
@in_loop
async def test_the_last_message_is_continued_where_asked(fields: dict[str, Any]) -> None:
    async with front() as f:
        messages = [HI, {"role": "assistant", "content": "Well, "}]
        client = await f.post("/v1/chat/completions", {"messages": messages, **fields})
        assert client.status == 200, client.body
        assert prompt(f) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell, "
        assert client.json["choices"][0]["message"]["content"] == "The answer."


@pytest.mark.parametrize("key", ["prefix", "partial"])
@in_loop
async def test_a_last_message_that_is_marked_is_continued(key: str) -> None:
    async with front() as f:
        messages = [HI, {"role": "assistant", "content": "We", key: True}]
        await f.post("/v1/chat/completions", {"messages": messages})
        assert prompt(f).endswith("<|im_start|>assistant\nWe")
        await f.post("/v1/chat/completions", {"messages": [*messages, HI]})
        assert prompt(f).endswith("hi<|im_end|>\n<|im_start|>assistant\n")


@in_loop
async def test_without_a_word_an_assistants_last_message_is_an_earlier_answer() -> None:
    async with front() as f:
        messages = [HI, BARE]
        await f.post("/v1/chat/completions", {"messages": messages})
        assert prompt(f).endswith("assistant\nho<|im_end|>\n<|im_start|>assistant\n")
        await f.post("/v1/chat/completions", {"messages": messages, "add_generation_prompt": False})
        assert prompt(f).endswith("assistant\nho<|im_end|>\n")


def test_completions_know_the_shared_spellings() -> None:
    ask = ParsedCompletion({"prompt": "x", "options": {"num_predict": 3, "temperature": 0}, "num_ctx": 5})
    assert (ask.params.max_tokens, ask.params.temperature, ask.given["num_ctx"]) == (3, 0, 5)


@in_loop
async def test_a_wish_for_more_or_fewer_words_is_a_hint() -> None:
    async with front() as f:
        for verbosity in ("low", "medium", "high", None):
            client = await f.chat(verbosity=verbosity)
            assert (client.status, list(asked(f).prompt)) == (200, list(f.runner.seen[0].prompt))
