"""Facts and load of this worker for gateways, the same on both wires. Until it is ready its calls fail: a gateway that
reads "not healthy" while it registers a worker takes it for ready, and only a failed call keeps it away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from smg_grpc_proto.generated import common_pb2 as common

from ...core.statistics import EngineStatistics
from ...engine.status import status_of
from ...errors import EngineUnavailable
from ..prefixes import hit_rate
from ..served_models import IMAGE, ServedModel
from ..text_jobs import bundled
from .bundle import chunks_of
from .context import Context, refuse

RATE_OVER_S = 1.0


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model for a gateway."""

    name: str
    path: str
    context: int
    vocabulary: int
    dtype: str
    kv_dtype: str
    kv_block: int
    model_type: str
    architectures: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int
    pad_token_id: int
    default_sampling: Mapping[str, float | int]


@dataclass(frozen=True)
class WorkerLoad:
    """Load of the worker. Tokens are those that requests hold in the cache, or wait with: cached tokens of waiting
    requests are not known before they run. `cache_hit_rate` is the part of all prompt tokens that was reused."""

    running: int
    waiting: int
    max_running: int
    used_tokens: int
    max_tokens: int
    waiting_tokens: int
    tokens_per_s: float
    cache_hit_rate: float

    @property
    def token_usage(self) -> float:
        """The part of the cache that is reserved; 0 if it has no limit."""
        return self.used_tokens / self.max_tokens if self.max_tokens else 0.0


class WorkerInfo:
    """Facts and load from the front's own state: the engine is not asked, so the calls are answered while it is
    busy."""

    def __init__(self, served: ServedModel, own_template: bool, clock: Callable[[], float]) -> None:
        """`own_template`: the chat template is not the model folder's, so gateways must fetch it from here."""
        self._served = served
        self._own_template = own_template
        self._clock = clock
        self._started = clock()
        self._model: ModelFacts | None = None
        self._rate = _Rate()

    @property
    def generates(self) -> bool:
        """Whether the model generates text; it is for embeddings alone otherwise."""
        can = self._served.engine.capabilities
        return can is None or not can.embedding.only

    @property
    def reads_images(self) -> bool:
        """Whether the worker reads images."""
        return IMAGE in self._served.modalities

    @property
    def unavailable(self) -> EngineUnavailable | None:
        """The reason why the worker takes no requests now; None while it does."""
        health = self._served.health()
        if health.ready:
            return None
        wait_s = 2.0 if health.retry_after_s is None else health.retry_after_s
        return EngineUnavailable(f"not ready: {health.reason or health.state}", retry_after_s=wait_s)

    async def check_ready(self, context: Context) -> None:
        """End the call with UNAVAILABLE while the worker takes no requests."""
        unavailable = self.unavailable
        if unavailable is not None:
            await refuse(context, unavailable)

    def uptime_s(self) -> float:
        return self._clock() - self._started

    def model(self) -> ModelFacts:
        """Return the model's facts. Only while `unavailable` is None."""
        if self._model is None:
            self._model = self._read()
        return self._model

    def _read(self) -> ModelFacts:
        text, capabilities = self._served.text(), self._served.engine.capabilities
        assert capabilities is not None
        return ModelFacts(
            name=self._served.name,
            path=self._served.name if self._own_template else str(text.folder),
            context=min(text.context, capabilities.context),
            vocabulary=min(text.vocabulary, capabilities.vocabulary),
            dtype=capabilities.dtype,
            kv_dtype=capabilities.kv.dtype,
            kv_block=capabilities.kv.prefix_block or capabilities.kv.block,
            model_type=text.model_type,
            architectures=text.architectures,
            eos_token_ids=text.eos_token_ids,
            bos_token_id=text.special_id("bos_token") or 0,
            pad_token_id=text.special_id("pad_token") or 0,
            default_sampling=text.default_sampling,
        )

    def load(self) -> WorkerLoad:
        status = status_of(self._served.engine)
        admission = status["admission"]
        waiting = [request for request in status["requests"] if request["phase"] == "waiting"]
        return WorkerLoad(
            running=admission["running"],
            waiting=admission["waiting"],
            max_running=admission["capacity"],
            used_tokens=admission["tokens_reserved"],
            max_tokens=admission["max_tokens_reserved"],
            waiting_tokens=sum(request["prompt_tokens"] for request in waiting),
            tokens_per_s=self._rate.of(self._statistics().completion_tokens, self._clock()),
            cache_hit_rate=hit_rate(self._statistics().runner.prefix),
        )

    def _statistics(self) -> EngineStatistics:
        report = self._served.engine.report
        return EngineStatistics() if report is None else report.statistics

    async def tokenizer(self) -> AsyncIterator[Any]:
        """The model's text side as a zip in chunks; the last one has the sha256 of it all."""
        for data, digest in chunks_of(await bundled(self._served.texts.pool)):
            yield common.GetTokenizerChunk(data=data, sha256=digest)


class _Rate:
    """Tokens a second between one call and the next, at least RATE_OVER_S apart."""

    def __init__(self) -> None:
        self._count: int | None = None
        self._at = 0.0
        self._rate = 0.0

    def of(self, count: int, now: float) -> float:
        if self._count is not None and now - self._at < RATE_OVER_S:
            return self._rate
        if self._count is not None:
            self._rate = max(0, count - self._count) / (now - self._at)
        self._count, self._at = count, now
        return self._rate
