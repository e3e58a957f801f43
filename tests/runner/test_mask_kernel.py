"""Bitmasks on logits: the kernel's own text, its stand-in, and MLX's operations all mask the same tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.cuda import ReferenceKernel, failing, is_left_out, works
from tests.support.emulated import EmulatedKernel
from treadle.runner.device.staging import direct
from treadle.runner.sampling.bitmask import expanded, gathered, masking
from treadle.runner.sampling.mask_kernel import MaskKernel, mask_kernel


def batch(vocabulary: int, width: int, dtype: Any) -> tuple[Any, Any, Any]:
    """Logits, words, and which tokens they allow; some rows allow everything, nothing, or one token."""
    dice = np.random.default_rng(vocabulary)
    words = dice.integers(-(2**31), 2**31, (5, width), np.int64).astype(np.int32)
    words[0], words[1], words[2] = 0, -1, 0
    words[2, -1 if 32 * width == vocabulary else 0] = -(2**31)
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocabulary].astype(bool)
    return mx.array(dice.normal(0, 3, (5, vocabulary)).astype(np.float32)).astype(dtype), words, allowed


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("vocabulary", "width"), [(261, 9), (4096, 128), (4096, 130), (5003, 157)])
def test_a_token_without_its_bit_is_minus_infinity_and_others_keep_their_logits(
    vocabulary: int, width: int, dtype: Any
) -> None:
    logits, words, allowed = batch(vocabulary, width, dtype)
    wanted = np.where(allowed, np.array(logits.astype(mx.float32)), -np.inf)
    for mask in (
        expanded,
        gathered,
        MaskKernel(vocabulary, ReferenceKernel),
        MaskKernel(vocabulary, EmulatedKernel),
    ):
        masked = mask(logits, words, direct)
        assert masked.dtype == dtype
        np.testing.assert_array_equal(np.array(masked.astype(mx.float32)), wanted)


def test_cpus_mask_on_the_host() -> None:
    assert masking("cpu") is expanded
    assert masking("metal") is masking("cuda") is gathered


@pytest.mark.parametrize("vocabulary", [261, 4096])
def test_a_kernel_that_works_is_used(vocabulary: int, caplog: pytest.LogCaptureFixture) -> None:
    assert works(mask_kernel(vocabulary, mx.bfloat16, EmulatedKernel))
    assert not caplog.records


class Wrong(ReferenceKernel):
    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> list[Any]:
        logits, words = inputs
        return super().__call__([logits, words ^ 1], *args, **kwargs)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (failing("mask").kernel, "nvrtc: no kernel mask today"),
        (Wrong, "it masks other tokens than those without a bit"),
    ],
)
def test_one_that_does_not_is_left_out_with_one_warning(
    kernel: type[ReferenceKernel], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    is_left_out(lambda: mask_kernel(261, mx.float32, kernel), reason, caplog)
