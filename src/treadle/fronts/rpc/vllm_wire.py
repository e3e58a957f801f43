"""`vllm.grpc.engine.VllmEngine`: the wire with stop strings, several choices, structured output, prompt
log-probabilities, and load."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from ...core.messages import TokenLogprob
from ...errors import InvalidRequest, TreadleError, UnsupportedParameter
from ...installation import version
from ...text.images import ImageSource
from ..answer_options import OutputGrammar
from ..generation.choice import Choice
from ..generation.pieces import Piece
from ..media.parts import source_of_url
from ..prefixes import reset_prefixes
from .block_events import subscribe
from .context import Context, NotImplementedHere, refuse
from .guard import caller_of, check_admin
from .request import RpcRequest
from .service import EngineService, given, parse_request
from .writer import MessageWriter

SERVICE = "vllm.grpc.engine.VllmEngine"
IMAGES = (common.Modality.MODALITY_UNSPECIFIED, common.Modality.IMAGE)
KINDS = {"grammar": "lark"}
"""Kinds of grammars, where the wire's field has another name."""


class VllmEngine(EngineService, vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """The service. Unsupported fields and methods are refused as UNIMPLEMENTED, by name."""

    name = SERVICE
    messages = vllm_engine_pb2

    def parse(self, request: Any) -> RpcRequest:
        _refuse_unimplemented(request)
        params = request.sampling_params
        parsed = parse_request(
            request,
            n=params.n or 1,
            min_tokens=params.min_tokens,
            stop=tuple(params.stop),
            prompt_logprobs=given(params, "prompt_logprobs"),
        )
        return dataclasses.replace(
            parsed,
            skip_special_tokens=params.skip_special_tokens,
            output=_output(params),
            grammar_from_first_token=params.grammar_from_first_token,
            media=_media(request),
        )

    def writer(self) -> MessageWriter:
        return VllmWriter(vllm_engine_pb2)

    def model_info(self) -> dict[str, Any]:
        model = self._facts.model()
        sampling = json.dumps(model.default_sampling) if model.default_sampling else ""
        more = {"tokenizer_path": model.path, "default_sampling_params_json": sampling}
        return super().model_info() | more | {"supports_vision": self._facts.reads_images}

    def server_info(self) -> dict[str, Any]:
        load, model = self._facts.load(), self._facts.model()
        more = {"data_parallel_size": 1, "model_dtype": model.dtype, "max_num_seqs": load.max_running}
        found = super().server_info() | more | {"kv_cache_dtype": model.kv_dtype, "block_size": model.kv_block}
        return found | (self._media_info() if self._facts.reads_images else {})

    def _media_info(self) -> dict[str, str]:
        """Tell the gateway to send images as URLs."""
        schemes = "data,http,https" if self._worker.settings.image_hosts else "data"
        return {"mm_processor": "inprocess", "mm_media_ref_schemes": schemes, "mm_processor_source": "default"}

    async def GetLoads(self, request: Any, context: Context) -> Any:
        await self._facts.check_ready(context)
        load = self._facts.load()
        rank = vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=load.used_tokens,
            max_total_num_tokens=load.max_tokens,
            token_usage=load.token_usage,
            gen_throughput=load.tokens_per_s,
            cache_hit_rate=load.cache_hit_rate,
            utilization=load.running / load.max_running,
            max_running_requests=load.max_running,
            num_waiting_uncached_tokens=load.waiting_tokens,
        )
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            version=version(),
            dp_rank_count=1,
            loads=[rank] if request.dp_rank == 0 else [],
        )

    async def Embed(self, request: Any, context: Context) -> Any:
        """Return the embedding of token ids, pooled as the model is, of length 1."""
        found = await self._worker.embed(context, self.name, request)
        vector = array("f", found.vectors[0])
        return vllm_engine_pb2.EmbedResponse(
            embedding=vector, prompt_tokens=found.prompt_tokens, embedding_dim=len(vector)
        )

    async def FlushCache(self, request: Any, context: Context) -> Any:
        """Drop all cached prompts at once. Running requests keep theirs, so nothing has to be idle."""
        await check_admin(context, self._worker.authenticator, "emptying the prefix cache")
        await self._facts.check_ready(context)
        try:
            dropped = await reset_prefixes(self._worker.model.engine)
        except TreadleError as error:
            await refuse(context, error)
        return common.FlushCacheResponse(success=True, message=f"{dropped} tokens of cached prompts dropped")

    async def SubscribeKvEvents(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """The cached blocks of the caller's salt, and each change."""
        await self._facts.check_ready(context)
        salt, start = self._worker.authenticator.salts.salt(caller_of().tenant_digest), request.start_sequence_number
        async with contextlib.aclosing(subscribe(self._worker.model.engine, salt, start, context)) as batches:
            async for batch in batches:
                yield batch

    async def StartProfile(self, request: Any, context: Context) -> Any:
        await _not_here(context, "this worker has no profiler: measure it with treadle bench")

    async def StopProfile(self, request: Any, context: Context) -> Any:
        await _not_here(context, "this worker has no profiler: measure it with treadle bench")


class VllmWriter(MessageWriter):
    """Writer whose chunks count new tokens alone, and whose ends may name a stop string and count draft tokens."""

    def counted(self, choice: Choice, piece: Piece) -> int:
        return len(piece.tokens)

    def scores(self, choice: Choice, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """One entry a prompt token; the first has no value, as no token comes before it."""
        if not logprobs:
            return {}
        value, top = self._messages.InputTokenLogProb, self._messages.TopLogProbs
        entries = self._messages.InputLogProbs(
            token_logprobs=[value(), *(value(value=entry.logprob) for entry in logprobs)],
            token_ids=choice.prompt,
            top_logprobs=[top(), *(self._top(entry) for entry in logprobs)],
        )
        return {"input_logprobs": entries}

    def ending(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        accepted, rejected = choice.draft_tokens
        drafts = {"spec_accepted_tokens": accepted, "spec_draft_tokens": accepted + rejected}
        if piece.stop_string is not None:
            return {"matched_stop_str": piece.stop_string, **drafts}
        return {"matched_token_id": piece.stop_token_id, **drafts}


def _media(request: Any) -> tuple[ImageSource, ...]:
    """Return the images of a request. Raises InvalidRequest, and NotImplementedHere for other media."""
    items = request.media_refs.items
    if not items:
        return ()
    if request.WhichOneof("input") != "tokenized":
        raise InvalidRequest("media_refs needs tokenized input: send token ids", param="media_refs")
    found = []
    for i, item in enumerate(items):
        at = f"media_refs.items[{i}]"
        if item.modality not in IMAGES:
            raise NotImplementedHere(f"{at} is no image, which this worker alone reads: send text", param=at)
        found.append(source_of_url(item.url, f"{at}.url"))
    return tuple(found)


async def _not_here(context: Context, why: str) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, why, ())


def _output(params: Any) -> OutputGrammar | None:
    """Return the grammar that the parameters ask for; None if they ask for none."""
    name = params.WhichOneof("constraint")
    if name is None or (name == "json_object" and not params.json_object):
        return None
    value = getattr(params, name)
    if name == "json_object":
        return OutputGrammar(name, None, name)
    if name == "choice":
        return OutputGrammar(name, list(value.choices), name)
    return OutputGrammar(KINDS.get(name, name), value, name)


def _refuse_unimplemented(request: Any) -> None:
    params = request.sampling_params
    if params.HasField("truncate_prompt_tokens"):
        raise NotImplementedHere(
            "truncate_prompt_tokens is not supported by this worker: leave it out", param="truncate_prompt_tokens"
        )
    for name, sent in (("mm_inputs", request.HasField("mm_inputs")), ("extra_mm_inputs", request.extra_mm_inputs)):
        if sent:
            raise NotImplementedHere(
                f"{name} is not supported by this worker, which makes pixels itself: start the gateway with "
                "--mm-processing worker",
                param=name,
            )
    for name in ("kv_transfer_params", "kv_transfer_params_json"):
        if request.HasField(name):
            raise NotImplementedHere(f"{name} is not supported by this worker: send it to another", param=name)
    if request.data_parallel_rank:
        raise UnsupportedParameter(
            f"data_parallel_rank is {request.data_parallel_rank} and this worker has one rank: leave it out",
            param="data_parallel_rank",
        )
