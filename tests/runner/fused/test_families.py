"""Every family with fused layers gives its module's own logits, and wrong facts are caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.runner.backends import Driven, segment
from tests.runner.fused.families import FAMILIES, VOCABULARY, config_of, make
from tests.support import architectures
from tests.support.architectures import new_module
from tests.support.cuda import ReferenceKernel, ReferenceKernels, failing
from tests.support.cuda_launches import LAUNCHES, Launch
from treadle.runner.fused import families
from treadle.runner.fused.decoder import FusedDecoder
from treadle.runner.fused.families import Family, Norms
from treadle.runner.fused.kernels import Activation
from treadle.runner.fused.layer import Part
from treadle.runner.kv.backend import Unsupported
from treadle.runner.kv.paged.backend import PagedConfig
from treadle.runner.layers.choose import FasterLayers
from treadle.runner.loading import candidates
from treadle.runner.loading.backend_choice import Rejection
from treadle.runner.loading.reference import Reference
from treadle.runner.mlxlm import connect, keeping, tap_layers
from treadle.runner.recurrent.operations import RecurrentOperations

PROMPT = tuple((7 * i + i * i) % VOCABULARY for i in range(45))
OWN = {
    "OlmoeSparseMoeBlock": ("olmoe", 2),
    "Qwen2MoeSparseMoeBlock": ("qwen2_moe", 2),
    "Qwen3MoeSparseMoeBlock": ("qwen3_moe", 2),
    "Dots1MoE": ("dots1", 1),
    "MixtralSparseMoeBlock": ("mixtral", 2),
    "MiniMaxSparseMoeBlock": ("minimax", 2),
    "PhiMoESparseMoeBlock": ("phimoe", 2),
    "GraniteMoeMoE": ("granitemoe", 2),
    "BailingMoeSparseMoeBlock": ("bailing_moe", 1),
    "KlearSparseMoeBlock": ("Klear", 2),
    "MellumSparseMoeBlock": ("mellum", 2),
    "Ernie4_5_MoeMLP": ("ernie4_5_moe", 2),
    "ApertusMLP": ("apertus", 2),
}
"""Parts that stay the module's own, with the family and their number."""


def fused(module: Any, bits: int = 16) -> PagedConfig:
    """The paged backend with fused layers, not tested."""
    config = candidates.page_layers(connect(), module, bits, ReferenceKernels)
    decoder = FusedDecoder(module, [layer.kernels for layer in config.layers], config.selection, layout=config.layout)
    return replace(config, decoder=decoder, pages=16, keep_prefixes=False, recurrences=RecurrentOperations())


def logits(config: PagedConfig, module: Any, size: int = 16) -> Any:
    """Of all tokens of the prompt, `size` at a time."""
    rows, found = Driven(config, module), []
    rows.admit("a")
    for start in range(0, len(PROMPT), size):
        tokens = PROMPT[start : start + size]
        found.append(rows.compute([segment("a", tokens, start, wants=len(tokens))], None).logits)
    rows.backend.close()
    return mx.concatenate([one for one in found if one is not None])


def own(module: Any) -> Any:
    return module(mx.array([PROMPT]), cache=connect().new_caches(module))[0]


def differs(found: Any, expected: Any) -> float:
    return float((mx.abs(found - expected).max() / mx.abs(expected).max()).item())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_logits_are_the_modules_own(name: str) -> None:
    module = make(name)
    expected = own(module)
    assert differs(logits(fused(module), module), expected) < 2e-5


HYBRIDS = {
    "granitemoehybrid": "2 GraniteMoeHybridMamba2Mixer, 3 GraniteMoeHybridMoE",
    "kimi_linear": "4 KimiSparseMoE",
    "lfm2": "",
    "lfm2_moe": "2 Lfm2MoeSparseMoeBlock",
    "nemotron_h": "2 NemotronHMamba2Mixer",
    "qwen3_5": "",
    "qwen3_next": "4 Qwen3NextSparseMoeBlock",
}
"""Families with recurrent layers, and the parts of a model that stay its own."""


@pytest.mark.parametrize("name", HYBRIDS)
def test_recurrent_layers_stay_the_modules_own_between_fused_ones(name: str) -> None:
    module = new_module(architectures.config_of(name))
    expected = own(module)
    config = fused(module)
    assert differs(logits(config, module), expected) < 1e-4
    assert config.decoder is not None
    assert config.decoder.own_parts == HYBRIDS[name]


@pytest.mark.parametrize("name", ["gemma3", "granite", "cohere2", "gpt_oss", "mixtral", "nemotron_h", "qwen3_5"])
def test_hidden_states_in_front_of_layers_are_the_modules_own(name: str) -> None:
    """Of prompts in chunks: in families that scale embeddings or branches, that add two branches at once, with mixtures
    and with recurrent layers."""
    module = make(name) if name in FAMILIES else new_module(architectures.config_of(name))
    config, found = fused(module), []
    assert config.selection is not None
    caches = connect().new_caches(module)
    tap_layers(module, config.selection, range(len(module.layers)))
    with keeping(config.selection, ...):
        module(mx.array([PROMPT]), cache=caches)
    expected, _ = config.selection.parts(config.selection.take())
    rows = Driven(config, module)
    rows.admit("a")
    for start in range(0, len(PROMPT), 16):
        tokens = PROMPT[start : start + 16]
        one = segment("a", tokens, start, wants=1, hidden=len(tokens), observed=True)
        done = rows.backend.compute(rows.known([one]), None, hidden=True)
        mx.eval(done.logits, done.arrays, done.hidden)
        found.append(done.hidden["a"])
    assert differs(mx.concatenate(found), expected) < 1e-4


def test_layers_with_several_caches_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, "falcon_h1", Family())
    with pytest.raises(NotImplementedError, match="several caches, or none"):
        fused(new_module(architectures.config_of("falcon_h1")))


@pytest.mark.parametrize("part", OWN)
def test_what_is_not_known_stays_the_modules_own(part: str) -> None:
    family, count = OWN[part]
    decoder = fused(make(family)).decoder
    assert decoder is not None
    assert decoder.own_parts == f"{count} {part}"


def test_gemma_4s_experts_are_beside_a_fused_mlp() -> None:
    decoder = fused(make("gemma4_text")).decoder
    assert decoder is not None
    assert decoder.own_parts == "2 Router, 2 Experts"


def test_every_family_is_tried() -> None:
    assert set(families.FAMILIES) == {name.split()[0] for name in FAMILIES} | set(HYBRIDS)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "no norms after the branches": ("glm4", {"norms": Norms()}),
    "one norm for both branches": ("llama", {"parallel": True}),
    "another activation": ("gemma", {"activation": Activation.SILU}),
    "no residual multiplier": ("granite", {"residual_scale": lambda model: 1.0}),
    "no embedding multiplier": ("granite", {"embedding_scale": lambda model: 1.0}),
    "no logit scale": ("cohere", {"logit_scale": lambda model: 1.0}),
    "rotation in all layers": ("cohere2", {"rotates": lambda attention: True}),
    "queries not scaled": ("ministral3", {"query_scale": None}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_fact_is_caught_by_the_self_test(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changed = WRONG[what]
    facts: Family = replace(families.FAMILIES[name], **changed)
    monkeypatch.setitem(families.FAMILIES, name, facts)
    module = make(name)
    rejected: list[Rejection] = []
    config = candidates.paged(
        Reference(connect(), module, 64), 1 << 24, rejected, keep_prefixes=False, kernels=ReferenceKernels
    )
    assert not config.fused
    assert (rejected[0].backend, rejected[0].failed) == ("fused layers", True)


PARTS = {
    "qwen3_next": {Part.DELTA_RULE: "gate_heads", Part.GATED_ATTENTION: "gate_heads"},
    "kimi_linear": {Part.LATENT_ATTENTION: "put_latents"},
    "deepseek_v3": {Part.LATENT_ATTENTION: "rotate_heads"},
}
"""Parts that have kernels of their own, and one of these."""


@pytest.mark.parametrize("name", PARTS)
def test_parts_whose_kernels_fail_are_left_to_the_module(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Other layers stay fused, and the reason is told."""
    module, rejected = new_module(architectures.config_of(name)), list[Rejection]()
    config = candidates.paged(
        Reference(connect(), module, 64),
        1 << 24,
        rejected,
        keep_prefixes=False,
        kernels=failing(*PARTS[name].values()),
        recurrences=RecurrentOperations,
        max_running=4,
    )
    assert config.decoder is not None
    assert config.fused
    assert not config.decoder.parts & PARTS[name].keys()
    (rejection,) = rejected
    assert rejection.failed
    assert all(part in rejection.reason for part in PARTS[name])
    assert "no kernel" in rejection.reason
    assert "slower" in caplog.text


@pytest.mark.parametrize("bits", [16, 8])
def test_linear_layers_that_differ_in_kind_are_computed_side_by_side(bits: int) -> None:
    """Values and the way down in more bits, as mixed quantizations have them; a bias for some; gates in 16 bits."""
    module = make("llama", attention_bias=False, hidden_size=128, intermediate_size=128)
    for layer in module.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        attention.q_proj.bias = mx.random.normal((128,))
        attention.v_proj = attention.v_proj.to_quantized(64, bits) if bits < 16 else attention.v_proj
        attention.q_proj = attention.q_proj.to_quantized(64, 4)
        mlp.up_proj = mlp.up_proj.to_quantized(32, 4, "mxfp4")
    expected = own(module)
    assert differs(logits(fused(module), module), expected) < 2e-5


def test_a_mixture_of_quantizations_keeps_what_agrees_together() -> None:
    module = make("qwen3", intermediate_size=128)

    def width(path: str, layer: Any) -> bool | dict[str, Any]:
        return {"group_size": 64, "bits": 8} if path.endswith("v_proj") else hasattr(layer, "to_quantized")

    nn.quantize(module, 64, 4, class_predicate=width)
    expected = own(module)
    decoder = fused(module).decoder
    assert decoder is not None
    attention: Any = decoder._steps[0].branch
    assert [product.way.bits for product in attention.qkv.products] == [4, 8]
    assert differs(logits(fused(module), module), expected) < 2e-5


def test_the_text_model_inside_of_another_is_fused() -> None:
    module = make("mistral3", text_config=config_of("llama"))
    assert differs(logits(fused(module), module), own(module)) < 2e-5


def test_layers_that_share_keys_and_values_are_refused() -> None:
    module = make("gemma4_text", num_kv_shared_layers=1, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises((NotImplementedError, Unsupported), match=r"share|attention"):
        fused(module)


@pytest.mark.parametrize("name", ["gemma3_text", "olmo2", "glm4", "cohere", "qwen3_moe"])
def test_keys_and_values_of_8_bits_change_little(name: str) -> None:
    module = make(name)
    expected = own(module)
    assert differs(logits(fused(module, bits=8), module), expected) < 0.1


class Halved(nn.RMSNorm):
    """A norm of no known class."""

    def __call__(self, x: Any) -> Any:
        return super().__call__(x) / 2


@pytest.mark.parametrize("place", ["input_layernorm", "post_attention_layernorm", "norm", "q_norm"])
def test_norms_of_unknown_classes_are_computed_by_the_module(place: str) -> None:
    module = make("qwen3")
    holders = {"norm": [module.model], "q_norm": [layer.self_attn for layer in module.layers]}
    for holder in holders.get(place, module.layers):
        norm = Halved(getattr(holder, place).weight.size, 1e-5)
        norm.weight = getattr(holder, place).weight
        setattr(holder, place, norm)
    expected = own(module)
    config = fused(module)
    assert config.decoder is not None
    assert config.decoder.own_parts == ("2 Attention" if place == "q_norm" else "")
    assert differs(logits(config, module), expected) < 2e-5


def test_widths_that_kernels_do_not_take_are_left_to_mlx() -> None:
    module = make("llama", hidden_size=132, intermediate_size=90, attention_bias=False)
    expected = own(module)
    config = fused(module)
    assert config.decoder is not None
    assert config.decoder.own_parts == "2 MLP"
    assert differs(logits(config, module), expected) < 2e-5


def loaded(name: str, kernels: type[ReferenceKernels] = ReferenceKernels) -> tuple[PagedConfig, FasterLayers]:
    """The quantized family's paged backend with faster layers, as on CUDA."""
    module = make(name, moe_intermediate_size=64, hidden_size=128)
    nn.quantize(module, 32, 4)
    reference = Reference(connect(), module, 64)
    layers = reference.layers = FasterLayers(module, "cuda", kernel=ReferenceKernel)
    config = candidates.paged(reference, 1 << 24, [], keep_prefixes=False, kernels=kernels)
    return config, layers


def test_parts_of_the_modules_own_have_faster_layers() -> None:
    config, layers = loaded("qwen2_moe")
    assert config.fused
    assert config.decoder is not None
    inside = [layer for module in config.decoder.own_modules for layer in module.modules()]
    linear = [layer for layer in inside if type(layer).__name__ == "QuantizedLinear"]
    assert sum(layers.labels.values()) == len(linear) == 2 * 5
    assert layers.installed


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "gemma4_text"])
def test_experts_are_added_up_where_their_sum_is_added(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the launch of the next norm, whose logits pass the backend's self-test."""
    module = make(name, dtype=mx.float16, moe_intermediate_size=64, hidden_size=128, num_experts_per_tok=2)
    nn.quantize(module, 32, 8, class_predicate=lambda path, layer: hasattr(layer, "to_quantized") and "mlp" in path)
    for layer in module.layers:
        if hasattr(layer, "experts"):
            nn.quantize(layer.experts, 32, 8)
    seen: set[int] = set()
    add_norm = LAUNCHES["add_norm"]

    def launched(launch: Launch) -> list[Any]:
        seen.add(launch.template["LINES"] + launch.template["OTHER_LINES"])
        return add_norm(launch)

    monkeypatch.setitem(LAUNCHES, "add_norm", launched)
    reference = Reference(connect(), module, 64)
    layers = reference.layers = FasterLayers(module, "cuda", kernel=ReferenceKernel)
    config = candidates.paged(reference, 1 << 24, [], keep_prefixes=False, kernels=ReferenceKernels)
    assert config.fused
    assert not layers.rejected
    assert seen == {0, 3 if name == "glm4_moe" else 2}


def test_all_layers_are_faster_ones_where_fused_layers_fail() -> None:
    config, layers = loaded("qwen2_moe", failing("rotate"))
    assert not config.fused
    assert sum(layers.labels.values()) == 2 * (5 + 4) + 2  # the head, and the table as one


def test_launches_of_another_graph_are_forgotten_at_both_ends_of_a_pass() -> None:
    """Branches side by side use one workspace in turn."""
    config = fused(make("cohere"))
    assert config.decoder is not None
    order = config.decoder._order
    assert order is not None
    order.last = mx.ones(7)
    logits(config, None)
    assert order.last.shape == (1,)
    decoder = fused(make("llama")).decoder
    assert decoder is not None
    assert decoder._order is None
