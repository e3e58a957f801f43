"""A model in memory, with all that the runner must know about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...core.compute_path import ComputePath
from ..device.cuda_graphs import GraphSwitch
from ..device.readback import Readback
from ..kv.backend import Clock, KvBackend, Live
from ..kv.cost import KvCost
from ..layers.replace import ReplacedLayers
from ..mlxlm import MlxLm
from ..pooling import Embedding
from ..sampling.bitmask import Masking, gathered
from ..sampling.sampler import Kernel
from ..vision.model import Vision
from .backend_choice import BackendChoice


@dataclass(frozen=True)
class LoadedModel:
    """`module` and the KV backend that was chosen for it.

    `kv_dtype` is the type of stored keys and values. No more than `max_running` sequences are expected. `draws` is the
    sampling kernel, and `lands` the readback of sampled tokens, where there are such; `masks` applies bitmasks of
    allowed tokens to logits. With `staged` small arrays reach the device through the staging buffer. `graphs` switches
    CUDA graphs off for passes that come in many shapes. `compute` is the compute path without its look-ahead, which the
    backend knows. `embedding` says what vectors it gives. `layers` are the module's faster layers. A draft model beside
    it has `draft_budget_bytes` of cache memory. `vision` is its tower for images; where it should have one, `no_images`
    says why not. `details` are shown to people.
    """

    name: str
    module: Any
    library: MlxLm
    architecture: str
    vocabulary: int
    context: int
    device: str
    dtype: str
    parameters: int
    weight_bytes: int
    choice: BackendChoice
    kv_dtype: str = ""
    max_running: int = 64
    draws: Kernel | None = None
    lands: Readback | None = None
    masks: Masking = gathered
    compute: ComputePath = field(default_factory=ComputePath)
    staged: bool = False
    graphs: GraphSwitch | None = None
    embedding: Embedding = field(default_factory=lambda: Embedding(unavailable="it was loaded without them"))
    layers: ReplacedLayers | None = None
    draft_budget_bytes: int = 0
    vision: Vision | None = None
    no_images: str = ""
    details: dict[str, str] = field(default_factory=dict)

    @property
    def kv(self) -> KvCost:
        """Cache memory of a sequence."""
        return self.choice.cost

    @property
    def kv_budget_bytes(self) -> int:
        """Cache memory of all sequences; 0 where it is not known."""
        return self.choice.budget

    @property
    def prefill_tokens(self) -> int:
        """Tokens of prompts for which a step has memory; 0 for as many as are asked for."""
        return self.choice.prefill_tokens


def build_backend(model: LoadedModel, live: Live, clock: Clock) -> KvBackend:
    """The KV backend that was chosen for `model`, empty, over the registry `live`."""
    return model.choice.config.build(model.module, live, clock)
