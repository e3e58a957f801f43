"""The probe's child may do anything: answer, crash, hang, chatter. The parent always gets an answer of its own."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx.utils import tree_flatten

from tests.runner.families import make_family
from tests.support.architectures import config_of, make_folder, new_module
from tests.support.fp8_models import by_tensor, write
from tests.support.mtp_models import tensors
from tests.support.tiny import make_tiny
from treadle.cli.device_probe import ProbeRequest, ProbeResult, probe
from treadle.cli.estimate import estimate
from treadle.errors import ConfigError, spell
from treadle.runner.build import build
from treadle.runner.device import memory
from treadle.runner.loading.loader import load


def probe_script(script: str, *, folder: str | None = None, timeout_s: float = 30.0) -> ProbeResult:
    return probe(ProbeRequest(folder=folder), command=(sys.executable, "-c", script), timeout_s=timeout_s)


def say(*names: str) -> str:
    return "".join(f'print(\'{{"part": "{name}"}}\', flush=True)\n' for name in names)


def test_a_crash_is_reported_with_what_came_before_and_the_last_words() -> None:
    result = probe_script("import os, sys\n" + say("blas") + "print('a\\nmetal says no', file=sys.stderr)\nos.abort()")
    assert set(result.parts) == {"blas"}
    assert "SIGABRT" in result.ended
    assert result.last_line.endswith("metal says no")


def test_a_hang_is_bounded() -> None:
    result = probe_script(say("blas", "mlx") + "import threading; threading.Event().wait()", timeout_s=1.0)
    assert set(result.parts) == {"blas", "mlx"}
    assert result.ended == "no answer within 1 s"


def test_a_hang_in_a_grandchild_that_holds_the_pipes_is_bounded() -> None:
    script = (
        "import subprocess, sys\n"
        "wait = 'import threading; threading.Event().wait()'\n"
        "subprocess.run([sys.executable, '-c', wait])"
    )
    assert probe_script(script, timeout_s=1.0).ended == "no answer within 1 s"


def test_an_early_clean_exit_is_no_answer() -> None:
    assert probe_script(say("blas", "mlx")).ended == "the process that asked it ended: exit code 0"


def test_lines_that_are_no_answer_are_passed_over() -> None:
    result = probe_script("print('hello'); print('[1]'); print('{}'); print('3')\n" + say("blas", "mlx", "mlx-lm"))
    assert set(result.parts) == {"blas", "mlx", "mlx-lm"}
    assert result.ended == ""


def test_what_mlx_can_not_do_ends_the_answer_without_being_a_crash() -> None:
    result = probe_script(say("blas") + 'print(\'{"part": "mlx", "error": "no device"}\')')
    assert result.ended == ""
    assert result.parts["mlx"] == {"error": "no device"}


@pytest.fixture(scope="module")
def real() -> ProbeResult:
    """The real child's, of no model."""
    return probe(ProbeRequest(threads=1))


def test_the_real_child_knows_the_device_and_the_adapter(real: ProbeResult) -> None:
    assert real.ended == ""
    assert set(real.parts) == {"blas", "mlx", "mlx-lm"}
    assert real.parts["mlx"]["kind"] in ("cpu", "metal", "cuda")
    assert real.parts["mlx"]["usable_bytes"] > 0
    assert "error" not in real.parts["mlx-lm"]


def test_threads_reach_the_blas(real: ProbeResult) -> None:
    blas = real.parts["blas"]
    assert blas["threads"] in (0, 1)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_estimate_is_what_then_runs(tmp_path: Path, architecture: str) -> None:
    folder = make_tiny(tmp_path / "model", architecture=architecture, context=512)  # type: ignore[arg-type]
    estimate = probe(ProbeRequest(folder=str(folder))).parts["model"]
    runner = build(str(folder))
    can = msgspec.to_builtins(runner.capabilities())
    runner.close()
    for name in ("architecture", "parameters", "dtype", "weight_bytes", "context"):
        assert estimate[name] == can[name], name
    assert (estimate["kv_token_bytes"], estimate["kv_row_bytes"]) == (can["kv"]["token_bytes"], can["kv"]["row_bytes"])


@pytest.mark.parametrize("free", [0, 1 << 40], ids=["stays quantized", "is unpacked"])
def test_the_estimate_of_a_quantized_model_is_what_the_start_makes_of_it(
    tmp_path: Path, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacked it would not fit where it still runs as it is."""
    from mlx_lm.utils import quantize_model

    monkeypatch.setattr(memory, "host_available_bytes", lambda: free)
    module = new_module(config_of("qwen3_moe"))
    module, config = quantize_model(module, config_of("qwen3_moe"), 32, 4)
    weights = dict(tree_flatten(module.parameters()))
    mx.save_safetensors(str(make_tiny(tmp_path) / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = estimate(ProbeRequest(folder=str(tmp_path)), "cpu", 1 << 34)
    monkeypatch.setattr(memory, "usable_bytes", lambda kind: 1 << 34)
    model = load(tmp_path, memory=1 << 25)
    assert found.weight_bytes == model.weight_bytes
    assert (found.dtype, found.parameters) == (model.dtype, model.parameters)
    assert (found.weight_bytes < found.parameters) == (free == 0)


def test_weights_that_are_converted_count_as_what_they_become(tmp_path: Path) -> None:
    """FP8 becomes bfloat16, of twice the bytes in the files."""
    config = config_of("llama")
    make_tiny(tmp_path)
    weights = {
        name: array.astype(mx.bfloat16) for name, array in tensors(make_folder(tmp_path / "own", config)).items()
    }
    name = "model.layers.0.mlp.up_proj.weight"
    stored, scale = by_tensor(weights[name])
    write(tmp_path, {**weights, name: stored, f"{name}_scale_inv": scale}, config)
    found = estimate(ProbeRequest(folder=str(tmp_path)), "metal", 1 << 34)
    assert (found.dtype, found.weight_bytes) == ("bfloat16", 2 * found.parameters)


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"norm_topk_prob": "false"}, 'norm_topk_prob is "false"'), ({"num_experts_per_tok": None}, "per_tok is null")],
)
def test_what_the_start_refuses_after_reading_is_refused_before(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    make_tiny(tmp_path, architecture="qwen3_moe")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    assert words in probe(ProbeRequest(folder=str(tmp_path))).parts["model"]["error"]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next", "mamba", "deepseek_v41"])
def test_the_memory_is_what_the_start_asks_for(tmp_path: Path, architecture: str) -> None:
    """Half a step of each buffer, windows, a second recurrent state to go back to; also in mlx-lm's caches."""
    folder = make_folder(make_tiny(tmp_path), config_of(architecture))
    found = estimate(ProbeRequest(folder=str(folder)), "cpu", 0)
    choice = load(folder, memory=1 << 28, max_running=5).choice
    assert found.backend == choice.config.name
    assert (found.kv_token_bytes, found.kv_row_bytes) == (choice.cost.token_bytes, choice.cost.row_bytes)
    for rows in (1, 5):
        least = found.kv_least_bytes + rows * found.kv_least_row_bytes
        assert least == choice.config.least_memory(rows).nbytes


@pytest.mark.parametrize("bits", [4, 8])
def test_bits_of_keys_and_values_that_the_device_does_not_read_are_refused(tmp_path: Path, bits: int) -> None:
    folder = make_tiny(tmp_path / "model")
    with pytest.raises(ConfigError) as refused:
        load(folder, kv_bits=bits)
    part = probe(ProbeRequest(folder=str(folder), kv_bits=bits)).parts["model"]
    assert part == {"error": spell(refused.value.message, {})}


@pytest.mark.parametrize(
    ("changed", "kernels", "says"),
    [
        ({}, "auto", ""),
        ({"head_dim": 60}, "auto", "multiples of 16 dimensions"),
        ({}, "off", "custom kernels are off"),
    ],
)
def test_bits_of_keys_and_values_that_no_kernel_reads_are_refused(
    tmp_path: Path, changed: dict[str, Any], kernels: str, says: str
) -> None:
    """On CUDA, where other backends would take the model with 16 bits."""
    make_tiny(tmp_path)
    config = config_of("llama") | changed
    weights = {name: one.astype(mx.bfloat16) for name, one in tensors(make_folder(tmp_path / "own", config)).items()}
    write(tmp_path, weights, config)
    plain = estimate(ProbeRequest(folder=str(tmp_path), kernels=kernels), "cuda", 1 << 34)
    share = memory.BUDGET_SHARE if says else memory.PAGES_SHARE
    assert plain.kv_budget_bytes == int(((1 << 34) - plain.weight_bytes) * share)
    request = ProbeRequest(folder=str(tmp_path), kernels=kernels, kv_bits=8)
    if says:
        assert plain.backend == "contiguous"
        with pytest.raises(ConfigError, match=f"no keys and values of 8 bits for this model: .*{says}"):
            estimate(request, "cuda", 1 << 34)
        return
    found = estimate(request, "cuda", 1 << 34)
    assert (plain.backend, found.backend) == ("paged", "paged")
    assert 0 < found.kv_token_bytes < plain.kv_token_bytes


def test_an_unknown_architecture_is_an_error_of_the_model_alone(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    config = (folder / "config.json").read_text().replace('"llama"', '"no_such_model"')
    (folder / "config.json").write_text(config)
    result = probe(ProbeRequest(folder=str(folder)))
    assert result.ended == ""
    assert "no_such_model" in result.parts["model"]["error"]
    assert "error" not in result.parts["mlx-lm"]


def test_a_broken_tokenizer_is_an_error_of_the_text_side_alone(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    result = probe(ProbeRequest(folder=str(folder)))
    assert "tokenizer.json" in result.parts["text"]["error"]
    assert "error" not in result.parts["model"]


def test_the_text_side_knows_formats_and_grammars(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", chat_template="{# <think> #}{{ messages[0].content }}")
    part = probe(ProbeRequest(folder=str(folder), tool_parser="qwen3_coder")).parts["text"]
    assert (part["tool_parser"], part["reasoning_parser"]) == ("qwen3_coder", "think")
    assert part["structured"] == {"llguidance": version("llguidance"), "on": True}
    off = probe(ProbeRequest(folder=str(folder), structured="off", tool_parser="none of these"))
    assert "tool parser 'none of these' is unknown" in off.parts["text"]["error"]
    off = probe(ProbeRequest(folder=str(folder), structured="off"))
    assert off.parts["text"]["structured"]["on"] is False


def test_a_tokenizer_that_llguidance_cannot_use_costs_structured_output_alone(tmp_path: Path) -> None:
    """It is one of words: llguidance needs to know the bytes of tokens."""
    folder = make_tiny(tmp_path / "model")
    words = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    part = probe(ProbeRequest(folder=str(folder))).parts["text"]
    assert "error" not in part
    assert "llguidance can't use tokenizer.json" in part["structured"]["error"]


def test_a_context_over_the_models_is_said(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", context=256)
    assert "256" in probe(ProbeRequest(folder=str(folder), context=1000)).parts["model"]["error"]


def test_a_budget_beyond_what_the_weights_leave_fails(tmp_path: Path) -> None:
    request = ProbeRequest(folder=str(make_tiny(tmp_path)), memory=1 << 50, threads=1, spelling={"memory": "--memory"})
    part = probe(request).parts["model"]
    assert part["error"].startswith("--memory is 1024.0 TiB, and ")


@pytest.mark.parametrize(
    ("architecture", "served", "options", "error"),
    [
        ("llama", "llama", {}, ""),
        ("llama", "llama", {"added": ("<x>",)}, "has other tokens"),
        ("llama", "llama", {"context": 519}, "has 511 tokens, so none would be scored: give less"),
        ("mamba", "llama", {}, "it has no layer with attention to all tokens"),
        ("llama", "deepseek_v41", {}, "a prompt of the served model can't be prefilled in part: the "),
    ],
)
def test_a_scorer_is_compared(
    tmp_path: Path, architecture: str, served: str, options: dict[str, Any], error: str
) -> None:
    tiny = make_tiny(tmp_path / "tiny", layers=1, **options)
    folders = []
    for name, family in (("scorer", architecture), ("model", served)):
        if family == "llama":
            folders.append(tiny if name == "scorer" else make_tiny(tmp_path / name))
            continue
        folders.append(make_folder(tmp_path / name, config_of(family)))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folders[-1] / file).write_bytes((tiny / file).read_bytes())
    request = ProbeRequest(folder=str(folders[1]), scorer=str(folders[0]), scored_min=512)
    part = probe(request).parts["scorer"]
    assert error in part.get("error", ""), part
    assert part.get("architecture") == (None if error else "llama")


@pytest.mark.parametrize(
    ("architecture", "added", "error"),
    [("llama", (), ""), ("llama", ("<x>",), "has other tokens"), ("mamba", (), "recurrent layers")],
)
def test_a_draft_model_is_compared(tmp_path: Path, architecture: str, added: tuple[str, ...], error: str) -> None:
    model = make_tiny(tmp_path / "model")
    if architecture == "llama":
        draft = make_tiny(tmp_path / "draft", layers=1, added=added)
    else:
        draft = make_family(tmp_path / "draft", architecture)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (draft / name).write_bytes((model / name).read_bytes())
    part = probe(ProbeRequest(folder=str(model), draft=str(draft))).parts["draft"]
    assert (part.get("architecture"), error in part.get("error", "")) == (None if error else "llama", True)
