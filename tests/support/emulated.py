"""The CUDA kernels' own text on the host: compiled as C++, a block's threads as fibers that take turns.

Every array is passed as a copy with guards of NaNs around it, and shared memory holds NaNs until something is written
to it. What a kernel writes outside of its arrays, or to one that it should only read, a barrier that not all come to
and accesses that are not aligned fail the launch. Copies to shared memory arrive as late as they may.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.emulated_text import translated
from treadle.runner.chip import Chip
from treadle.runner.cuda import CudaKernel, _short
from treadle.runner.paged.kernels import Kernels

Bytes = npt.NDArray[np.uint8]

_GUARD, _ALIGNED = 1 << 14, 256
_MOST_DIMENSIONS = 8
_FLAGS = (
    "-std=c++20 -O1 -w -fPIC -fvisibility=hidden -fno-gnu-unique -fno-strict-aliasing -U_FORTIFY_SOURCE "
    "-ftrivial-auto-var-init=pattern -fsanitize=alignment"
)
_TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
}
_TEXT = """#include "emulated.h"
{header}
namespace mlx::core::cu {{
void kernel({parameters}) {{
{constants}
{source}
}}
}}
static void* const* arrays;
static const mlx::core::cu::Shape* shapes;
static void call() {{ mlx::core::cu::kernel({arguments}); }}
extern "C" __attribute__((visibility("default")))
const char* run(void* const* all, const unsigned long* sizes, int count, const mlx::core::cu::Shape* their_shapes,
                unsigned width, unsigned height, unsigned threads, unsigned long shared, unsigned seed) {{
  arrays = all;
  shapes = their_shapes;
  emulated::known_arrays = count;
  for (int i = 0; i < count; ++i) {{
    const auto* first = static_cast<const unsigned char*>(all[i]);
    emulated::arrays[i] = {{first, first + sizes[i]}};
  }}
  return emulated::launch(call, width, height, threads, shared, seed);
}}
"""


class EmulationFailed(AssertionError):
    """The kernel did what it must not do, or can't be compiled."""


@cache
def compiler() -> str:
    """The C++ compiler; skips the test where there is none."""
    if not sys.platform.startswith("linux"):
        pytest.skip("kernels are emulated on Linux only")
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        pytest.skip("there is no C++ compiler (g++ or c++) to emulate kernels with")
    return found


@cache
def _folder() -> Path:
    """Where what is compiled lies until the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="treadle-emulated-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _compiled(text: str) -> Callable[..., Any]:
    source = _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.cc"
    source.write_text(text, encoding="utf-8")
    compiled, library = source.with_suffix(".o"), source.with_suffix(".so")
    here = str(Path(__file__).parent)
    _called(compiler(), *_FLAGS.split(), "-I", here, "-c", str(source), "-o", str(compiled))
    _called(compiler(), "-shared", str(compiled), "-o", str(library))
    run: Any = ctypes.CDLL(str(library)).run
    run.restype = ctypes.c_char_p
    return run


def _called(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationFailed(f"{' '.join(command)}\n{done.stderr[:4000]}")


def text_of(
    source: str,
    header: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    template: Sequence[tuple[str, Any]],
) -> str:
    """The kernel as MLX makes it out of its parts, from the `inputs` by name and the `outputs`' types by name; and what
    calls it."""
    parameters, arguments = [], []
    for i, (name, array) in enumerate(inputs.items()):
        parameters.append(f"const {_TYPES[array.dtype]}* {name}")
        arguments.append(f"static_cast<const {_TYPES[array.dtype]}*>(arrays[{i}])")
        if f"{name}_shape" in source and array.ndim:
            parameters.append(f"const Shape {name}_shape")
            arguments.append(f"shapes[{i}]")
    for i, (name, dtype) in enumerate(outputs.items(), len(inputs)):
        parameters.append(f"{_TYPES[dtype]}* {name}")
        arguments.append(f"static_cast<{_TYPES[dtype]}*>(arrays[{i}])")
    return _TEXT.format(
        header=translated(header),
        parameters=", ".join(parameters),
        constants="\n".join(_constant(name, value) for name, value in template),
        source=translated(source),
        arguments=", ".join(arguments),
    )


def _constant(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    return f"using {name} = {_TYPES[value]};"


@dataclass
class _Guarded:
    """Memory that a kernel is given: `data`, with guards around it."""

    whole: Bytes
    data: Bytes

    @classmethod
    def of(cls, size: int) -> _Guarded:
        whole = np.full(size + 2 * _GUARD + _ALIGNED, 0xFF, np.uint8)
        first = _GUARD + -(whole.ctypes.data + _GUARD) % _ALIGNED
        return cls(whole, whole[first : first + size])

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    def check(self, name: str) -> None:
        first = self.address - int(self.whole.ctypes.data)
        before, behind = self.whole[:first], self.whole[first + len(self.data) :]
        if not (before == 0xFF).all():
            raise EmulationFailed(f"written {first - np.flatnonzero(before != 0xFF)[-1]} bytes before {name}")
        if not (behind == 0xFF).all():
            raise EmulationFailed(f"written {np.flatnonzero(behind != 0xFF)[0]} bytes behind the end of {name}")


def host(array: Any) -> Any:
    """The array's own memory; bfloat16, which NumPy does not have, as uint16."""
    mx.eval(array)
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def _bytes(view: Any) -> Bytes:
    return np.ascontiguousarray(view).reshape(-1).view(np.uint8)


class EmulatedKernel(CudaKernel):
    """The kernel of that text. With a `seed` blocks run in an order of its own, and so do warps and lanes wherever they
    may."""

    seed: ClassVar[int] = 0

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
        assert shared_memory <= Chip().shared
        self.name = name
        self._inputs = inputs
        self._outputs = outputs
        self._source = _short(source)
        self._header = _short(header)
        self._shared_memory = shared_memory

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
        arrays = dict(zip(self._inputs, inputs, strict=True))
        types = dict(zip(self._outputs, dtypes, strict=True))
        run = _compiled(text_of(self._source, self._header, arrays, types, template))
        given = self._given(arrays)
        made = [_Guarded.of(int(np.prod(shape)) * dtype.size) for shape, dtype in zip(shapes, dtypes, strict=True)]
        self._run(run, [*given, *made], list(arrays.values()), blocks, threads)
        for name, memory in zip([*arrays, *self._outputs], [*given, *made], strict=True):
            memory.check(f"{self.name}'s {name}")
        for (name, array), memory in zip(arrays.items(), given, strict=True):
            self._give_back(name, host(array), memory)
        return [_array(memory, shape, dtype) for memory, shape, dtype in zip(made, shapes, dtypes, strict=True)]

    def _given(self, arrays: Mapping[str, Any]) -> list[_Guarded]:
        """A copy of each array; one for those that are the same."""
        known: dict[tuple[int, int], _Guarded] = {}
        given = []
        for array in arrays.values():
            view = host(array)
            key = view.ctypes.data, view.nbytes
            if key not in known:
                known[key] = _Guarded.of(view.nbytes)
                known[key].data[:] = _bytes(view)
            given.append(known[key])
        return given

    def _run(
        self, run: Callable[..., Any], memory: Sequence[_Guarded], inputs: Sequence[Any], blocks: Any, threads: int
    ) -> None:
        count = len(memory)
        shapes = np.zeros((count, _MOST_DIMENSIONS), np.int32)
        for i, array in enumerate(inputs):
            shapes[i, : array.ndim] = array.shape
        said = run(
            (ctypes.c_void_p * count)(*[one.address for one in memory]),
            (ctypes.c_ulong * count)(*[len(one.data) for one in memory]),
            count,
            shapes.ctypes.data_as(ctypes.c_void_p),
            *blocks,
            threads,
            ctypes.c_ulong(self._shared_memory),
            self.seed,
        )
        if said is not None:
            raise EmulationFailed(f"{self.name}: {said.decode()}")

    def _give_back(self, name: str, view: Any, memory: _Guarded) -> None:
        """What was written in place, to the array itself."""
        if np.array_equal(_bytes(view), memory.data):
            return
        if not re.search(rf"(?:const_cast<[^>]*>|\(int\*\))\({name}\)", self._source):
            raise EmulationFailed(f"{self.name} has written to {name}, which it is to read")
        assert view.flags.c_contiguous, f"{name} is a copy in MLX: what is written to it is lost"
        view[...] = memory.data.view(view.dtype).reshape(view.shape)


def _array(memory: _Guarded, shape: Sequence[int], dtype: Any) -> Any:
    kind = np.uint16 if dtype == mx.bfloat16 else np.dtype(str(dtype).rpartition(".")[2])
    made = mx.array(memory.data.view(kind).reshape(shape))
    return made.view(mx.bfloat16) if dtype == mx.bfloat16 else made


class EmulatedKernels(Kernels):
    """The paged cache's kernels, emulated. They run when they are called: nothing can be traced."""

    kernel: ClassVar[type[CudaKernel]] = EmulatedKernel
    compile: ClassVar[Callable[..., Any]] = staticmethod(lambda program: program)


def shuffled(kernel: type[EmulatedKernel], seed: int) -> type[EmulatedKernel]:
    """The same, in an order that the seed says."""
    return type(kernel.__name__, (kernel,), {"seed": seed})
