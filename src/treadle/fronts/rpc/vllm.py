"""`vllm.grpc.engine.VllmEngine`: the richer wire, with stop strings, several choices, and load."""

from __future__ import annotations

import datetime
import json
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from ...errors import UnsupportedParameter
from ..validate import Wanted
from .ask import Ask
from .facts import Facts
from .generate import Worker
from .mlx import SERVER_TYPE, prompt_of
from .sequence import Choice, Part
from .wires import Context, NotImplementedHere, given, logprobs_of, off_at

SERVICE = "vllm.grpc.engine.VllmEngine"
CONSTRAINTS = "structured output is not supported by this worker yet: leave the constraint out"


class VllmEngine(pb_grpc.VllmEngineServicer):  # type: ignore[misc]
    """The service. Chunks hold what is new, in tokens and in counts."""

    def __init__(self, worker: Worker, facts: Facts) -> None:
        self._worker = worker
        self._facts = facts

    async def Generate(self, request: Any, context: Context) -> None:
        await self._worker.generate(context, SERVICE, request, ask_of, VllmWriter())

    async def Abort(self, request: Any, context: Context) -> Any:
        await self._facts.check_ready(context)
        self._worker.calls.abort(request.request_ids)
        return pb.AbortResponse()

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        await self._facts.check_ready(context)
        return pb.HealthCheckResponse(healthy=True, message="ready")

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        await self._facts.check_ready(context)
        model = self._facts.model()
        return pb.GetModelInfoResponse(
            model_path=model.path,
            tokenizer_path=model.path,
            is_generation=True,
            max_context_length=model.context,
            vocab_size=model.vocabulary,
            served_model_name=model.name,
            model_type=model.model_type,
            architectures=model.architectures,
            eos_token_ids=model.eos_token_ids,
            pad_token_id=model.pad_token_id,
            bos_token_id=model.bos_token_id,
            max_req_input_len=model.context - 1,
            default_sampling_params_json=json.dumps(model.default_sampling) if model.default_sampling else "",
        )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        await self._facts.check_ready(context)
        load = self._facts.load()
        return pb.GetServerInfoResponse(
            active_requests=len(self._worker.calls),
            uptime_seconds=self._facts.uptime_s(),
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            model_dtype=self._facts.model().dtype,
            max_num_seqs=load.max_running,
        )

    async def GetLoads(self, request: Any, context: Context) -> Any:
        await self._facts.check_ready(context)
        load = self._facts.load()
        rank = pb.SchedulerLoad(
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=load.used_tokens,
            max_total_num_tokens=load.max_tokens,
            token_usage=load.token_usage,
            gen_throughput=load.tokens_per_s,
            utilization=load.running / load.max_running,
            max_running_requests=load.max_running,
            num_waiting_uncached_tokens=load.waiting_tokens,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            version=version("treadle"),
            dp_rank_count=1,
            loads=[rank] if request.dp_rank == 0 else [],
        )

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        await self._facts.check_ready(context)
        async for chunk in self._facts.tokenizer():
            yield chunk

    async def Embed(self, request: Any, context: Context) -> Any:
        await _not_here(context, "embeddings are not supported by this worker yet: use another one for them")

    async def FlushCache(self, request: Any, context: Context) -> Any:
        await _not_here(context, "this worker keeps no prefix cache yet: there is nothing to flush")

    async def SubscribeKvEvents(self, request: Any, context: Context) -> AsyncIterator[Any]:
        await _not_here(context, "this worker keeps no prefix cache yet: it has no events of one")
        yield  # a generator, as the method streams

    async def StartProfile(self, request: Any, context: Context) -> Any:
        await _not_here(context, "this worker has no profiler: measure it with treadle bench")

    async def StopProfile(self, request: Any, context: Context) -> Any:
        await _not_here(context, "this worker has no profiler: measure it with treadle bench")


async def _not_here(context: Context, why: str) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, why, ())


def ask_of(request: Any) -> Ask:
    """The request of a message. Raises InvalidRequest, and UNIMPLEMENTED for what this worker does not do yet."""
    _refuse_unimplemented(request)
    params = request.sampling_params
    wanted = Wanted(
        temperature=given(params, "temperature"),
        top_p=off_at(params.top_p, 0.0) or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=off_at(params.repetition_penalty, 0.0) or 1.0,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=dict(params.logit_bias),
        seed=given(params, "seed"),
        n=params.n or 1,
        min_tokens=params.min_tokens,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=given(params, "logprobs"),
    )
    return Ask(
        request_id=request.request_id,
        prompt=prompt_of(request),
        wanted=wanted,
        max_tokens=given(params, "max_tokens"),
        stream=request.stream,
        skip_special_tokens=params.skip_special_tokens,
    )


def _refuse_unimplemented(request: Any) -> None:
    params = request.sampling_params
    constraint = params.WhichOneof("constraint")
    if constraint is not None:
        raise NotImplementedHere(CONSTRAINTS, param=constraint)
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if params.HasField(name):
            raise NotImplementedHere(f"{name} is not supported by this worker: leave it out", param=name)
    for name in ("mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json"):
        if request.HasField(name):
            raise NotImplementedHere(f"{name} is not supported by this worker: send it to another", param=name)
    if request.data_parallel_rank:
        raise UnsupportedParameter(
            f"data_parallel_rank is {request.data_parallel_rank} and this worker has one rank: leave it out",
            param="data_parallel_rank",
        )


class VllmWriter:
    """Writes this wire's messages."""

    def chunk(self, choice: Choice, part: Part) -> Any:
        return pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(
                token_ids=part.tokens,
                prompt_tokens=choice.prompt_tokens,
                completion_tokens=len(part.tokens),
                cached_tokens=choice.cached_tokens,
                output_logprobs=logprobs_of(pb, part.tokens, part.logprobs),
                index=choice.index,
            )
        )

    def complete(self, choice: Choice, part: Part) -> Any:
        return pb.GenerateResponse(
            complete=pb.GenerateComplete(
                output_ids=choice.tokens,
                finish_reason=part.finish_reason,
                prompt_tokens=choice.prompt_tokens,
                completion_tokens=choice.completion_tokens,
                cached_tokens=choice.cached_tokens,
                output_logprobs=logprobs_of(pb, choice.tokens, choice.logprobs),
                index=choice.index,
                matched_token_id=None if part.stop_string is not None else part.stop_token_id,
                matched_stop_str=part.stop_string,
            )
        )
