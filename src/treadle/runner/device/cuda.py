"""Kernels for MLX's CUDA build, compiled on the machine at their first use."""

from __future__ import annotations

import re
from collections.abc import Callable, MutableMapping, Sequence
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

_RUNNER = __package__.rpartition(".")[0]
_COMMENT = re.compile(r"//[^\n]*")
_INDENT = re.compile(r"\n\s+")
_QUOTABLE = re.compile(r'[^"\\\n]+')


class CudaKernel:
    """A kernel named `name` that reads `inputs` and makes `outputs`, with `source` as its body and the
    `files` of `treadle.runner` before it.

    MLX goes through a custom kernel's whole text whenever it starts one, 5 us of the host for 20 KB of it, so the files
    are included where the compiler can find them.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        source: str,
        *,
        files: Sequence[str] = (),
        shared_memory: int = 0,
    ) -> None:
        version = sha256((source + text(*files)).encode()).hexdigest()[:8]  # MLX keeps what it compiled by its name
        self._kernel: Any = mx.fast.cuda_kernel(
            name=f"treadle_{name}_{version}",
            input_names=list(inputs),
            output_names=list(outputs),
            source=_short(source),
            header=included(*files),
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


def lift_graph_byte_limit(environment: MutableMapping[str, str]) -> None:
    """Let MLX hand work to the device in graphs of as many operations as it likes; to be said before it is first used.

    It ends a graph, too, when the arrays that its operations read come to a gigabyte. A layer's pages are one array, of
    several in a server: each operation that reads them would be the end of a graph, 20 us of the host. What somebody
    else has set stays. Where MLX has computed in this process before, it changes nothing.
    """
    environment.setdefault("MLX_MAX_MB_PER_BUFFER", "1000000000")


def bits_of(value: float) -> int:
    """A number as a template takes it, for `__int_as_float`: a constant that no kernel has to fetch."""
    return int(np.float32(value).view(np.int32))


def text(*names: str) -> str:
    """Files of `treadle.runner`, one behind the other."""
    here = resources.files(_RUNNER)
    return "".join(here.joinpath(name).read_text(encoding="utf-8") for name in names)


def included(*names: str) -> str:
    """What brings files of `treadle.runner` before a kernel: lines that include them, or their text where they are not
    files that a compiler can open."""
    here = resources.files(_RUNNER)
    if isinstance(here, Path) and _QUOTABLE.fullmatch(str(here)):
        return "".join(f'#include "{here / name}"\n' for name in names)
    return _short(text(*names))


def _short(text: str) -> str:
    """The same program without comments and indentation."""
    return _INDENT.sub("\n", _COMMENT.sub("", text))
