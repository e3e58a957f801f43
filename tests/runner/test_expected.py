"""The path that is expected of a model before its weights are read."""

from __future__ import annotations

import json

import pytest
from benchmarks import models_table

from tests.support.architectures import config_of, new_module
from tests.support.cuda import ReferenceKernels
from treadle.core.compute_path import Backend
from treadle.runner.kv.contiguous.buffer import STEP
from treadle.runner.kv.cost import KvCost
from treadle.runner.loading.candidates import page_layers
from treadle.runner.loading.expected import expected_path
from treadle.runner.mlxlm import connect

SOME = ["llama", "gemma3_text", "gemma4_text", "deepseek_v3", "qwen3_next", "nemotron_h", "lfm2", "mamba", "llama4"]
CONTEXT = 2048
OTHERS = ["deepseek_v41", "minimax_m3_vl", "rwkv7"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("architecture", [*SOME, *OTHERS])
def test_the_expected_path_is_the_one_in_the_docs(architecture: str, device: str) -> None:
    recorded = json.loads(models_table.RECORD.read_text("utf-8"))["architectures"][architecture][device]
    found = expected_path(connect(), new_module(config_of(architecture)), device, CONTEXT, kernels=ReferenceKernels)
    assert (found.backend, found.prefixes) == (recorded["backend"], recorded["prefixes"])
    for better in found.rejected:
        assert better.reason.startswith(recorded["why"][better.backend])


def test_a_batch_whose_shapes_do_not_fit_is_not_expected() -> None:
    found = expected_path(connect(), new_module(config_of("phi3small")), "cpu", CONTEXT)
    assert found.backend is Backend.SERIAL
    assert found.rejected[-1].backend == "padded"
    assert "a batch of sequences failed (ValueError: [broadcast_shapes]" in found.rejected[-1].reason


def test_memory_follows_the_layers_attention() -> None:
    """Windows, larger heads, latents that are keys and values at once, and recurrent states; each buffer has half a
    step more. Float32."""
    gemma = expected_path(connect(), new_module(config_of("gemma4_text")), "cpu", CONTEXT)
    full = 4 * 2 * 512
    assert gemma.cost == KvCost(full, 4 * 2 * 32 * 256 + full * STEP // 2)
    latent = expected_path(connect(), new_module(config_of("deepseek_v3")), "cpu", CONTEXT)
    assert latent.cost == KvCost(4 * 2 * 160, 4 * 2 * 160 * STEP // 2)
    hybrid = expected_path(connect(), new_module(config_of("qwen3_next")), "cpu", CONTEXT)
    assert hybrid.cost.token_bytes == 4 * 256
    assert hybrid.state_bytes > 0
    assert hybrid.cost.row_bytes == 4 * 256 * STEP // 2 + 2 * hybrid.state_bytes


@pytest.mark.parametrize("architecture", ["gemma4_text", "qwen3_next"])
def test_with_pages_a_start_takes_what_their_configuration_says(architecture: str) -> None:
    """Two pages, and the recurrent states of all sequences; windows of all are not needed at once."""
    module = new_module(config_of(architecture))
    found = expected_path(connect(), module, "cuda", CONTEXT, kernels=ReferenceKernels)
    config = page_layers(connect(), module, 16, ReferenceKernels)
    pages = 2 * (config.page_bytes + sum(map(config.page_bytes_of, config.windows)))
    assert found.state_bytes == config.slot_bytes
    for rows in (1, 16):
        assert found.least_memory(rows) == config.least_memory(rows).nbytes == pages + 2 * rows * config.slot_bytes


def test_without_kernels_there_are_no_pages() -> None:
    module = new_module(config_of("llama"))
    assert expected_path(connect(), module, "cuda", CONTEXT, kernels=ReferenceKernels).backend is Backend.PAGED
    assert expected_path(connect(), module, "cuda", CONTEXT, pages=False).backend is Backend.CONTIGUOUS
    narrow = new_module(config_of("llama", head_dim=60))
    refused = expected_path(connect(), narrow, "cuda", CONTEXT, kernels=ReferenceKernels)
    assert refused.backend is Backend.CONTIGUOUS
    assert "multiples of 16 dimensions" in refused.rejected[0].reason
