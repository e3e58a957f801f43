"""Models whose attention or positions mlx-lm computes in a way of their own, in the backends' own caches.

The choice of a backend holds its logits to mlx-lm's, in float32, for sequences in chunks and together.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.runner.backends import Driven, segment
from tests.runner.family_fidelity import WAYS, Judge
from tests.runner.family_paths import chosen
from tests.support.architectures import WINDOW, config_of, new_module
from treadle.runner.kv.backend import Unsupported
from treadle.runner.kv.cache_layout import CacheKind, CacheLayout
from treadle.runner.kv.contiguous.backend import ContiguousConfig
from treadle.runner.kv.cost import KvCost, kv_cost
from treadle.runner.kv.paged.backend import PagedConfig
from treadle.runner.loading.routed_layers import routed_layers
from treadle.runner.mlxlm import FETCHED, Window, can_trim, connect
from treadle.runner.recurrent.kernels import RecurrentKernels
from treadle.runner.recurrent.step import RecurrentPass

CHANGED: dict[str, dict[str, Any]] = {
    "afm7": {},
    "baichuan_m1": {},
    "gpt_bigcode": {},
    "iquestloopcoder": {},
    "llama4": {},
    "longcat_flash": {},
    "longcat_flash_ngram": {"emb_neighbor_num": 3},
    "nemotron-nas": {},
    "plamo": {"num_attention_heads": 8, "hidden_size": 512, "n_shared_head": 4},
    "plamo3": {},
    "rwkv7": {},
    "stablelm": {"qk_layernorm": True},
}
"""Fields that differ from those of the tests of all families."""


@pytest.mark.parametrize("architecture", CHANGED)
def test_it_is_served_from_sequences_own_buffers(architecture: str) -> None:
    model = chosen(config_of(architecture, **CHANGED[architecture]), "cpu")
    assert isinstance(model.choice.config, ContiguousConfig), model.choice.rejected


@pytest.mark.parametrize("architecture", ["deepseek_v32", "minimax_m3_vl"])
def test_attention_over_a_chosen_part_is_mlx_lms(architecture: str) -> None:
    """In prompts that are longer than what is chosen. Pages have no kernels for it."""
    model = chosen(config_of(architecture), "cuda")
    assert isinstance(model.choice.config, ContiguousConfig)
    assert model.choice.reason_against("paged") == "its attention looks at a chosen part of the tokens"
    assert not any(WAYS["together, chunked, preempted"](model, Judge(model, {})))


def test_what_was_chosen_by_all_is_all() -> None:
    """Sequences that choose nothing attend as usual, also beside one that chooses everything."""
    rows = Driven(ContiguousConfig([0], None, "cpu", KvCost(0, 0), keep_prefixes=False))
    for id_ in "ab":
        rows.admit(id_)
    rows.begin(rows.order([segment("a", (0,) * 8, 0), segment("b", (0,), 0)]))
    (layer,) = rows.backend.layers
    numbers = mx.random.normal((9, 1, 1, 4), key=mx.random.key(1))
    layer.update_and_fetch(numbers, numbers)
    assert layer.choices(lambda queries, keys: None, numbers) is None
    choices = layer.choices(lambda queries, keys: None if keys.shape[2] == 1 else mx.tri(8, dtype=mx.bool_), numbers)
    assert [choice is None for choice in choices] == [True, False]
    usual = layer.attend(numbers, None, None, 0.5, 0, None)
    assert mx.allclose(layer.attend_chosen(numbers, 0.5, choices), usual, atol=1e-5).item()


def test_chunks_of_attention_are_windows_of_pages() -> None:
    """The layers that see all tokens have pages of their own."""
    config = chosen(config_of("llama4"), "cuda").choice.config
    assert isinstance(config, PagedConfig)
    assert [layer.chunked for layer in config.layers] == [True, True, True, False]
    assert config.windows == [WINDOW]


def test_chunks_that_begin_inside_of_a_page_have_no_pages() -> None:
    choice = chosen({**config_of("llama4"), "text_config": _llama4(attention_chunk_size=40)}, "cuda").choice
    assert isinstance(choice.config, ContiguousConfig)
    assert "chunks of 40 tokens" in choice.reason_against("paged")


def test_a_cache_of_chunks_costs_a_chunk_and_can_not_be_trimmed() -> None:
    library = connect()
    module = new_module(config_of("llama4"))
    caches = library.new_caches(module)
    mx.eval(module(mx.array([[1] * 6]), cache=caches))
    every = [leaf.nbytes // leaf.keys.shape[2] for leaf in caches]
    assert kv_cost(caches, 6, 2048).row_bytes == sum(every[:3]) * WINDOW + every[3] * 128
    assert kv_cost(caches, 6, 2048).token_bytes == every[3]
    assert not can_trim(caches)
    assert can_trim(caches[3:])


def test_sliding_caches_keep_what_the_masks_show() -> None:
    """PLaMo 3's masks show a token more than mlx-lm's caches keep. In a prompt the last token sees all of them."""
    library, tokens = connect(), list(range(1, WINDOW + 9))
    windows = {name: library.windows_of_caches(new_module(config_of(name))) for name in ("plamo3", "gemma3_text")}
    assert windows == {"plamo3": [WINDOW + 1], "gemma3_text": [WINDOW]}
    module = new_module(config_of("plamo3"))
    whole = module(mx.array([tokens]), cache=library.new_caches(module))[0, -1]
    caches = library.new_caches(module)
    module(mx.array([tokens[:-1]]), cache=caches)
    assert mx.allclose(module(mx.array([tokens[-1:]]), cache=caches)[0, -1], whole, atol=1e-3).item()


def test_a_recurrence_by_the_models_own_function_is_no_kernel() -> None:
    choice = chosen(config_of("rwkv7"), "cuda").choice
    assert isinstance(choice.config, ContiguousConfig)
    assert choice.reason_against("paged") == "there is no kernel for its recurrence"
    with pytest.raises(Unsupported, match="no kernel"):
        RecurrentKernels().apply(None, [], None, RecurrentPass())


def test_heads_are_mixed_with_those_of_the_token_before() -> None:
    """Slots or none: a sequence's first token has nothing before it."""
    module = new_module(config_of("baichuan_m1"))
    assert connect().recurrent_states(module)
    attention = module.layers[0].self_attn
    keys = mx.random.normal((1, 1, attention.num_kv_heads * attention.head_dim), key=mx.random.key(1))
    mixed, _ = attention.mixed_heads
    heads = keys.reshape(1, 1, attention.num_kv_heads, -1).transpose(0, 2, 1, 3)
    wanted = attention._custom_convolution(heads, attention.conv_k)
    assert mx.allclose(mixed(keys, None).reshape(wanted.shape), wanted, atol=1e-5).item()


def test_attention_that_mlx_lm_computes_wrongly_is_left_to_it() -> None:
    """Phi 3 small's first logits change with its prompt's last token; once they do not, it can be routed."""
    library, first = connect(), []
    module = new_module(config_of("phi3small"))
    for last in (5, 6):
        caches = library.new_caches(module)
        first.append(module(mx.array([[1, 2, 3, 4, last]]), cache=caches)[0, 0, :260])
    assert not mx.allclose(first[0], first[1], atol=1e-3).item()
    with pytest.raises(Unsupported, match="see those behind them"):
        routed_layers(library, module)


def test_layers_without_attention_have_no_buffers() -> None:
    choice = chosen(config_of("nemotron-nas"), "cpu").choice
    assert isinstance(choice.config, ContiguousConfig)
    assert choice.config.windows == [0, 0]


def test_a_cache_that_is_not_used_gives_the_mask_of_others() -> None:
    layout = CacheLayout([CacheKind.UNUSED, CacheKind.ATTENTION, CacheKind.RECURRENT], [0, 2])
    unused, (attention, recurrent) = layout.caches("a", "r")
    assert (attention, recurrent) == ("a", "r")
    assert unused.make_mask(1) is None
    assert unused.make_mask(1, window_size=4) == Window(4)


def _llama4(**changed: Any) -> dict[str, Any]:
    return {**config_of("llama4")["text_config"], **changed}


@pytest.mark.parametrize("architecture", ["gpt_bigcode", "llama4", "rwkv7", "stablelm"])
def test_mlx_lms_caches_are_served_as_before(architecture: str) -> None:
    library, logits = connect(), []
    for routes in (False, True):
        module = new_module(config_of(architecture))
        if routes:
            library.route_attention(module)
            library.recurrent_states(module)
        caches = library.new_caches(module)
        logits += [module(mx.array([[1, 2, 3]]), cache=caches), module(mx.array([[4]]), cache=caches)]
    assert all(mx.array_equal(*pair) for pair in zip(logits[:2], logits[2:], strict=True))


def test_keys_that_a_cache_returned_before_are_not_taken_for_others() -> None:
    """A cache that returns keys twice in a pass still has the first: their identity would be given to new arrays."""
    cache = object()
    try:
        FETCHED.put(cache, mx.zeros(1), mx.zeros(1))
        FETCHED.put(cache, mx.zeros(1), mx.zeros(1))
        others = [mx.zeros(1) for _ in range(100)]
        assert not any(FETCHED.cache_of(one) is cache for one in others)
    finally:
        FETCHED.clear()


def test_attention_is_routed_once_and_positions_are_no_attention() -> None:
    module = new_module(config_of("gpt_bigcode"))
    assert connect().route_attention(module)
    kinds = [type(one) for one in module.modules()]
    assert connect().route_attention(module)
    assert [type(one) for one in module.modules()] == kinds
