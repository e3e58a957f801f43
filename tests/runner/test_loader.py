"""From a folder to a model in memory: what is measured, what is refused, and in which words."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from llguidance import LLTokenizer
from msgspec.structs import replace

from tests.runner.conftest import Tiny
from tests.runner.drive import run_alone
from tests.support.architectures import config_of, make_folder
from tests.support.tiny import make_tiny
from treadle.core.capabilities import Capabilities, SpeculationCapabilities, StepCapabilities
from treadle.core.grammar_state import PENDING, READY, GrammarState
from treadle.core.messages import Constraint, Submit
from treadle.errors import ConfigError, ModelError
from treadle.grammar.vocabulary import VocabularyThread, read_vocabulary
from treadle.runner.build import build
from treadle.runner.device import memory
from treadle.runner.device.blas import BlasReport
from treadle.runner.kv.padded.cached_model import CachedModel
from treadle.runner.loading import loader, weights
from treadle.runner.loading.draft_costs import TOKENS
from treadle.runner.loading.load_errors import model_errors
from treadle.runner.loading.loader import load
from treadle.runner.model_runner import ModelRunner
from treadle.units import size


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def converted(folder: Path, target: Path, **options: Any) -> Path:
    """The model in `folder` as another dtype, or quantized."""
    from treadle.runner.mlxlm import connect

    connect()
    from mlx_lm.utils import load_config, load_model, quantize_model, save_config, save_model

    model, config = load_model(folder)[0], load_config(folder)
    if dtype := options.get("dtype"):
        model.set_dtype(dtype)
    if bits := options.get("bits"):
        way = {name: value for name, value in options.items() if name not in ("dtype", "bits")}
        way.setdefault("group_size", 32)
        model, config = quantize_model(model, config, bits=bits, **way)
    target.mkdir()
    save_model(target, model)
    save_config(config, target / "config.json")
    return target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "tiny")


# What is measured ---------------------------------------------------------------------------------------------------


def test_capabilities_are_those_of_the_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    stages: list[str] = []
    blas = BlasReport("OpenBLAS", 2, warning="too many threads")
    runner = build(folder, name="mine", memory=1 << 20, blas=blas, progress=stages.append)
    assert "too many threads" in caplog.text
    can = runner.capabilities()
    assert (can.model, can.architecture, can.vocabulary, can.context) == ("mine", "llama", 261, 2048)
    assert (can.dtype, can.parameters * 4, can.path) == ("float32", can.weight_bytes, "batched")
    assert can.kv.budget_bytes == 1 << 20
    assert can.details["blas"] == str(blas)
    assert {"device", "mlx", "mlx-lm"} < can.details.keys()
    assert stages == ["loading mlx-lm", "reading the weights", "measuring the model"]


def test_a_runner_compiles_grammars_where_it_has_a_vocabulary(folder: Path) -> None:
    stages: list[str] = []
    reads = VocabularyThread(lambda: read_vocabulary(folder / "tokenizer.json", size=261))
    runner = build(folder, vocabulary=reads, progress=stages.append)
    assert stages[-1] == "reading the vocabulary"
    assert runner.capabilities().details["structured output"] == "llguidance"
    compiled, constraint = threading.Event(), Constraint(kind="lark", grammar="start: /a+/")
    runner.notify_grammars(compiled.set)
    assert runner.grammar_state(constraint) is PENDING
    assert compiled.wait(60)
    assert runner.grammar_state(constraint) is READY
    assert runner.statistics().grammars.compiled == 1
    runner.close()


@pytest.mark.parametrize("reads", [None, ModelError("no decoder")])
def test_a_runner_without_a_vocabulary_refuses_grammars_with_the_reason(
    folder: Path, caplog: pytest.LogCaptureFixture, reads: ModelError | None
) -> None:
    def refuse() -> LLTokenizer:
        raise ModelError("no decoder")

    runner = build(folder, vocabulary=None if reads is None else VocabularyThread(refuse))
    status = runner.grammar_state(Constraint(kind="lark", grammar="start: /a+/"))
    assert status.state is GrammarState.FAILED
    reason = "structured output is off on this server" if reads is None else "no structured output: no decoder"
    assert reason in status.message
    assert runner.capabilities().details["structured output"] == status.message
    assert ("and requests for it are refused: no decoder" in caplog.text) == (reads is not None)
    runner.close()


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3_moe"])
def test_the_cost_of_the_cache_is_what_it_comes_to(tmp_path: Path, architecture: Any) -> None:
    model = load(make_tiny(tmp_path / "m", architecture=architecture))
    for length in (5, 300, 1500):
        cached = CachedModel(model.module, model.library)
        caches = cached.new_caches()
        cached.prefill([1] * (length - 1), caches)
        mx.eval(cached.decode(mx.array([1]), caches))  # a window keeps a whole chunk until then
        held = sum(cache.nbytes for cache in caches)
        assert abs(held - model.kv.row_bytes - length * model.kv.token_bytes) <= model.kv.row_bytes


def test_a_window_as_long_as_the_context_counts_by_token(tmp_path: Path) -> None:
    short = load(make_tiny(tmp_path / "short", architecture="gemma3", context=2048, sliding_window=32))
    whole = load(make_tiny(tmp_path / "whole", architecture="gemma3", context=2048, sliding_window=2048))
    assert whole.kv.token_bytes == 2 * short.kv.token_bytes


def test_the_default_budget_is_a_share_of_what_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_available_bytes", lambda: 1000 << 20)
    mx.clear_cache()  # what other tests freed is left, too
    budget = load(folder).kv_budget_bytes
    assert budget == pytest.approx(500 << 20, rel=0.02)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_the_cpu_computes_in_float32(folder: Path, tmp_path: Path, dtype: mx.Dtype) -> None:
    """Half precision does not go through BLAS there."""
    model = load(converted(folder, tmp_path / "half", dtype=dtype))
    assert (model.dtype, model.weight_bytes) == ("float32", 4 * model.parameters)


@pytest.mark.parametrize("room", [True, False])
def test_quantized_models_run_and_are_unpacked_on_the_cpu_when_there_is_room(
    folder: Path, tmp_path: Path, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = converted(folder, tmp_path / "packed", bits=8)
    monkeypatch.setattr(memory, "host_available_bytes", lambda: 1 << 30 if room else 600_000)
    model = load(target)
    assert model.details["quantization"] == "8 bits, groups of 32"
    assert model.dtype == "float32"
    assert (model.weight_bytes == 4 * model.parameters) is room
    request = Submit(id="a", prompt=(10, 20, 30), max_tokens=8)
    logits = np.array(model.module(mx.array([request.prompt]))[0, -1])
    assert run_alone(ModelRunner(model), request)[0] == int(logits.argmax())


@pytest.mark.parametrize("room", [True, False])
def test_experts_with_a_scale_each_are_unpacked_on_the_cpu_with_it(
    tmp_path: Path, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm's way to dequantize forgets the scales, and its layers have no code for them on CPUs."""
    folder = make_tiny(tmp_path / "experts", architecture="qwen3_moe")
    way = {"bits": 4, "group_size": 16, "mode": "nvfp4"}
    plain, scaled = (
        converted(folder, tmp_path / str(own), **way, quant_predicate=lambda path, _: "switch_mlp" in path, **more)
        for own, more in ((False, {}), (True, {"global_scale": True}))
    )
    monkeypatch.setattr(memory, "host_available_bytes", lambda: 1 << 30 if room else 600_000)
    tokens = mx.array([[10, 20, 30]])
    exact, expected, found = (load(one).module(tokens) for one in (folder, plain, scaled))
    noise, usual = (float(mx.abs(one - exact).max()) for one in (found, expected))
    assert noise < 2 * usual


@pytest.mark.parametrize("architecture", ["gpt_oss", "exaone_moe", "step3p5"])
def test_experts_with_a_scale_each_are_unpacked_before_a_model_with_windows_is_run(
    tmp_path: Path, architecture: str
) -> None:
    """Its code is asked for the windows of its masks, and would compute with experts that CPUs have no code for."""
    folder = converted(
        make_folder(tmp_path / "experts", config_of(architecture)),
        tmp_path / "scaled",
        bits=4,
        group_size=16,
        mode="nvfp4",
        global_scale=True,
    )
    assert load(folder, memory=1 << 25).dtype == "float32"


@pytest.mark.parametrize(("mode", "bits", "group"), [("nvfp4", 4, 16), ("mxfp8", 8, 32), ("affine", 4, 32)])
def test_activations_are_not_quantized_and_status_says_so(
    folder: Path, tmp_path: Path, mode: str, bits: int, group: int
) -> None:
    """mlx-lm's layers that quantize activations have no code for CPUs, nor for weights in other modes."""
    plain = converted(folder, tmp_path / "plain", bits=bits, group_size=group, mode=mode)
    asked = shutil.copytree(plain, tmp_path / "asked")
    edit_config(asked, quantize_activations=True)
    without, model = load(plain), load(asked)
    assert "activations" not in without.details
    assert model.details["activations"] == "not quantized, though config.json asks for it"
    named = "" if mode == "affine" else f", {mode}"
    assert model.details["quantization"] == f"{bits} bits, groups of {group}{named}"
    tokens = mx.array([[10, 20, 30]])
    assert mx.array_equal(model.module(tokens), without.module(tokens))


def test_activations_of_single_layers_are_not_quantized_either(folder: Path, tmp_path: Path) -> None:
    plain = converted(folder, tmp_path / "plain", bits=4, group_size=16, mode="nvfp4")
    asked = shutil.copytree(plain, tmp_path / "asked")
    way = {"bits": 4, "group_size": 16, "mode": "nvfp4"}
    edit_config(asked, quantization={**way, "lm_head": {**way, "quantize_input": True}})
    without, model = load(plain), load(asked)
    assert model.details["activations"] == "not quantized, though config.json asks for it"
    assert model.details["quantization"] == without.details["quantization"]
    tokens = mx.array([[10, 20, 30]])
    assert mx.array_equal(model.module(tokens), without.module(tokens))


def test_a_key_of_a_quantized_layer_that_mlx_does_not_know_is_named(folder: Path, tmp_path: Path) -> None:
    broken = converted(folder, tmp_path / "broken", bits=4)
    way = {"bits": 4, "group_size": 32}
    edit_config(broken, quantization={**way, "lm_head": {**way, "symmetric": True}, "model.embed_tokens": way})
    with pytest.raises(ModelError, match=r"broken \(quantization of lm_head has symmetric, unknown to MLX\)"):
        load(broken)


def test_a_quantization_that_is_mixed_is_told(folder: Path, tmp_path: Path) -> None:
    own = {"bits": 8, "group_size": 64}
    mixed = converted(
        folder, tmp_path / "mixed", bits=4, quant_predicate=lambda path, _: own if "mlp" in path else True
    )
    assert load(mixed).details["quantization"] == "4 bits, groups of 32, some layers otherwise"


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"bits": 8}, {"bits": 4}),
        ({"bits": 4}, {"group_size": 64}),
        ({"bits": 4, "mode": "mxfp4"}, {"mode": "affine"}),
        ({"bits": 4, "mode": "nvfp4", "group_size": 16}, {"mode": "mxfp4", "group_size": 32}),
    ],
)
def test_the_quantization_that_is_told_is_that_of_the_tensors(
    folder: Path, tmp_path: Path, stored: dict[str, Any], said: dict[str, Any]
) -> None:
    """mlx-lm reads them as they are, whatever config.json says."""
    honest = converted(folder, tmp_path / "honest", **stored)
    lying = shutil.copytree(honest, tmp_path / "lying")
    edit_config(lying, quantization={**json.loads((lying / "config.json").read_text())["quantization"], **said})
    model, lied = load(honest), load(lying)
    assert model.details["quantization"] == lied.details["quantization"]
    assert lied.details["quantization"].startswith(f"{stored['bits']} bits, groups of {stored.get('group_size', 32)}")
    tokens = mx.array([[10, 20, 30]])
    assert mx.array_equal(lied.module(tokens), model.module(tokens))


@pytest.mark.parametrize(
    ("mode", "name", "dtype", "wanted"),
    [
        ("affine", "weight", mx.int32, "uint32"),
        ("affine", "scales", mx.int32, "numbers with a fraction"),
        ("affine", "biases", mx.uint8, "numbers with a fraction"),
        ("mxfp4", "scales", mx.float32, "uint8"),
    ],
)
def test_quantized_tensors_of_another_type_are_refused(
    folder: Path, tmp_path: Path, mode: str, name: str, dtype: mx.Dtype, wanted: str
) -> None:
    """MLX computes with scales of any type."""
    broken = converted(folder, tmp_path / "broken", bits=4, mode=mode)
    own = {"bits": 4, "group_size": 32, "mode": mode}
    edit_config(broken, quantization={**own, "lm_head": own})
    tensors: Any = mx.load(str(broken / "model.safetensors"))
    tensors[f"lm_head.{name}"] = tensors[f"lm_head.{name}"].astype(dtype)
    mx.save_safetensors(str(broken / "model.safetensors"), tensors, metadata={"format": "mlx"})
    stored = str(dtype).removeprefix("mlx.core.")
    words = f"lm_head.{name} is stored as {stored}, where MLX's quantization ({mode}) has {wanted}: download it again"
    with pytest.raises(ModelError, match=re.escape(words)):
        load(broken)


def test_weights_are_unpacked_on_the_cpu_without_rounding(folder: Path, tmp_path: Path) -> None:
    """Scales in bfloat16 would give weights in bfloat16."""
    from treadle.runner.mlxlm import connect

    library = connect()
    module, _ = library.load(converted(folder, tmp_path / "quantized", dtype=mx.bfloat16, bits=4))
    weight, scales, biases = (getattr(module.lm_head, name) for name in ("weight", "scales", "biases"))
    assert scales.dtype == mx.bfloat16
    exact = mx.dequantize(weight, scales.astype(mx.float32), biases.astype(mx.float32), group_size=32, bits=4)
    unpacked = weights.for_device(module, library, library.parameters(module), "cpu")
    assert mx.array_equal(unpacked.lm_head.weight, exact)


def test_other_devices_keep_the_models_dtype(folder: Path, tmp_path: Path) -> None:
    from treadle.runner.mlxlm import connect

    library = connect()
    module, _ = library.load(converted(folder, tmp_path / "half", dtype=mx.bfloat16))
    kept = weights.for_device(module, library, library.parameters(module), "metal")
    assert weights.dtype_of(kept) == "bfloat16"


# The context --------------------------------------------------------------------------------------------------------


def test_the_context_can_be_shortened_but_not_stretched(folder: Path) -> None:
    assert load(folder, context=100).context == 100
    with pytest.raises(ConfigError, match="`context` is 4096, and tiny is made for 2048 tokens"):
        load(folder, context=4096)


def test_a_context_that_config_does_not_give_is_assumed_and_said(folder: Path) -> None:
    edit_config(folder, max_position_embeddings=None)
    model = load(folder)
    assert model.context == loader.UNKNOWN_CONTEXT
    assert "assumed" in model.details["context"]
    assert load(folder, context=100_000).context == 100_000


# What is refused ----------------------------------------------------------------------------------------------------


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def tear_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text()[:40])


def tear_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def tear_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def other_architecture(folder: Path) -> None:
    edit_config(folder, model_type="hal9000")


def other_shape(folder: Path) -> None:
    edit_config(folder, hidden_size=96)


def missing_layer(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)


def nonsense(folder: Path) -> None:
    edit_config(folder, num_attention_heads="many")


def unknown_rotation(folder: Path) -> None:
    edit_config(folder, rope_scaling={"rope_type": "spiral", "factor": 2.0})


def missing_argument(folder: Path) -> None:
    edit_config(folder, num_attention_heads=None)


def wants_code(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    edit_config(folder, model_file="evil.py")


SPOILERS: dict[Callable[[Path], None], str] = {
    remove_config: "not a model folder",
    remove_weights: "No safetensors",
    tear_config: "torn or not JSON",
    tear_weights: "can't be read|do not agree",
    tear_header: "can't be read|do not agree",
    empty_weights: "can't be read|do not agree",
    other_architecture: "hal9000 not supported",
    other_shape: "do not agree",
    missing_layer: "do not agree",
    nonsense: "num_attention_heads is",
    unknown_rotation: "spiral.*; download it again",
    missing_argument: "num_attention_heads is missing",
    wants_code: "custom module",
}


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
def test_a_folder_that_cannot_be_loaded_is_one_line_that_names_it(folder: Path, spoil: Callable[[Path], None]) -> None:
    spoil(folder)
    with pytest.raises(ModelError, match=SPOILERS[spoil]) as caught:
        load(folder)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 600
    assert folder.name in caught.value.message


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a model folder"):
        load(tmp_path / "nothing")


def test_weights_that_do_not_fit_into_memory_are_refused_before_they_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "usable_bytes", lambda kind: 1000)
    with pytest.raises(ModelError, match="use a smaller or a quantized model"):
        load(folder)


def test_a_budget_too_small_for_the_rows_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="lower `max_running`, or give more `memory`"):
        build(folder, memory=1000, max_running=4)
    with pytest.raises(ConfigError, match=r"are left beside the weights: give at most that"):
        build(folder, memory=1 << 50)


@pytest.mark.parametrize("padded", [False, True])
def test_the_least_budget_holds_what_is_given_out_at_once(
    folder: Path, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers grow by 256 tokens, mlx-lm's caches by as many as are put in."""
    monkeypatch.setattr("treadle.runner.build.load", lambda *args, **kwargs: load(*args, padded=padded, **kwargs))
    kv = load(folder).kv
    least = 4 * kv.row_bytes + kv.token_bytes * (1 if padded else 256)
    with pytest.raises(ConfigError, match=f"needs {size(least)} of cache"):
        build(folder, memory=least - 1, max_running=4)
    assert build(folder, memory=least, max_running=4).capabilities().kv.blocks == int(not padded)


def test_drafts_that_have_to_be_verified_and_cannot_be_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    can = SpeculationCapabilities(reason="its states can't be cut")
    given = Capabilities("m", "a", 1, 1, "cpu", "float32", steps=StepCapabilities(speculation=can))
    monkeypatch.setattr(ModelRunner, "capabilities", lambda runner: given)
    with pytest.raises(ConfigError, match=r"is lookup, and tiny can't verify .*: its states can't be cut; give auto"):
        build(folder, speculate="lookup")
    build(folder, speculate="auto")
    able = replace(given, steps=StepCapabilities(speculation=SpeculationCapabilities(drafters=("lookup",))))
    monkeypatch.setattr(ModelRunner, "capabilities", lambda runner: able)
    build(folder, speculate="lookup")
    build(folder, speculate="lookup", context=TOKENS + 1)
    build(folder, speculate="auto", context=TOKENS)
    with pytest.raises(ConfigError, match=r"is lookup, .*: in a context of 96 tokens or less their cost"):
        build(folder, speculate="lookup", context=TOKENS)


def test_rotations_are_read_where_transformers_5_writes_them(folder: Path) -> None:
    """mlx-lm would take a Llama's default for them without a word."""
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled["original_max_position_embeddings"] = 64
    request = Submit(id="a", prompt=tuple(range(40)), max_tokens=20)
    answers = []
    for fields in (
        {},
        {"rope_theta": 500.0, "rope_scaling": scaled},
        {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_theta": 500.0, **scaled}},
    ):
        edit_config(folder, **fields)
        answers.append(run_alone(ModelRunner(load(folder)), request))
    plain, older, later = answers
    assert older == later != plain


def test_no_tokenizer_is_needed(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert load(folder).vocabulary == 261


def test_several_weight_files_are_one_model(folder: Path, tmp_path: Path) -> None:
    weights: Any = mx.load(str(folder / "model.safetensors"))
    names = sorted(weights)
    split = tmp_path / "split"
    split.mkdir()
    shutil.copy(folder / "config.json", split)
    for i, part in enumerate((names[:5], names[5:])):
        mx.save_safetensors(str(split / f"model-{i}.safetensors"), {name: weights[name] for name in part})
    request = Submit(id="a", prompt=(1, 2), max_tokens=5)
    assert run_alone(ModelRunner(load(split)), request) == run_alone(ModelRunner(load(folder)), request)


@pytest.mark.parametrize(
    ("bits", "why"),
    [
        (8, "only the CUDA kernels read keys and values of 8 bits .* is cpu"),
        (4, "4 bits change what a model says"),
    ],
)
def test_quantized_keys_and_values_are_refused_by_name(tmp_path: Path, bits: int, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{why}.*leave `kv_bits` out") as caught:
        build(make_tiny(tmp_path / "model"), kv_bits=bits)
    assert caught.value.param == "kv_bits"


NO_CUDA = ("paged", "its kernels are for CUDA, and this is cpu")


@pytest.mark.parametrize(
    ("family", "padded", "backend", "rejected"),
    [
        ("llama", False, "contiguous", [NO_CUDA]),
        ("llama", True, "padded", [("paged", "not asked for"), ("contiguous", "not asked for")]),
        ("mamba", False, "contiguous", [NO_CUDA]),
        (
            "deepseek_v41",
            False,
            "serial",
            [
                NO_CUDA,
                ("contiguous", "it keeps more than keys, values and recurrent states"),
                ("padded", "its caches can't be merged (LayerCache)"),
            ],
        ),
    ],
)
def test_a_choice_keeps_the_reasons_against_better_backends(
    tiny: Tiny, family: str, padded: bool, backend: str, rejected: list[tuple[str, str]]
) -> None:
    choice = tiny(family, padded=padded).choice
    assert choice.config.name == backend
    assert [(one.backend, one.reason) for one in choice.rejected] == rejected
    assert choice.reason_against("paged") == rejected[0][1]
    assert choice.reason_against("fused layers") == ""


def test_a_fault_of_the_device_is_not_called_one_of_the_weights(tmp_path: Path) -> None:
    """A kernel that faulted in its self-test leaves a device that nothing else runs on."""
    fault = "cudaStreamSynchronize(free_streams_[i]) failed: misaligned address"
    with pytest.raises(ModelError, match=r"the device failed while .* misaligned address; .*--kernels off"):
        _raise(tmp_path, fault)
    with pytest.raises(ModelError, match=r"the weights in .* can't be read: no such tensor"):
        _raise(tmp_path, "no such tensor")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"TMPDIR": "/none", "TMP": "/tmp"}, "TMPDIR is /none: set TMPDIR to a folder that exists"),
        ({"TMP": "/none"}, "TMP is /none: set TMPDIR to"),
        ({}, "TMPDIR is not set, which means /tmp: set TMPDIR to"),
    ],
)
def test_a_missing_folder_of_temporary_files_is_not_called_broken_weights(
    tmp_path: Path, given: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for fault in ("temp_directory_path: No such file or directory", "cannot create directories: Not a directory [/x]"):
        with pytest.raises(ModelError, match=f"MLX has no folder .*{told}") as raised:
            _raise(tmp_path, f"filesystem error: {fault}")
        assert "download" not in raised.value.message


def _raise(folder: Path, message: str) -> None:
    with model_errors(folder):
        raise RuntimeError(message)
