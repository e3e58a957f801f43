"""Kernels for MLX's CUDA build, compiled on the machine at their first use."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import mlx.core as mx
import numpy as np

_COMMENT = re.compile(r"//[^\n]*")
_INDENT = re.compile(r"\n\s+")


class CudaKernel:
    """A kernel named `name` that reads `inputs` and makes `outputs`, with `source` as its body.

    MLX goes through a custom kernel's whole text at every call to see whether it knows it, so it gets a short one.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        source: str,
        *,
        header: str = "",
        shared_memory: int = 0,
    ) -> None:
        self._kernel: Any = mx.fast.cuda_kernel(
            name=f"treadle_{name}",
            input_names=list(inputs),
            output_names=list(outputs),
            source=_short(source),
            header=_short(header),
            shared_memory=shared_memory,
        )

    def __call__(
        self,
        inputs: Sequence[Any],
        template: Sequence[tuple[str, Any]],
        *,
        blocks: tuple[int, int],
        threads: int,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[Any],
    ) -> list[Any]:
        """Outputs of `shapes` and `dtypes`, computed by `blocks` blocks of `threads` threads. Where the compiler
        refuses the text, evaluating them raises RuntimeError with what it says."""
        made: list[Any] = self._kernel(
            inputs=inputs,
            template=template,
            grid=(blocks[0] * threads, blocks[1], 1),
            threadgroup=(threads, 1, 1),
            output_shapes=shapes,
            output_dtypes=dtypes,
        )
        return made


NewKernel = Callable[..., CudaKernel]
"""What makes kernels: `CudaKernel`, or a test's stand-in that takes the same."""


def bits_of(value: float) -> int:
    """A number as a template takes it, for `__int_as_float`: a constant that no kernel has to fetch."""
    return int(np.float32(value).view(np.int32))


def text(*names: str) -> str:
    """Files of this package, one behind the other, as a kernel's header."""
    here = resources.files(__package__)
    return "".join(here.joinpath(name).read_text(encoding="utf-8") for name in names)


def _short(text: str) -> str:
    """The same program without comments and indentation."""
    return _INDENT.sub("\n", _COMMENT.sub("", text))
