"""Launches of a step on CUDA, by name: counted from traces on any machine, without a GPU.

    python benchmarks/launches.py [--family deepseek_v3 ...] [--bits 16 4 mxfp4] [--rows 8] [--chunk 128] [--names]

Each family of `gpu/family_shapes` (small shapes: as many layers as measured on a GPU, of small sizes) is loaded as on
CUDA, with kernels that compute nothing and self-tests that pass. A step of `--rows` sequences that all decode, and of
`--chunk` tokens of a prompt beside them, is traced, and compiled by MLX, which joins elementwise operations. Counted
are kernels of ours, MLX's operations that are no views, and the copies that MLX makes of arrays that are not
contiguous. The count a layer is that of the whole pass, embedding and head included, by the number of layers.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import mlx.core as mx
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.gpu.families_steps import MODES, make  # noqa: E402
from benchmarks.gpu.family_shapes import SHAPES, config_of  # noqa: E402
from tests.runner.backends import Driven, segment  # noqa: E402

from treadle.runner.device.cuda import CudaKernel  # noqa: E402
from treadle.runner.device.self_test import SelfTested  # noqa: E402
from treadle.runner.fused import dequantize, packed_gemm, small_gemm  # noqa: E402
from treadle.runner.kv.paged.kernels import Kernels  # noqa: E402
from treadle.runner.layers import replace  # noqa: E402
from treadle.runner.loading import candidates  # noqa: E402
from treadle.runner.loading.backend_choice import BackendRequest  # noqa: E402
from treadle.runner.loading.choose_backend import choose  # noqa: E402
from treadle.runner.loading.probe import probe  # noqa: E402
from treadle.runner.mlxlm import connect  # noqa: E402
from treadle.runner.recurrent.kernels import RecurrentKernels  # noqa: E402

_MARK = 7_000_000
"""Added to the index of a kernel's name: a constant among the inputs of its stand-in."""
_NAMES: list[tuple[str, bool]] = []
_VIEWS = {
    *("Reshape", "Transpose", "Split", "Slice", "Squeeze", "ExpandDims", "Flatten", "Unflatten", "Broadcast"),
    *("BroadcastAxes", "StopGradient", "Depends", "View", "Contiguous", "AsStrided", "Concatenate"),
}
"""Operations that are no launches where they copy nothing: copies are found by `_Tracer`."""


class StandIn(CudaKernel):
    """A kernel that computes nothing: in a graph, one `Depends` of its inputs and of a mark that stands for its name.
    Its outputs are zeros."""

    def __init__(self, name: str, *_: Any, strided: bool = False, **__: Any) -> None:
        self._mark = _mark(name, strided)

    def __call__(self, inputs: Sequence[Any], *_: Any, shapes: Any, dtypes: Any, **__: Any) -> list[Any]:
        zeros = [_zeros(tuple(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        made: list[Any] = mx.depends(zeros, [*inputs, self._mark])
        return made


class StandInKernels(Kernels):
    """The paged cache's kernels, which keep the last program that was compiled, with its arguments."""

    kernel: ClassVar[type[CudaKernel]] = StandIn
    last: ClassVar[list[tuple[Callable[..., Any], Any]]] = []

    @staticmethod
    def compile(program: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*arguments: Any) -> Any:
            StandInKernels.last[:] = [(program, arguments)]
            return program(*arguments)

        return traced


class StandInRecurrences(RecurrentKernels):
    kernel: ClassVar[type[CudaKernel]] = StandIn


def _mark(name: str, strided: bool) -> Any:
    if (name, strided) not in _NAMES:
        _NAMES.append((name, strided))
    return mx.array(_MARK + _NAMES.index((name, strided)), mx.int32)


@cache
def _zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    made = mx.zeros(shape, dtype)
    mx.eval(made)
    return made


def count(family: str, bits: str, rows: int, chunk: int) -> tuple[Counter[str], int, str]:
    """Launches of a step of `rows` sequences that decode and of `chunk` tokens of a prompt, by name, the number of the
    model's layers, and the path taken."""
    module, config = make(config_of(family, small=True), bits)
    backend, path = _loaded(module, config)
    with _operations_of_cuda():
        step = Driven(backend, module)
        counts = {str(row): 1 for row in range(rows)} | ({"prompt": chunk} if chunk else {})
        for row in counts:
            step.admit(row)
        for turn in range(2):
            step.compute([segment(row, (1,) * each, turn * each, wants=1) for row, each in counts.items()])
        (program, (tokens, selected, arrays)) = StandInKernels.last.pop()
        flat = [tokens, *([] if selected is None else [selected]), *arrays]

        def whole(*given: Any) -> Any:
            first = len(flat) - len(arrays)
            return program(given[0], None if selected is None else given[1], list(given[first:]))

        found = _Tracer.of(whole, flat)
        step.backend.close()
    return found, config["num_hidden_layers"] if "num_hidden_layers" in config else len(module.layers), path


def _loaded(module: Any, config: dict[str, Any]) -> tuple[Any, str]:
    """The paged backend of a module, as the loader chooses it on CUDA, and its path."""
    with _without_tests():
        found = probe(connect(), module, 2048, Path("random"))
        request = BackendRequest("cuda", 1 << 28, 32, keep_prefixes=False, padded=False)
        choice = choose(found, request, StandInKernels)
    chosen: Any = choice.config
    if chosen.name != "paged":
        raise SystemExit(f"{config['model_type']} is not paged: {choice.rejected}")
    return chosen, "fused" if chosen.fused else "compiled"


@contextmanager
def _without_tests() -> Iterator[None]:
    """Let a model be loaded without self-tests, and where MLX's products of experts on the CPU take float32 only."""
    gather = mx.gather_mm

    def untested(name: Any, make: Callable[[], Any], *_: Any, **__: Any) -> SelfTested[Any]:
        return SelfTested(make(), mock.Mock())

    def gathered(a: Any, b: Any, *others: Any, **named: Any) -> Any:
        return gather(a.astype(mx.float32), b.astype(mx.float32), *others, **named).astype(a.dtype)

    with ExitStack() as stack:
        for module in (dequantize, packed_gemm, small_gemm):
            stack.enter_context(mock.patch.object(module, "self_tested", untested))
        for where, name, instead in (
            (replace, "_reason_against", lambda *_: ""),
            (candidates, "_test_pages", lambda reference, _: reference.layers.install()),
            (candidates, "self_test", lambda *_: None),
            (candidates, "paged", partial(candidates.paged, recurrences=StandInRecurrences)),
            (mx, "gather_mm", gathered),
        ):
            stack.enter_context(mock.patch.object(where, name, instead))
        yield


@contextmanager
def _operations_of_cuda() -> Iterator[None]:
    """Let MLX's operations be one launch that are one on CUDA, and several on the CPU."""
    with ExitStack() as stack:
        for name in ("rms_norm", "layer_norm", "rope"):
            instead = partial(_as_x, StandIn(f"mlx {name}"))
            stack.enter_context(mock.patch.object(mx.fast, name, instead))
        yield


def _as_x(kernel: StandIn, x: Any, *others: Any, **named: Any) -> Any:
    """An operation of the shape of its first argument."""
    more = [one for one in (*others, *named.values()) if isinstance(one, mx.array)]
    return kernel([x, *more], [], shapes=[x.shape], dtypes=[x.dtype])[0]


class _Tracer:
    """Reads a graph as `mx.export_function` tells it: arrays are NumPy's of one byte, so that NumPy knows views from
    copies."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self._arrays: dict[str, Any] = {}
        self._marks: dict[str, tuple[str, bool]] = {}

    @classmethod
    def of(cls, program: Callable[..., Any], arguments: Sequence[Any]) -> Counter[str]:
        """Launches of a program."""
        self = cls()
        mx.export_function(self, program, *arguments)
        return self.launches + _joined(program, arguments)

    def __call__(self, told: dict[str, Any]) -> None:
        if told["type"] == "inputs":
            for name, shape, _ in told["inputs"]:
                self._arrays[name] = _fresh(shape)
        elif told["type"] == "constants":
            for name, array in told["constants"]:
                self._constant(name, array)
        elif told["type"] == "primitive":
            self._operation(told)

    def _constant(self, name: str, array: Any) -> None:
        if array.ndim == 0 and array.dtype == mx.int32 and 0 <= array.item() - _MARK < len(_NAMES):
            self._marks[name] = _NAMES[array.item() - _MARK]
        self._arrays[name] = _fresh(array.shape)

    def _operation(self, told: dict[str, Any]) -> None:
        name, inputs, arguments = told["name"], [self._arrays[one[0]] for one in told["inputs"]], told["arguments"]
        made = _views(name, inputs, arguments, [shape for _, shape, _ in told["outputs"]])
        if name in ("Reshape", "Flatten", "Unflatten", "Contiguous") and not np.shares_memory(made[0], inputs[0]):
            self.launches[f"copy: {name}"] += 1
        if name == "Concatenate":
            self.launches[name] += sum(one.size > 0 for one in inputs)
        if name == "Depends":
            kernel, strided = next(self._marks[one[0]] for one in told["inputs"] if one[0] in self._marks)
            self.launches[kernel] += 1
            apart = [] if strided else [one for one in inputs if not one.flags.c_contiguous]
            self.launches[f"copy for {kernel}"] += len(apart)
        if name in ("Matmul", "AddMM"):
            self.launches[f"copy for {name}"] += sum(not _for_product(one) for one in inputs[:2])
        if name == "QuantizedMatmul":
            self.launches[f"copy for {name}"] += sum(not one.flags.c_contiguous for one in inputs)
        self._arrays |= {one[0]: array for one, array in zip(told["outputs"], made, strict=True)}


def _joined(program: Callable[..., Any], arguments: Sequence[Any]) -> Counter[str]:
    """MLX's operations of a compiled program that are no views."""
    mx.eval(arguments)  # what makes them is no part of the program
    with tempfile.NamedTemporaryFile("r", suffix=".dot") as file:
        mx.export_to_dot(file.name, mx.compile(program)(*arguments))
        text = file.read()
    labels = re.findall(r'\d+ \[label ="(\w+)"', text)
    return Counter(label for label in labels if label not in _VIEWS)


def _fresh(shape: Sequence[int]) -> Any:
    return np.empty(shape, np.int8)


def _views(name: str, inputs: Sequence[Any], arguments: Sequence[Any], shapes: Sequence[Sequence[int]]) -> list[Any]:
    """Outputs of an operation: views of its input where MLX's are."""
    x: Any = inputs[0] if inputs else None
    if name == "Transpose":
        return [x.transpose(arguments[0])]
    if name == "Split":
        return list(np.split(x, list(arguments[0]), axis=arguments[1]))
    if name == "Slice":
        return [x[tuple(slice(*ends) for ends in zip(*arguments, strict=True))]]
    if name in ("Broadcast", "BroadcastAxes"):
        return [np.broadcast_to(x, shapes[0])]
    if name in ("Reshape", "Flatten", "Unflatten", "Squeeze", "ExpandDims"):
        return [x.reshape(shapes[0])]
    if name in ("StopGradient", "View") or (name == "Contiguous" and x.flags.c_contiguous):
        return [x.reshape(shapes[0]) if tuple(shapes[0]) == x.shape else _fresh(shapes[0])]
    return [_fresh(shape) for shape in shapes]


def _for_product(array: Any) -> bool:
    """Whether MLX's products on CUDA take an array as it is: rows or columns side by side."""
    return bool(array.flags.c_contiguous or array.swapaxes(-1, -2).flags.c_contiguous)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=SHAPES, nargs="*", default=list(SHAPES))
    parser.add_argument("--bits", nargs="*", choices=["16", "4", "8", *MODES], default=["16"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a prompt beside them")
    parser.add_argument("--names", action="store_true", help="list launches by name")
    options = parser.parse_args()
    for family in options.family:
        for bits in options.bits:
            found, layers, path = count(family, bits, options.rows, options.chunk)
            total = found.total()
            print(f"{family}, {bits} bits, {path}: {total / layers:.1f} a layer, {total} for {layers}", flush=True)
            for name, number in found.most_common() if options.names else ():
                print(f"  {number:4} {name}")


if __name__ == "__main__":
    main()
