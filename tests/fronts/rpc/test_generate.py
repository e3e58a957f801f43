"""Generate on both wires: what is asked, what is answered, and what is refused within its own request."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tests.fronts.rpc.worker import PROMPT, WIRES, refused, until, worker
from tests.fronts.web.server import ANSWER, forever, says
from tests.support.aio import in_loop
from tests.support.answers import Answers
from tests.support.bytes_text import EOS, VOCABULARY, bytes_text

both = pytest.mark.parametrize("name", WIRES)


@both
@in_loop
async def test_a_stream_is_what_is_new_and_ends_with_the_counts(name: str) -> None:
    """E1, E2"""
    async with worker() as w:
        answer = await w.wire(name).answer()
        assert answer.tokens == ANSWER.encode()
        assert (answer.end.finish_reason, answer.end.prompt_tokens, answer.end.cached_tokens) == ("stop", 5, 0)
        assert answer.end.completion_tokens == len(ANSWER) + 1
        counts = [chunk.completion_tokens for chunk in answer.chunks]
        assert (counts[-1] if name == "mlx" else sum(counts)) == len(ANSWER) + 1
        assert all(chunk.prompt_tokens == 5 for chunk in answer.chunks)
        await until(w.idle)


@both
@in_loop
async def test_an_answer_in_one_message_has_it_all(name: str) -> None:
    async with worker() as w:
        answer = await w.wire(name).answer(stream=False)
        assert not answer.chunks
        assert bytes(answer.end.output_ids[:-1]) == ANSWER.encode()
        assert answer.end.output_ids[-1] == EOS
        assert answer.end.completion_tokens == len(answer.end.output_ids)
        matched = answer.end.matched_stop_token_id if name == "mlx" else answer.end.matched_token_id
        assert matched == EOS


@both
@in_loop
async def test_text_is_tokenized_here(name: str) -> None:
    async with worker() as w:
        await w.wire(name).answer(prompt="hey")
        assert bytes(t for t in w.runner.seen[0].prompt if t < 256) == b"hey"


@both
@in_loop
async def test_protobufs_zeros_are_off_and_a_silent_temperature_is_the_models_own(name: str) -> None:
    """gateway.md 1.1: 0 and 1 both mean no repetition penalty; the gateway sends 1.0 on every request."""
    async with worker(default_sampling={"temperature": 0.6, "top_p": 0.5, "top_k": 3}) as w:
        for i, params in enumerate([{}, {"repetition_penalty": 1.0, "top_p": 1.0, "temperature": 0.0}]):
            await w.wire(name).answer(f"r{i}", **params)
        for seen, temperature in zip(w.runner.seen, (0.6, 0.0), strict=True):
            sampling = seen.sampling
            assert sampling.temperature == pytest.approx(temperature)
            assert (sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0, 0.0)
            assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1, 0, 0)


@both
@in_loop
async def test_every_parameter_arrives(name: str) -> None:
    params = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {65: 1.5},
        "max_tokens": 3,
        "stop_token_ids": [66],
        "ignore_eos": True,
        "seed": -5,
    }
    async with worker() as w:
        for i in range(2):
            answer = await w.wire(name).answer(f"r{i}", **params)
        first, again = w.runner.seen
        assert (answer.end.finish_reason, answer.end.completion_tokens) == ("length", 3)
        sampling = first.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.125)
        assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, 0.5, -0.5)
        assert (sampling.logit_bias, first.stop_token_ids, first.max_tokens) == (((65, 1.5),), (66,), 3)
        assert sampling.seed == again.sampling.seed


@both
@in_loop
async def test_without_a_seed_each_request_draws_its_own(name: str) -> None:
    async with worker() as w:
        for i in range(2):
            await w.wire(name).answer(f"r{i}")
        first, second = w.runner.seen
        assert first.sampling.seed != second.sampling.seed


@both
@pytest.mark.parametrize(("asked", "given"), [(None, 59), (100_000, 59), (10, 10)])
@in_loop
async def test_more_tokens_than_are_left_means_all_that_are_left(name: str, asked: int | None, given: int) -> None:
    """The gateway does not check max_tokens against the context."""
    async with worker(forever, context=64) as w:
        answer = await w.wire(name).answer(**({} if asked is None else {"max_tokens": asked}))
        assert (answer.end.finish_reason, answer.end.completion_tokens) == ("length", given)


@both
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("count", [0, 3])
@in_loop
async def test_log_probabilities_come_one_entry_a_token(name: str, stream: bool, count: int) -> None:
    """0 means the chosen token alone."""
    async with worker() as w:
        answer = await w.wire(name).answer(stream=stream, max_tokens=4, logprobs=count)
        entries = [part.output_logprobs for part in (answer.chunks if stream else answer.completes)]
        assert [token for entry in entries for token in entry.token_ids] == list(ANSWER[:4].encode())
        assert [p for entry in entries for p in entry.token_logprobs] == pytest.approx([-0.5] * 4)
        tops = [top for entry in entries for top in entry.top_logprobs]
        assert [len(top.values) for top in tops] == [len(top.token_ids) for top in tops] == [count] * 4
        if count:
            assert list(tops[0].values) == pytest.approx([-0.5, -1.5, -2.5])


@in_loop
async def test_stop_strings_end_a_choice_at_the_token_that_completed_one() -> None:
    """E2"""
    async with worker(says("One. STOP two")) as w:
        for stream in (True, False):
            answer = await w.vllm.answer(stream=stream, stop=["zz", "ST"])
            tokens = answer.tokens if stream else bytes(answer.end.output_ids)
            assert tokens == b"One. ST"
            assert (answer.end.finish_reason, answer.end.matched_stop_str) == ("stop", "ST")
            assert answer.end.completion_tokens == len("One. ST")
            await until(w.idle)


@in_loop
async def test_several_choices_have_their_own_ends_and_seeds() -> None:
    """E2"""
    async with worker() as w:
        answer = await w.vllm.answer(n=3, seed=7, temperature=1.0)
        assert sorted(complete.index for complete in answer.completes) == [0, 1, 2]
        for index in range(3):
            tokens = [t for chunk in answer.chunks if chunk.index == index for t in chunk.token_ids]
            assert bytes(tokens[:-1]) == ANSWER.encode()
        assert len({request.sampling.seed for request in w.runner.seen}) == 3


@in_loop
async def test_the_end_of_a_choice_counts_its_draft_tokens() -> None:
    text = bytes_text()
    async with worker(Answers(text, ANSWER, steps=(3,)), text=text) as w:
        for stream in (True, False):
            end = (await w.vllm.answer(f"r{stream}", stream=stream)).end
            assert 0 < end.spec_accepted_tokens < end.spec_draft_tokens
            assert end.completion_tokens == len(ANSWER) + 1
    async with worker() as w:
        end = (await w.vllm.answer()).end
        assert (end.spec_accepted_tokens, end.spec_draft_tokens) == (0, 0)


@both
@pytest.mark.parametrize(
    ("asked", "says_"),
    [
        ({"prompt": ()}, "prompt is empty"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": (5, VOCABULARY)}, f"ids of this model are 0 to {VOCABULARY - 1}"),
        ({"prompt": (5, 2**32 - 1)}, "ids of this model"),
        (
            {"prompt": (5,) * 4096},
            "maximum context length is 4096 tokens. However, your messages resulted in 4096 tokens",
        ),
        ({"prompt": "x" * 100_000}, "maximum context length"),
        ({"request_id": ""}, "request_id is empty"),
        ({"request_id": "x" * 1000}, "request_id has 1000 characters"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": float("inf")}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"presence_penalty": 9.0}, "presence_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"logit_bias": {VOCABULARY: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
    ],
)
@in_loop
async def test_bad_input_is_refused_by_name_and_nobody_else_notices(
    name: str, asked: dict[str, Any], says_: str
) -> None:
    """F8, gateway.md 2.3: each of these stalled, killed or fooled the worker that came before."""
    async with worker(forever) as w:
        healthy = w.wire(name).generate("healthy", max_tokens=200)
        error = await refused(w.wire(name).generate(**asked))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert says_ in error.details()
        tokens = [token async for message in healthy for token in message.chunk.token_ids]
        assert bytes(tokens) == b"x" * 200
        await until(w.idle)


@both
@in_loop
async def test_a_message_without_input_is_refused(name: str) -> None:
    async with worker() as w:
        wire = w.wire(name)
        error = await refused(wire.stub.Generate(wire.pb.GenerateRequest(request_id="r")))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "give tokenized or text" in error.details()


@in_loop
async def test_more_than_one_message_can_hold_is_refused_before_it_breaks_the_gateway() -> None:
    """The gateway takes no message over 4 MiB."""
    async with worker(forever, context=40_000, running=1) as w:
        error = await refused(w.mlx.generate(stream=False, logprobs=20, prompt=PROMPT))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "do not fit one message of 4 MiB: stream it" in error.details()
        await until(w.idle)


@pytest.mark.parametrize(
    ("asked", "says_"),
    [
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)
@in_loop
async def test_what_is_not_there_yet_is_unimplemented_by_name(asked: dict[str, Any], says_: str) -> None:
    """E2"""
    async with worker() as w:
        error = await refused(w.vllm.generate(**asked))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert says_ in error.details()


@pytest.mark.parametrize(
    ("asked", "says_"),
    [
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens is 9 and the answer has at most 3"),
        ({"n": 200}, "n is 200"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"stop": ["a"] * 17}, "stop has 17"),
        ({"stop": [""]}, "empty string"),
    ],
)
@in_loop
async def test_bad_input_of_the_richer_wire(asked: dict[str, Any], says_: str) -> None:
    async with worker() as w:
        error = await refused(w.vllm.generate(**asked))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert says_ in error.details()


@in_loop
async def test_fields_for_other_kinds_of_worker_are_refused() -> None:
    async with worker() as w:
        pb, stub = w.vllm.pb, w.vllm.stub
        for name, value in (("mm_inputs", pb.MultimodalInputs()), ("kv_transfer_params_json", "{}")):
            request = w.vllm.request()
            if isinstance(value, str):
                setattr(request, name, value)
            else:
                getattr(request, name).CopyFrom(value)
            error = await refused(stub.Generate(request))
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED
            assert name in error.details()
        request = w.vllm.request()
        request.extra_mm_inputs.add()
        error = await refused(stub.Generate(request))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "extra_mm_inputs" in error.details()
        request = w.vllm.request()
        request.data_parallel_rank = 1
        assert (await refused(stub.Generate(request))).code() is grpc.StatusCode.INVALID_ARGUMENT
