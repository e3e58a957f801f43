"""Text of a kernel as a whole program for NVRTC: its headers, signature and constants, and the body."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

_TYPES = {
    mx.bool_: "bool",
    mx.uint8: "unsigned char",
    mx.uint16: "unsigned short",
    mx.uint32: "unsigned int",
    mx.uint64: "unsigned long long",
    mx.int8: "signed char",
    mx.int16: "short",
    mx.int32: "int",
    mx.int64: "long long",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
    mx.float64: "double",
}
_INCLUDES = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
NAME = "KERNEL_NAME"
"""Placeholder for the function's name, which has a digest of all that decides its code."""
_NOTHING = "if (gridDim.z > 1) return;"
Sizes = tuple[tuple[int, int], ...]
"""Sizes of arrays: an input's number, and the dimension's."""


@dataclass(frozen=True)
class KernelText:
    """A kernel's text: `header` before the function, and its `body`, which finds `inputs` and `outputs` by name.

    Unlike in MLX's programs the body finds sizes only with a number, as `NAME_shape[0]`: each is an argument. A launch
    of several layers of blocks (`gridDim.z`) does nothing: it loads the program.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    body: str

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes that the body reads, in the order of the arguments. Raises ValueError where it does more with a
        shape."""
        return tuple((i, dim) for i, name in enumerate(self.inputs) for dim in self._dimensions(name))

    def _dimensions(self, name: str) -> list[int]:
        mentions = re.findall(rf"\b{name}_(shape\[(\d+)\]|shape|strides|ndim)", self.body)
        if wrong := [whole for whole, dim in mentions if not dim]:
            raise ValueError(f"only NAME_shape[NUMBER] can be had without MLX, not {name}_{wrong[0]}")
        return sorted({int(dim) for _, dim in mentions})

    def program(self, inputs: Sequence[Any], template: Iterable[tuple[str, Any]], outputs: Sequence[Any]) -> str:
        """Return the program for arrays of the types `inputs` and `outputs`, with `template` as constants; the function
        is called NAME. Raises KeyError for types that no kernel knows."""
        parameters = [f"const {_TYPES[dtype]}* {name}" for name, dtype in zip(self.inputs, inputs, strict=True)]
        parameters += [f"{_TYPES[dtype]}* {name}" for name, dtype in zip(self.outputs, outputs, strict=True)]
        parameters += [f"int {self.inputs[i]}_size_{dim}" for i, dim in self.sizes]
        lines = [_NOTHING, *(_constant(name, value) for name, value in template), *self._shapes(), self.body]
        start = f'{_INCLUDES}{self.header}\nextern "C" __global__ void {NAME}({", ".join(parameters)}) {{\n'
        return "\n".join([start, *lines, "}\n"])

    def _shapes(self) -> Iterable[str]:
        """Arrays of sizes under the names that the body knows."""
        for i, name in enumerate(self.inputs):
            if dims := [dim for of, dim in self.sizes if of == i]:
                values = [f"{name}_size_{dim}" if dim in dims else "0" for dim in range(dims[-1] + 1)]
                yield f"const int {name}_shape[] = {{{', '.join(values)}}};"


def _constant(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    return f"using {name} = {_TYPES[value]};"
