"""`mlx.grpc.engine.MlxEngine`: the wire that the gateway speaks to MLX workers. Tokens in, tokens out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from smg_grpc_proto import mlx_engine_pb2 as pb
from smg_grpc_proto import mlx_engine_pb2_grpc as pb_grpc

from ...errors import UnsupportedParameter
from ..validate import Wanted
from .ask import Ask
from .facts import Facts
from .generate import Worker
from .sequence import Choice, Part
from .wires import Context, given, logprobs_of, off_at

SERVICE = "mlx.grpc.engine.MlxEngine"
SERVER_TYPE = "treadle"


class MlxEngine(pb_grpc.MlxEngineServicer):  # type: ignore[misc]
    """The service. Chunks hold what is new, and counts so far."""

    def __init__(self, worker: Worker, facts: Facts) -> None:
        self._worker = worker
        self._facts = facts

    async def Generate(self, request: Any, context: Context) -> None:
        await self._worker.generate(context, SERVICE, request, ask_of, MlxWriter())

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
        )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        await self._facts.check_ready(context)
        return pb.GetServerInfoResponse(
            server_type=SERVER_TYPE,
            active_requests=len(self._worker.calls),
            uptime_seconds=self._facts.uptime_s(),
        )

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        await self._facts.check_ready(context)
        async for chunk in self._facts.tokenizer():
            yield chunk


def ask_of(request: Any) -> Ask:
    """The request of a message. Raises InvalidRequest.

    Protobuf's zeros mean off, and so does a repetition penalty of 1; a temperature that is not there is the model's
    own.
    """
    params = request.sampling_params
    logprobs = given(params, "logprobs")
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
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=logprobs,
    )
    return Ask(
        request_id=request.request_id,
        prompt=prompt_of(request),
        wanted=wanted,
        max_tokens=given(params, "max_tokens"),
        stream=request.stream,
    )


def prompt_of(request: Any) -> tuple[int, ...] | str:
    """Token ids, or text, whichever the message has."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise UnsupportedParameter("the request has no input: give tokenized or text", param="input")
    return request.text if kind == "text" else tuple(request.tokenized.input_ids)


class MlxWriter:
    """Writes this wire's messages."""

    def chunk(self, choice: Choice, part: Part) -> Any:
        return pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(
                token_ids=part.tokens,
                prompt_tokens=choice.prompt_tokens,
                completion_tokens=choice.completion_tokens,
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
                matched_stop_token_id=part.stop_token_id,
            )
        )
