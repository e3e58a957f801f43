"""Custom kernels for MLX's CUDA build, compiled on the machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...environment import cache_folder
from ...installation import version_of
from .program_text import KernelText
from .programs import Program, kernel_programs

MLX_FOLDER = "mlx"
MLX_FOLDER_VARIABLE = "MLX_PTX_CACHE_DIR"
_RUNNER = __package__.rpartition(".")[0]
_COMMENT = re.compile(r"//[^\n]*")
_INDENT = re.compile(r"\n\s+")
_QUOTABLE = re.compile(r'[^"\\\n]+')


class CudaKernel:
    """A kernel `name` from `inputs` to `outputs`, with `source` as its body and the `files` of `treadle.runner` before
    it, compiled once for all processes of the user (`programs`), or by MLX where that is not possible.

    With `strided` the arrays come as they are, and the source finds their strides as `NAME_strides`; without, MLX
    copies those that are not contiguous, and the source finds sizes as `NAME_shape[NUMBER]`. Only MLX knows strides, so
    it compiles strided kernels. Numbers of a template are not negative, as MLX makes a name of them.
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
        strided: bool = False,
    ) -> None:
        self._name = name
        self._text = KernelText(tuple(inputs), tuple(outputs), _short(text(*files)), _short(source))
        self._files = tuple(files)
        self._shared_memory = shared_memory
        self._strided = strided
        self._programs: dict[Hashable, Program] = {}

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
        signature = (*[array.dtype for array in inputs], *template, *dtypes)
        program = self._programs.get(signature)
        if program is None:
            program = self._programs[signature] = self._program(inputs, template, dtypes)
        if program.cubin:
            return program.launch(inputs, blocks, threads, shapes, dtypes)
        made: list[Any] = self._of_mlx(
            inputs=inputs,
            template=template,
            grid=(blocks[0] * threads, blocks[1], 1),
            threadgroup=(threads, 1, 1),
            output_shapes=shapes,
            output_dtypes=dtypes,
        )
        return made

    def _program(self, inputs: Sequence[Any], template: Sequence[tuple[str, Any]], outputs: Sequence[Any]) -> Program:
        """The program for arrays of these types; one without a cubin where MLX compiles it."""
        types = [array.dtype for array in inputs]
        if self._strided:
            return kernel_programs().left_to_mlx(self._mlx_name, types, template)
        text = self._text.program(types, template, outputs)
        programs = kernel_programs()
        found = programs.get(self._name, text, self._text.sizes, self._shared_memory)
        if found is None:
            return programs.left_to_mlx(self._mlx_name, types, template)
        return programs.loaded(found, types, outputs)

    @cached_property
    def _mlx_name(self) -> str:
        """A name for each text, as MLX keeps what it compiled by its name."""
        kept = self._text
        whole = "\n".join([kept.body, *kept.inputs, *kept.outputs, str(self._shared_memory), kept.header])
        return f"treadle_{self._name}_{sha256(whole.encode()).hexdigest()[:8]}"

    @cached_property
    def _of_mlx(self) -> Any:
        """The kernel as MLX compiles it. MLX reads a custom kernel's whole text at every launch, 5 us of the host for
        20 KB, so the files are included by name where the compiler can find them."""
        return mx.fast.cuda_kernel(
            name=self._mlx_name,
            input_names=list(self._text.inputs),
            output_names=list(self._text.outputs),
            source=self._text.body,
            header=included(*self._files),
            shared_memory=self._shared_memory,
            ensure_row_contiguous=not self._strided,
        )


NewKernel = Callable[..., CudaKernel]
"""Factory of kernels: `CudaKernel`, or a test's stand-in with the same arguments."""


GRAPH_SHARE = 0.04
GRAPH_BYTES = 1_430_000
"""Bytes of the device that a graph of 60 operations takes, measured on an H100. MLX doesn't count them."""
LEAST_GRAPHS = 400
DECODING_GRAPHS = 1600
"""The most that are kept where steps with prompts and images use none: plain steps have some hundred, steps that verify
drafts of many sizes several times as many."""


def prepare_graphs(environment: MutableMapping[str, str], device_bytes: int, *, only_decoding: bool) -> None:
    """Let MLX end CUDA graphs by their number of operations alone, and keep as many of them as `GRAPH_SHARE` of the
    device's memory holds, up to DECODING_GRAPHS where `only_decoding` uses them; call it before MLX first computes in
    this process. Values that are set already stay.

    MLX ends a graph when the arrays that its operations read come to a gigabyte. A layer's pages are one array of
    several gigabytes in a server: each operation that reads them would end a graph, 20 us of the host. MLX keeps 400
    graphs, by what waits for what, which also depends on where arrays lie. Prompts, images and batches of all sizes
    have more: each other one takes the host 1.5 ms to make, and removing an old one waits for all that the device
    computes. Without the check MLX makes new graphs, however many are not found in a row, instead of raising an error.
    """
    held = int(device_bytes * GRAPH_SHARE) // GRAPH_BYTES
    graphs = max(LEAST_GRAPHS, min(held, DECODING_GRAPHS) if only_decoding else held)
    environment.setdefault("MLX_MAX_MB_PER_BUFFER", "1000000000")
    environment.setdefault("MLX_CUDA_GRAPH_CACHE_SIZE", str(graphs))
    environment.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")


def keep_mlx_kernels(environment: MutableMapping[str, str]) -> None:
    """Let MLX keep the kernels that it compiles in the user's cache folder; call it before MLX first computes.

    Its own place is the folder for temporary files, which a reboot empties: compiling the kernels of a model takes
    minutes. A folder that is set already stays, and so does MLX's own where this one can't be made.
    """
    if MLX_FOLDER_VARIABLE in environment:
        return
    folder = cache_folder(environment) / MLX_FOLDER / (version_of("mlx") or "unknown")
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        environment[MLX_FOLDER_VARIABLE] = str(folder)


def bits_of(value: float) -> int:
    """The bits of a float as a template parameter, for `__int_as_float`: a constant that no kernel has to load."""
    return int(np.float32(value).view(np.int32))


def text(*names: str) -> str:
    """Concatenated text of files of `treadle.runner`."""
    here = resources.files(_RUNNER)
    return "".join(here.joinpath(name).read_text(encoding="utf-8") for name in names)


def included(*names: str) -> str:
    """A kernel's header with files of `treadle.runner`: lines that include them, or their text where they are not files
    that a compiler can open."""
    here = resources.files(_RUNNER)
    if isinstance(here, Path) and _QUOTABLE.fullmatch(str(here)):
        return "".join(f'#include "{here / name}"\n' for name in names)
    return _short(text(*names))


def _short(text: str) -> str:
    """The program without comments and indentation."""
    return _INDENT.sub("\n", _COMMENT.sub("", text))
