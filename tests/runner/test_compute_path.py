"""What a start reports of its backend and kernels, and what `--kernels` makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.runner.conftest import Tiny
from tests.runner.paged.models import UNFUSED, make
from tests.support.cuda import ReferenceKernels, failing
from tests.support.tiny import make_tiny
from treadle.core.compute_path import Backend, ComputePath, KernelName, KernelPolicy, KernelState, KernelStatus
from treadle.errors import ConfigError
from treadle.runner.build import build
from treadle.runner.device.blas import BlasReport, blas_status
from treadle.runner.kv.cost import KvCost
from treadle.runner.loading.backend_choice import BackendRequest
from treadle.runner.loading.choose_backend import choose
from treadle.runner.loading.compute_report import check_required, compute_path
from treadle.runner.loading.probe import Probe
from treadle.runner.loading.reference import Reference
from treadle.runner.mlxlm import connect
from treadle.runner.model_runner import ModelRunner

ACTIVE, FAILED, NONE, OFF = KernelState.ACTIVE, KernelState.FAILED, KernelState.NOT_APPLICABLE, KernelState.OFF
OPENBLAS = BlasReport("OpenBLAS 0.3.29", 2)


def states(path: ComputePath) -> dict[str, KernelState]:
    return {kernel.name.value: kernel.state for kernel in path.kernels}


def on_cuda(
    module: Any, kernels: Any = ReferenceKernels, policy: KernelPolicy = KernelPolicy.AUTO, **asked: Any
) -> ComputePath:
    """As the loader finds it there, with the kernels' stand-ins; those of a step work."""
    reference = Reference(connect(), module, 2048)
    request = BackendRequest("cuda", 1 << 20, 4, True, kernels=policy, **asked)
    choice = choose(Probe(261, mx.float32, KvCost(1, 2), reference), request, kernels)
    names = (
        *(KernelName.SAMPLING, KernelName.TOKEN_MASKS, KernelName.READBACK, KernelName.STAGING),
        KernelName.SINGLE_LAUNCHES,
    )
    step = [] if policy is KernelPolicy.OFF else [KernelStatus(name, ACTIVE) for name in names]
    return compute_path(choice, "cuda", policy, step, reference)


def test_every_kernel_has_a_state_in_the_best_case() -> None:
    path = on_cuda(make("llama"))
    assert (path.backend, path.best, path.fused, path.why) == (Backend.PAGED, Backend.PAGED, True, ())
    inactive = {name for name, state in states(path).items() if state is not ACTIVE}
    assert inactive == {
        "replaced_layers",
        "experts",
        "skinny_gemm",
        "packed_gemm",
        "small_gemm",
        "dequantize",
        "blas",
    }  # float32 weights
    assert set(states(path)) == set(KernelName)
    assert path.tested_tokens == 41
    assert 0 <= path.deviation < 100
    check_required(path, "m")


def test_parts_that_are_not_fused_are_named_and_have_faster_layers() -> None:
    path = on_cuda(make("qwen3_moe"))
    assert path.fused
    reasons = {kernel.name: kernel.reason for kernel in path.kernels}
    assert reasons[KernelName.FUSED_LAYERS] == "all but 2 Qwen3MoeSparseMoeBlock, which are the model's own"
    assert reasons[KernelName.REPLACED_LAYERS] == "no layer of the model would be faster"
    check_required(path, "m")
    fused = {kernel.name: kernel.reason for kernel in on_cuda(make("llama")).kernels}
    assert fused[KernelName.FUSED_LAYERS] == ""
    assert fused[KernelName.REPLACED_LAYERS] == "all layers are fused"


def test_products_have_the_states_of_their_kernels() -> None:
    import mlx.nn as nn

    module = make("llama", dtype=mx.float16, hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    found = states(on_cuda(module))
    assert (found["small_gemm"], found["dequantize"]) == (ACTIVE, NONE)
    nn.quantize(module, group_size=64, bits=4)
    assert states(on_cuda(module))["dequantize"] is ACTIVE
    broken = on_cuda(module, failing("dequantize"))
    assert states(broken)["dequantize"] is FAILED
    with pytest.raises(ConfigError, match=r"dequantize: RunnerBroken: .*no kernel dequantize today"):
        check_required(broken, "m")


@pytest.mark.parametrize(
    ("name", "kernels", "backend", "state", "why"),
    [
        (
            UNFUSED,
            ReferenceKernels,
            "paged",
            NONE,
            "fused layers: there is no fused decoder for mlx_lm.models.gpt_neox",
        ),
        ("llama", failing("activate"), "paged", FAILED, "fused layers: sequences in one pass failed"),
        ("llama", failing("attend_decode"), "contiguous", FAILED, "paged: sequences in one pass failed"),
    ],
)
def test_a_worse_path_says_why_and_is_not_enough_where_the_best_is_required(
    name: str, kernels: Any, backend: str, state: KernelState, why: str
) -> None:
    path = on_cuda(make(name), kernels)
    assert path.backend == backend
    assert not path.fused
    assert states(path)["fused_layers"] is state
    assert any(reason.startswith(why) for reason in path.why)
    with pytest.raises(ConfigError) as caught:
        check_required(path, "mine")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.param == "kernels"


def test_off_uses_none_of_them() -> None:
    path = on_cuda(make("llama"), policy=KernelPolicy.OFF)
    assert path.backend == "contiguous"
    assert {state for name, state in states(path).items() if name != "blas"} == {OFF}
    assert path.summary() == "contiguous (paged: custom kernels are off (`kernels`)), kernels off"
    with pytest.raises(ConfigError, match="only custom kernels read keys and values of 8 bits"):
        on_cuda(make("llama"), policy=KernelPolicy.OFF, kv_bits=8)


def test_mlx_lms_caches_on_cuda_leave_kernels_unused() -> None:
    path = on_cuda(make("llama"), padded=True)
    assert path.backend == "padded"
    assert states(path)["decode_attention"] is NONE
    assert path.shared_prefill


# Elsewhere ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "tiny")


@pytest.mark.parametrize("policy", list(KernelPolicy))
def test_a_cpu_has_no_kernels_and_nothing_better(folder: Path, policy: KernelPolicy) -> None:
    runner = build(folder, kernels=policy, blas=OPENBLAS)
    path = runner.capabilities().compute
    assert (path.backend, path.best, path.why, path.tested_tokens) == ("contiguous", "contiguous", (), 41)
    found = states(path)
    assert found.pop("blas") is found.pop("replaced_layers") is KernelState.ACTIVE
    assert set(found.values()) == {NONE}
    assert path.summary() == "contiguous, replaced layers and blas, look-ahead"
    runner.close()


def test_a_model_that_keeps_state_says_so_and_is_not_the_best(tiny: Tiny) -> None:
    path = ModelRunner(tiny("deepseek_v41")).capabilities().compute
    assert (path.backend, path.shared_prefill) == ("serial", False)
    why = "contiguous: it keeps more than keys, values and recurrent states"
    assert path.summary().startswith(f"serial ({why})")
    with pytest.raises(ConfigError, match=f"deepseek_v41 would run serial .*: {why}"):
        check_required(path, "deepseek_v41")


def test_a_model_that_can_not_be_batched_is_serialized(tiny: Tiny) -> None:
    can = ModelRunner(tiny("deepseek_v41")).capabilities()
    assert (can.compute.backend, can.compute.serialized, can.path) == ("serial", True, "serialized")
    assert any(reason.startswith("padded: its caches can't be merged") for reason in can.compute.why)


def test_the_reference_blas_is_a_failed_kernel(folder: Path) -> None:
    slow = BlasReport("reference BLAS", warning="OpenBLAS could not be loaded (no file): matrix products will be slow")
    with pytest.raises(ConfigError, match=r"`kernels` is require, .* blas: OpenBLAS could not be loaded"):
        build(folder, kernels=KernelPolicy.REQUIRE, blas=slow)
    runner = build(folder, blas=slow)
    assert states(runner.capabilities().compute)["blas"] is FAILED
    runner.close()


@pytest.mark.parametrize(
    ("report", "state"),
    [(OPENBLAS, ACTIVE), (BlasReport("reference BLAS"), FAILED), (BlasReport("the device's own"), NONE)],
)
def test_blas_has_a_state(report: BlasReport, state: KernelState) -> None:
    assert blas_status(report).state is state
