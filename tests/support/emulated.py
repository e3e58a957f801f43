"""Emulation of the CUDA kernels' own source on the host: compiled as C++, a block's threads as fibers that take turns.

Every array is passed as a copy with no mapped memory behind it, and shared memory and outputs hold NaNs until they are
written. A launch fails on accesses behind an array, on writes before it or to a read-only one, on a barrier that not
all threads reach, and on misaligned accesses. Asynchronous copies arrive as late as they may.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import hashlib
import math
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.cuda import run_late
from tests.support.emulated_text import translated
from treadle.runner.device.cuda import CudaKernel, _short, text
from treadle.runner.device.program_text import KernelText
from treadle.runner.device.properties import DeviceProperties
from treadle.runner.kv.paged.kernels import Kernels

Bytes = npt.NDArray[np.uint8]

_MAX_DIMENSIONS = 8
_READ, _CHANGED, _MADE = range(3)
_COMMON = (
    "-std=c++20 -w -pipe -fPIC -fvisibility=hidden -fno-gnu-unique -fno-strict-aliasing -U_FORTIFY_SOURCE "
    "-fno-exceptions"
)
_FLAGS = f"{_COMMON} -Og -ftrivial-auto-var-init=pattern -fsanitize=alignment"
_LIBRARIES = ["-nodefaultlibs", "-lgcc"]  # libc and libm are the interpreter's, the sanitizer's callbacks the header's
_HEADER = Path(__file__).with_name("emulated.h")
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
static const mlx::core::cu::Shape* shapes;
static void call() {{ mlx::core::cu::kernel({arguments}); }}
extern "C" __attribute__((visibility("default")))
const char* run(void* const* hosts, const size_t* sizes, const int* uses, const char* const* names,
                const mlx::core::cu::Shape* given, unsigned width, unsigned height, unsigned threads, size_t shared,
                unsigned seed) {{
  shapes = given;
  return emulated::launch_with(hosts, sizes, uses, names, {count}, call, width, height, threads, shared, seed);
}}
"""


class EmulationFailed(AssertionError):
    """The kernel broke a rule, or can't be compiled."""


@cache
def compiler() -> str:
    """Return the C++ compiler; skips the test if there is none."""
    if not sys.platform.startswith("linux"):
        pytest.skip("kernels are emulated on Linux only")
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        pytest.skip("there is no C++ compiler (g++ or c++) to emulate kernels with")
    return found


@cache
def _folder() -> Path:
    """Return the folder of compiled files of this compiler, these options and headers, with what kernels share compiled
    already. All processes of a user share it, and later runs."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    texts = [version, _FLAGS, *(file.read_text() for file in sorted(_HEADER.parent.glob(f"{_HEADER.stem}*.[hc]*")))]
    folder = _own_folder() / hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "common.o").exists():
            _compile_shared(folder)
    return folder


def _own_folder() -> Path:
    """Return a folder below the one for temporary files that no other user can write to."""
    folder = Path(tempfile.gettempdir(), f"treadle-emulated-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    folder = Path(tempfile.mkdtemp(prefix="treadle-emulated-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _compile_shared(folder: Path) -> None:
    """Compile the header and the functions that all kernels share; skips the test if the compiler is too old."""
    options = [compiler(), *_FLAGS.split(), "-x"]
    result = subprocess.run([*options, "c++", "-c", os.devnull, "-o", os.devnull], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"kernels are emulated with GCC 12 and later: {result.stderr[:200]}")
    _called(*options, "c++-header", str(_HEADER), "-o", str(folder / f"{_HEADER.name}.gch"))
    made = folder / f"common-{os.getpid()}.o"
    _called(compiler(), *_COMMON.split(), "-O2", "-c", str(_HEADER.with_suffix(".cc")), "-o", str(made))
    made.replace(folder / "common.o")


@cache
def _compiled(text: str) -> Callable[..., Any]:
    library = _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        _compile(text, library)
    run: Any = ctypes.CDLL(str(library)).run
    run.restype = ctypes.c_char_p
    return run


def _compile(text: str, library: Path) -> None:
    """Compile a kernel's text; other processes may do the same meanwhile."""
    source = library.with_name(f"{library.stem}-{os.getpid()}.cc")  # beside the compiled header, where it is found
    made = source.with_suffix(".so")
    source.write_text(text, encoding="utf-8")
    own = [str(source), str(library.with_name("common.o")), *_LIBRARIES, "-o", str(made)]
    try:
        _called(compiler(), *_FLAGS.split(), "-I", str(_HEADER.parent), "-shared", *own)
        made.replace(library)
    finally:
        source.unlink()


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
    """Return the kernel as MLX assembles it, from the `inputs` by name and the `outputs`' types by name; and its
    caller."""
    parameters, arguments = [], []
    for i, (name, array) in enumerate(inputs.items()):
        parameters.append(f"const {_TYPES[array.dtype]}* {name}")
        arguments.append(f"(const {_TYPES[array.dtype]}*)emulated::mappings[{i}].first")
        if f"{name}_shape" in source and array.ndim:
            parameters.append(f"const Shape {name}_shape")
            arguments.append(f"shapes[{i}]")
        if f"{name}_strides" in source and array.ndim:
            parameters.append(f"const Strides {name}_strides")
            arguments.append(f"mlx::core::cu::Strides{{{{{', '.join(map(str, _strides(array)))}}}}}")
    for i, (name, dtype) in enumerate(outputs.items(), len(inputs)):
        parameters.append(f"{_TYPES[dtype]}* {name}")
        arguments.append(f"({_TYPES[dtype]}*)emulated::mappings[{i}].first")
    return _TEXT.format(
        header=translated(header),
        parameters=", ".join(parameters),
        constants="\n".join(_constant(name, value) for name, value in template),
        source=translated(source),
        arguments=", ".join(arguments),
        count=len(inputs) + len(outputs),
    )


def _constant(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        assert value >= 0, f"MLX makes a name of {name}, and a name has no minus"
        return f"constexpr int {name} = {value};"
    return f"using {name} = {_TYPES[value]};"


def host(array: Any) -> Any:
    """Return the array's own memory; bfloat16, which NumPy does not have, as uint16."""
    mx.eval(array)
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def _bytes(array: Any) -> Bytes:
    """Return the array's own memory, or a copy of it if it is not contiguous."""
    return np.ascontiguousarray(host(array)).reshape(-1).view(np.uint8)


def _strides(array: Any) -> list[int]:
    """Return the array's strides in elements."""
    own = host(array)
    return [stride // own.itemsize for stride in own.strides]


def _spanned(array: Any) -> Bytes:
    """Return the memory from the array's first element to its last, those between that belong to others included."""
    own = host(array)
    count = 1 + sum((size - 1) * stride for size, stride in zip(own.shape, _strides(array), strict=True))
    return np.lib.stride_tricks.as_strided(own, (count,), (own.itemsize,)).view(np.uint8)


class EmulatedKernel(CudaKernel):
    """Kernel of that source. With a `seed` blocks run in an order of its own, and so do warps and lanes wherever they
    may."""

    seed: ClassVar[int] = 0

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
        assert shared_memory <= DeviceProperties().shared
        self.name = name
        self._inputs = inputs
        self._outputs = outputs
        self._source = _short(source)
        self._header = _short(text(*files))
        self._shared_memory = shared_memory
        self._strided = strided
        self._text = KernelText(tuple(inputs), tuple(outputs), self._header, self._source)

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
        if not self._strided:  # NVRTC gets such a program: a text for which there is none fails here
            assert self._text.program([array.dtype for array in inputs], template, dtypes)
        run = _compiled(text_of(self._source, self._header, arrays, types, template))
        made = [np.empty(math.prod(shape) * dtype.size, np.uint8) for shape, dtype in zip(shapes, dtypes, strict=True)]
        uses = [self._use(*one) for one in arrays.items()] + [_MADE] * len(made)
        self._run(
            run, [*map(_spanned if self._strided else _bytes, inputs), *made], uses, _shapes(inputs), (*blocks, threads)
        )
        return [_array(*one) for one in zip(made, shapes, dtypes, strict=True)]

    def _use(self, name: str, array: Any) -> int:
        """Return the use of an array: those that the kernel writes in place are passed directly."""
        if not re.search(rf"(?:const_cast<[^>]*>|\(int\*\))\({name}\)", self._source):
            return _READ
        assert host(array).flags.c_contiguous, f"MLX makes a copy of {name}: what is written to it is lost"
        return _CHANGED

    def _run(
        self, run: Callable[..., Any], arrays: Sequence[Bytes], uses: Sequence[int], shapes: Any, grid: Sequence[int]
    ) -> None:
        count = len(arrays)
        result = run(
            (ctypes.c_void_p * count)(*[one.ctypes.data for one in arrays]),
            (ctypes.c_size_t * count)(*[one.nbytes for one in arrays]),
            (ctypes.c_int * count)(*uses),
            (ctypes.c_char_p * count)(*[name.encode() for name in (*self._inputs, *self._outputs)]),
            shapes.ctypes.data_as(ctypes.c_void_p),
            *grid,
            ctypes.c_size_t(self._shared_memory),
            self.seed,
        )
        if result is not None:
            raise EmulationFailed(f"{self.name}: {result.decode()}")


def _shapes(arrays: Sequence[Any]) -> npt.NDArray[np.int32]:
    """Return a line for each, as MLX passes them."""
    shapes = np.zeros((len(arrays), _MAX_DIMENSIONS), np.int32)
    for line, array in zip(shapes, arrays, strict=True):
        line[: array.ndim] = array.shape
    return shapes


def _array(data: Bytes, shape: Sequence[int], dtype: Any) -> Any:
    kind = np.uint16 if dtype == mx.bfloat16 else np.dtype(str(dtype).rpartition(".")[2])
    made = mx.array(data.view(kind).reshape(shape))
    return made.view(mx.bfloat16) if dtype == mx.bfloat16 else made


class EmulatedKernels(Kernels):
    """The paged cache's kernels, emulated. They run when they are called: nothing can be traced."""

    kernel: ClassVar[type[CudaKernel]] = EmulatedKernel
    compile: ClassVar[Callable[..., Any]] = staticmethod(run_late)


def shuffled(kernel: type[EmulatedKernel], seed: int) -> type[EmulatedKernel]:
    """Return the same kernel with the order of the seed."""
    return type(kernel.__name__, (kernel,), {"seed": seed})
