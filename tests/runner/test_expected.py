"""The path that is expected of a model before its weights are read."""

from __future__ import annotations

import json

import pytest
from benchmarks import models_table

from tests.support.architectures import config_of, new_module
from tests.support.cuda import ReferenceKernels
from treadle.core.compute_path import Backend
from treadle.runner.loading.expected import expected_path
from treadle.runner.mlxlm import connect

SOME = ["llama", "gemma3_text", "gemma4_text", "deepseek_v3", "qwen3_next", "nemotron_h", "lfm2", "mamba", "llama4"]
OTHERS = ["deepseek_v41", "minimax_m3_vl", "rwkv7"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("architecture", [*SOME, *OTHERS])
def test_the_expected_path_is_the_one_in_the_docs(architecture: str, device: str) -> None:
    recorded = json.loads(models_table.RECORD.read_text("utf-8"))["architectures"][architecture][device]
    found = expected_path(connect(), new_module(config_of(architecture)), device, kernels=ReferenceKernels)
    assert (found.backend, found.prefixes) == (recorded["backend"], recorded["prefixes"])
    for better in found.rejected:
        assert better.reason.startswith(recorded["why"][better.backend])


def test_a_batch_whose_shapes_do_not_fit_is_not_expected() -> None:
    found = expected_path(connect(), new_module(config_of("phi3small")), "cpu")
    assert found.backend is Backend.SERIAL
    assert found.rejected[-1].backend == "padded"
    assert "a batch of sequences failed (ValueError: [broadcast_shapes]" in found.rejected[-1].reason


def test_memory_follows_the_layers_attention() -> None:
    """Windows, larger heads, latents that are keys and values at once, and recurrent states."""
    gemma = expected_path(connect(), new_module(config_of("gemma4_text")), "cpu")
    assert gemma.layers == ((32, 256), (0, 512), (32, 256), (0, 512))
    latent = expected_path(connect(), new_module(config_of("deepseek_v3")), "cpu")
    assert latent.layers == ((0, 160), (0, 160))
    hybrid = expected_path(connect(), new_module(config_of("qwen3_next")), "cpu")
    assert hybrid.layers == ((0, 256),)
    assert hybrid.state_bytes > 0
    assert expected_path(connect(), new_module(config_of("deepseek_v41")), "cpu").layers is None


def test_without_kernels_there_are_no_pages() -> None:
    module = new_module(config_of("llama"))
    assert expected_path(connect(), module, "cuda", kernels=ReferenceKernels).backend is Backend.PAGED
    assert expected_path(connect(), module, "cuda", pages=False).backend is Backend.CONTIGUOUS
    refused = expected_path(connect(), new_module(config_of("llama", head_dim=60)), "cuda", kernels=ReferenceKernels)
    assert refused.backend is Backend.CONTIGUOUS
    assert "multiples of 16 dimensions" in refused.rejected[0].reason
