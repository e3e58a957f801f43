"""The shapes of answers, checked with the official SDK's own types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.fronts.web.server import forever, front, says, settle
from tests.support.aio import in_loop
from tests.support.bytes_text import bytes_text
from tests.support.tiny import IM_START
from treadle.fronts.web.openai.chat import ParsedChat
from treadle.text import ChatTemplate


@in_loop
async def test_a_chat_answer_is_openais() -> None:
    async with front() as f:
        client = await f.chat()
        answer = ChatCompletion.model_validate(client.json, strict=True)
        assert answer.id.startswith("chatcmpl-")
        assert answer.model == "m"
        assert answer.choices[0].message.content == "The answer."
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (21, 12, 33)
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0


@in_loop
async def test_a_chat_stream_is_openais_and_ends_with_usage_and_done() -> None:
    async with front() as f:
        client = await f.chat(stream=True, stream_options={"include_usage": True})
        assert client.headers["content-type"].startswith("text/event-stream")
        assert client.events[-1] == "[DONE]"
        chunks = [ChatCompletionChunk.model_validate(e, strict=True) for e in client.events[:-1]]
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "The answer."
        assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["stop"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert all("usage" in event for event in client.events[:-1])


@pytest.mark.parametrize("chat", [True, False])
@in_loop
async def test_each_chunk_has_the_tokens_so_far_of_all_choices_where_they_are_asked_for(chat: bool) -> None:
    async with front() as f:
        ask = f.chat if chat else f.complete
        options = {"include_usage": True, "continuous_usage_stats": True}
        client = await ask(stream=True, n=3, stream_options=options)
        *chunks, last, done = client.events
        assert done == "[DONE]"
        prompt, total = last["usage"]["prompt_tokens"], 3 * 12
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], total)
        assert "prompt_tokens_details" in last["usage"]
        seen = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert seen == sorted(seen)
        assert (seen[0] < 4, seen[-1], len(set(seen)) > 12) == (True, total, True)
        for chunk, tokens in zip(chunks, seen, strict=True):
            assert chunk["choices"]
            counts = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
            assert chunk["usage"] == counts


@in_loop
async def test_text_that_looks_like_the_end_of_a_chunk_stays_in_a_counted_stream() -> None:
    text = '],"usage":null}\n\n'
    async with front(says(text)) as f:
        options = {"include_usage": True, "continuous_usage_stats": True}
        client = await f.complete(prompt=text, echo=True, stream=True, stream_options=options)
        assert "".join(event["choices"][0]["text"] for event in client.events[:-2]) == text + text


@pytest.mark.parametrize(
    "fields",
    [
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream": False, "stream_options": {"continuous_usage_stats": True}},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        {"stream": True, "stream_options": {"include_usage": False, "continuous_usage_stats": True}},
    ],
)
@in_loop
async def test_counts_of_chunks_need_a_stream_with_usage(fields: dict[str, Any]) -> None:
    async with front() as f:
        for ask in (f.chat, f.complete):
            client = await ask(**fields)
            assert client.status == 200, client.body
            if fields.get("stream"):
                assert all("usage" not in event for event in client.events[:-1])
            else:
                assert client.json["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("chat", [True, False])
@in_loop
async def test_openrouters_object_asks_a_stream_for_its_usage(chat: bool) -> None:
    async with front() as f:
        ask = f.chat if chat else f.complete
        with_usage = await ask(stream=True, usage={"include": True})
        assert with_usage.events[-2]["choices"] == []
        assert with_usage.events[-2]["usage"]["completion_tokens"] == 12
        for fields in ({"include": False}, {}, {"include": None}):
            without = await ask(stream=True, usage=fields)
            assert without.status == 200
            assert all("usage" not in event for event in without.events[:-1])


@in_loop
async def test_without_include_usage_no_chunk_speaks_of_usage() -> None:
    async with front() as f:
        client = await f.chat(stream=True)
        assert all("usage" not in event for event in client.events[:-1])


@in_loop
async def test_a_completion_stream_is_openais() -> None:
    async with front() as f:
        client = await f.complete(stream=True, stream_options={"include_usage": True})
        assert client.events[-1] == "[DONE]"
        for event in client.events[:-1]:
            assert event["object"] == "text_completion"
        assert "".join(e["choices"][0]["text"] for e in client.events[:-2]) == "The answer."
        assert client.events[-2]["usage"]["total_tokens"] == 2 + 12


@in_loop
async def test_length_is_said_when_the_limit_ends_it() -> None:
    async with front() as f:
        choice = (await f.chat(max_completion_tokens=3)).json["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("The", "length")


@in_loop
async def test_choices_of_a_stream_interleave_by_index() -> None:
    async with front() as f:
        client = await f.chat(stream=True, n=3)
        texts = dict.fromkeys(range(3), "")
        order = []
        for event in client.events[:-1]:
            choice = event["choices"][0]
            order.append(choice["index"])
            texts[choice["index"]] += choice["delta"].get("content") or ""
        assert set(texts.values()) == {"The answer."}
        assert order != sorted(order)


@in_loop
async def test_usage_counts_every_prompt_once_and_every_choice() -> None:
    async with front() as f:
        client = await f.complete(prompt=["a", "bc"], n=2)
        answer = Completion.model_validate(client.json, strict=True)
        assert [c.index for c in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 1 + 2
        assert answer.usage.completion_tokens == 4 * 12


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_stop_string_is_never_shown_and_usage_counts_to_the_token_that_completed_it(stream: bool) -> None:
    async with front(says("One. STOP two")) as f:
        client = await f.complete(stop=["STOP"], stream=stream)
        if stream:
            text = "".join(e["choices"][0]["text"] for e in client.events[:-1])
            assert client.events[-2]["choices"][0]["finish_reason"] == "stop"
        else:
            text = client.json["choices"][0]["text"]
            assert client.json["usage"]["completion_tokens"] == len("One. STOP")
        assert text == "One. "
        assert f.idle()


@in_loop
async def test_a_models_own_stop_strings_end_its_chats_and_leave_completions_alone() -> None:
    async with front(says("Paris.\nUser: and?")) as f:
        f.texts.loaded = replace(bytes_text(), stop_strings=("\nUser:",))
        chat, completion = await f.chat(), await f.complete()
        assert chat.json["choices"][0]["message"]["content"] == "Paris."
        assert chat.json["choices"][0]["finish_reason"] == "stop"
        assert completion.json["choices"][0]["text"] == "Paris.\nUser: and?"
        assert f.idle()


@in_loop
async def test_ignore_eos_lets_a_chat_go_on_past_the_models_own_stop_strings() -> None:
    """As long as asked for, whatever the model says: a benchmark counts on it. The request's own still end it."""
    async with front(says("Paris.\nUser: and? Lyon.")) as f:
        f.texts.loaded = replace(bytes_text(), stop_strings=("\nUser:",))
        whole = await f.chat(ignore_eos=True, max_tokens=18)
        assert whole.json["choices"][0]["message"]["content"] == "Paris.\nUser: and? "
        assert whole.json["choices"][0]["finish_reason"] == "length"
        short = await f.chat(ignore_eos=True, max_tokens=18, stop=" and")
        assert short.json["choices"][0]["message"]["content"] == "Paris.\nUser:"
        assert f.idle()


@in_loop
async def test_a_stop_string_that_is_a_special_token_stops_as_a_token() -> None:
    """Text hides special tokens, so it would never be found there."""
    async with front(lambda request, position: ord("a") if position < 3 else IM_START) as f:
        client = await f.complete(stop="<|im_start|>", max_tokens=9)
        assert client.json["choices"][0]["text"] == "aaa"
        assert client.json["choices"][0]["finish_reason"] == "stop"


@in_loop
async def test_text_that_only_began_like_a_stop_string_is_shown() -> None:
    async with front(says("a STO")) as f:
        assert (await f.complete(stop="STOP")).json["choices"][0]["text"] == "a STO"


@in_loop
async def test_a_stop_token_is_counted_and_not_shown() -> None:
    async with front(says("abc")) as f:
        client = await f.complete(stop_token_ids=[ord("c")], logprobs=0)
        assert client.json["choices"][0]["text"] == "ab"
        assert client.json["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
        assert client.json["usage"]["completion_tokens"] == 3


@in_loop
async def test_chat_logprobs_match_the_text_byte_for_byte() -> None:
    async with front(says("héllo")) as f:
        client = await f.chat(logprobs=True, top_logprobs=2)
        choice = ChatCompletion.model_validate(client.json, strict=True).choices[0]
        assert choice.logprobs is not None
        content = choice.logprobs.content
        assert content is not None
        assert bytes(b for entry in content for b in entry.bytes or []).decode() == "héllo"
        assert all(len(entry.top_logprobs) == 2 for entry in content)


@in_loop
async def test_log_probabilities_go_out_with_the_text_they_belong_to_and_stop_with_it() -> None:
    async with front(says("ab STOP")) as f:
        client = await f.chat(logprobs=True, stop=" STOP", stream=True)
        tokens = [
            entry["token"]
            for event in client.events[:-1]
            if event["choices"][0]["logprobs"]
            for entry in event["choices"][0]["logprobs"]["content"]
        ]
        assert tokens == ["a", "b"]


@in_loop
async def test_legacy_logprobs_are_parallel_lists() -> None:
    async with front(says("hé")) as f:
        client = await f.complete(logprobs=2)
        logprobs = Completion.model_validate(client.json).choices[0].logprobs
        assert logprobs is not None
        assert logprobs.text_offset == [0, 1, 1]
        assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
        assert logprobs.top_logprobs is not None
        assert logprobs.top_logprobs[0] == {"h": -0.5, "i": -1.5}
        none = (await f.complete(logprobs=0)).json["choices"][0]["logprobs"]
        assert none["top_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_echo_repeats_text_and_token_prompts(stream: bool) -> None:
    async with front() as f:
        for prompt in ("hi ", list(b"hi "), [list(b"hi ")]):
            client = await f.complete(prompt=prompt, echo=True, stream=stream)
            choices = [e["choices"][0] for e in client.events[:-1]] if stream else client.json["choices"]
            assert "".join(choice["text"] for choice in choices) == "hi The answer."


@in_loop
async def test_a_long_list_of_log_probabilities_is_the_same_list() -> None:
    async with front(forever) as f:
        client = await f.chat(logprobs=True, top_logprobs=20, max_tokens=150)
        content = client.json["choices"][0]["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [20] * 150


@in_loop
async def test_token_ids_are_returned_on_request() -> None:
    async with front(says("ab")) as f:
        client = await f.complete(return_token_ids=True)
        assert client.json["choices"][0]["token_ids"] == [97, 98]


@in_loop
async def test_what_the_client_asked_reaches_the_engine() -> None:
    async with front() as f:
        await f.complete(
            prompt=[1, 2, 3],
            temperature=0.5,
            top_p=0.9,
            top_k=5,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            logit_bias={"5": 2},
            seed=9,
            max_tokens=4,
            min_tokens=2,
            ignore_eos=True,
            stop_token_ids=[8],
            logprobs=1,
            priority=3,
        )
        (seen,) = f.runner.seen
        sampling = seen.sampling
        assert seen.prompt == (1, 2, 3)
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
        assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, 0.3)
        assert (sampling.logit_bias, sampling.seed) == (((5, 2.0),), 9)
        assert (seen.max_tokens, seen.min_tokens, seen.stop_token_ids) == (4, 2, (8,))
        assert (seen.logprobs, seen.priority) == (1, 3)


@in_loop
async def test_messages_reach_the_template_as_plain_turns() -> None:
    async with front() as f:
        await f.post(
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "developer", "content": "be brief"},
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                    {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "reasoning": "hm"},
                    {"role": "user", "content": "", "name": "n"},
                ],
                "add_generation_prompt": False,
            },
        )
        (seen,) = f.runner.seen
        assert f.texts.model().decode(seen.prompt, skip_special_tokens=False) == (
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
            "<|im_start|>assistant\nx<|im_end|>\n<|im_start|>user\n<|im_end|>\n"
        )


@in_loop
async def test_a_template_gets_the_clients_plain_values() -> None:
    source = "{{ messages[0].name }}|{{ messages[1].reasoning_content }}|{{ enable_thinking }}"
    async with front() as f:
        f.texts.loaded = replace(f.texts.model(), chat_template=ChatTemplate(source, name="test"))
        client = await f.post(
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": "", "name": "ada"},
                    {"role": "assistant", "content": "x", "reasoning": "hm"},
                ],
                "chat_template_kwargs": {"enable_thinking": False},
            },
        )
        assert client.status == 200, client.body
        assert bytes(f.runner.seen[0].prompt) == b"ada|hm|False"


@in_loop
async def test_a_model_without_a_template_refuses_chat_and_names_the_way_out() -> None:
    async with front() as f:
        f.texts.loaded = replace(f.texts.model(), chat_template=None)
        client = await f.chat()
        assert (client.status, client.json["error"]["param"]) == (400, "messages")
        assert "--chat-template" in client.json["error"]["message"]
        assert f.idle()


@in_loop
async def test_the_models_own_sampling_holds_where_the_client_is_silent() -> None:
    async with front(default_sampling={"temperature": 0.6, "top_k": 20}) as f:
        await f.chat(top_k=0)
        assert (f.runner.seen[0].sampling.temperature, f.runner.seen[0].sampling.top_k) == (0.6, 0)


@in_loop
async def test_without_a_limit_an_answer_may_fill_the_context() -> None:
    async with front(forever, context=30) as f:
        client = await f.complete(prompt=[1, 2])
        assert client.json["usage"]["completion_tokens"] == 28


@in_loop
async def test_an_answer_without_a_single_visible_token_is_complete() -> None:
    async with front(says("")) as f:
        client = await f.chat(stream=True)
        chunks = client.events[:-1]
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "stop"]
        assert (await f.chat()).json["choices"][0]["message"]["content"] == ""


@in_loop
async def test_two_choices_with_one_seed_have_seeds_of_their_own() -> None:
    async with front() as f:
        await f.chat(n=2, seed=1)
        seeds = [row.sampling.seed for row in f.runner.seen]
        assert len(set(seeds)) == 2
        await f.chat(n=2, seed=1)
        assert [row.sampling.seed for row in f.runner.seen[2:]] == seeds


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_failure_in_our_own_code_is_said_without_internals_and_logged_once(
    stream: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> bytes:
        raise KeyError("secret")

    monkeypatch.setattr(ParsedChat, "events" if stream else "whole", broken)
    async with front() as f:
        client = await f.chat(n=2, stream=stream)
        error = client.events[-1]["error"] if stream else client.json["error"]
        assert client.status == (200 if stream else 500)
        assert error["code"] == "internal_error"
        assert "secret" not in error["message"]
        assert client.complete
        await settle()
        assert f.idle()
    assert sum(record.exc_info is not None for record in caplog.records) == 1


@in_loop
async def test_more_sequences_than_there_are_places_name_the_field_at_fault() -> None:
    async with front(running=2, waiting=2) as f:
        many = await f.complete(prompt=["hi"] * 5)
        assert (many.status, many.json["error"]["param"]) == (400, "prompt")
        choices = await f.complete(prompt=["hi"] * 4, n=2, temperature=1)
        assert (choices.status, choices.json["error"]["param"]) == (400, "n")
        assert f.idle()
