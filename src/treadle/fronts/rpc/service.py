"""Calls that mean the same on both wires, and the parser of requests, which have the same shape."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any, ClassVar

from ...errors import InvalidRequest, UnsupportedParameter
from ..validate import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, MAX_STOPS, RawParams
from .context import Context, refuse
from .generate import ServiceContext
from .guard import caller_of
from .model_info import WorkerInfo
from .request import RpcRequest
from .writer import MessageWriter

SERVER_TYPE = "treadle"
COUNTED = {"logit_bias": MAX_LOGIT_BIAS, "stop_token_ids": MAX_STOP_TOKEN_IDS, "stop": MAX_STOPS}


class EngineService:
    """The part of a wire's service that both wires have. `messages` is the module of its messages."""

    name: ClassVar[str]
    messages: ClassVar[ModuleType]

    def __init__(self, worker: ServiceContext, facts: WorkerInfo) -> None:
        self._worker = worker
        self._facts = facts

    def parse(self, request: Any) -> RpcRequest:
        """Parse a message. Raises InvalidRequest."""
        return parse_request(request)

    def writer(self) -> MessageWriter:
        return MessageWriter(self.messages)

    async def Generate(self, request: Any, context: Context) -> None:
        await self._worker.generate(context, self.name, request, self.parse, self.writer())

    async def Abort(self, request: Any, context: Context) -> Any:
        """Abort requests by their ids. Served in every state: sequences outlive a drain or a restart of the engine."""
        caller = caller_of()
        try:
            self._worker.calls.abort(request.request_ids, caller.tenant_digest, all_tenants=caller.admin)
        except InvalidRequest as error:
            await refuse(context, error)
        return self.messages.AbortResponse()

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        await self._facts.check_ready(context)
        return self.messages.HealthCheckResponse(healthy=True, message="ready")

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        await self._facts.check_ready(context)
        return self.messages.GetModelInfoResponse(**self.model_info())

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        await self._facts.check_ready(context)
        return self.messages.GetServerInfoResponse(**self.server_info())

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        await self._facts.check_ready(context)
        async for chunk in self._facts.tokenizer():
            yield chunk

    def model_info(self) -> dict[str, Any]:
        """The fields of GetModelInfoResponse."""
        model = self._facts.model()
        return {
            "model_path": model.path,
            "is_generation": self._facts.generates,
            "max_context_length": model.context,
            "vocab_size": model.vocabulary,
            "served_model_name": model.name,
            "model_type": model.model_type,
            "architectures": model.architectures,
            "eos_token_ids": model.eos_token_ids,
            "pad_token_id": model.pad_token_id,
            "bos_token_id": model.bos_token_id,
            "max_req_input_len": model.context - 1,
        }

    def server_info(self) -> dict[str, Any]:
        """The fields of GetServerInfoResponse."""
        return {
            "server_type": SERVER_TYPE,
            "active_requests": len(self._worker.calls),
            "uptime_seconds": self._facts.uptime_s(),
        }


def parse_request(request: Any, **more: Any) -> RpcRequest:
    """Parse the fields that both wires have; `more` are further ones of RawParams. Raises InvalidRequest.

    Protobuf's zeros mean off, and so does a repetition penalty of 1. A temperature that is not set is the model's own.
    """
    params = request.sampling_params
    _check_counts(params)
    raw = RawParams(
        temperature=given(params, "temperature"),
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=dict(params.logit_bias),
        seed=given(params, "seed"),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=given(params, "logprobs"),
        **more,
    )
    return RpcRequest(
        request_id=request.request_id,
        prompt=_prompt_of(request),
        params=raw,
        max_tokens=given(params, "max_tokens"),
        stream=request.stream,
    )


def _check_counts(params: Any) -> None:
    """Refuse lists that are too long before they are copied. Raises InvalidRequest."""
    for name, most in COUNTED.items():
        count = len(getattr(params, name, ()))
        if count > most:
            raise InvalidRequest(f"{name} has {count} entries: give at most {most}", param=name)


def _prompt_of(request: Any) -> tuple[int, ...] | str:
    """The token ids of a message, or its text."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise UnsupportedParameter("the request has no input: give tokenized or text", param="input")
    return request.text if kind == "text" else tuple(request.tokenized.input_ids)


def given(message: Any, name: str) -> Any:
    """The value of an optional field; None where it is not set."""
    return getattr(message, name) if message.HasField(name) else None
