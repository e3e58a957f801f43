"""The switch between CUDA graphs and single launches, for each pass.

MLX 0.32 collects a pass's operations in CUDA graphs, and keeps those that it has made. That pays for decode steps,
which are the same graphs again and again. Prompts and images come in many shapes, with graphs of their own, and making
one takes the host 1.5 ms. MLX decides once, by MLX_USE_CUDA_GRAPHS, and keeps the answer in a variable of its library,
which is changed here between two evaluations. It is found by its symbol: a library without that has no switch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...core.compute_path import KernelName
from .self_test import SelfTested, not_applicable, self_tested

FLAG = b"_ZZN3mlx4core2cu12_GLOBAL__N_115use_cuda_graphsEvE10use_graphs"
"""Symbol of the variable `use_graphs` of MLX's function `use_cuda_graphs`."""
DECIDED = b"_ZGVZN3mlx4core2cu12_GLOBAL__N_115use_cuda_graphsEvE10use_graphs"
"""Symbol of the byte that says whether that function has been called."""
_MAPS = Path("/proc/self/maps")
_HEADER = np.dtype(
    [
        *[("magic", "S4"), ("bits", "u1"), ("order", "u1"), ("", "V34")],
        *[("sections", "<u8"), ("", "V12"), ("count", "<u2"), ("", "V2")],
    ]
)
"""A file in the Executable and Linking Format (ELF), of 64 bits: where its sections begin, and how many there are."""
_SECTION = np.dtype(
    [("", "V4"), ("type", "<u4"), ("", "V16"), ("start", "<u8"), ("size", "<u8"), ("link", "<u4"), ("", "V20")]
)
_SYMBOL = np.dtype([("name", "<u4"), ("", "V4"), ("value", "<u8"), ("", "V8")])
_SYMBOL_TABLE = 2


class GraphSwitch:
    """MLX's variable in a `library` that is loaded. Raises ValueError where it isn't found."""

    def __init__(self, library: Path) -> None:
        places = symbols(library, FLAG, DECIDED)
        base = _base(library)
        self._flag, self._decided = (ctypes.c_ubyte.from_address(base + place) for place in places)

    @property
    def on(self) -> bool:
        """Whether MLX uses graphs. Raises ValueError where it has not decided."""
        if self._decided.value != 1 or self._flag.value not in (0, 1):
            raise ValueError("MLX has not decided whether to use CUDA graphs")
        return self._flag.value == 1

    @contextmanager
    def single_launches(self) -> Iterator[None]:
        """Evaluate without graphs what is evaluated inside of the block, all of it."""
        self._flag.value = 0
        try:
            yield
        finally:
            self._flag.value = 1


def library_of_mlx() -> Path:
    """The file of MLX's own library."""
    return (Path(mx.__file__).parent / "lib" / "libmlx.so").resolve()


def has_switch(library: Path) -> bool:
    """Whether a library's symbols have the variable."""
    try:
        symbols(library, FLAG, DECIDED)
    except ValueError:
        return False
    return True


def graph_switch(library: Path) -> SelfTested[GraphSwitch]:
    """The switch with the outcome of its self-test. It does not apply to a library without the variable, or where MLX
    uses no graphs."""
    mx.eval(mx.zeros(1) + 1)  # MLX decides now
    try:
        switch = GraphSwitch(library)
        if not switch.on:
            return _none("MLX uses no CUDA graphs: MLX_USE_CUDA_GRAPHS is 0")
    except ValueError as error:
        return _none(f"all passes use CUDA graphs: {error}")
    instead = "all passes use CUDA graphs (prompts and images take the host longer)"
    return self_tested(KernelName.SINGLE_LAUNCHES, lambda: switch, _why_not, instead=instead)


def _none(reason: str) -> SelfTested[GraphSwitch]:
    return SelfTested(None, not_applicable(KernelName.SINGLE_LAUNCHES, reason))


def _why_not(switch: GraphSwitch) -> str:
    """Return what is wrong with numbers that are computed in turn with graphs and without; empty if nothing is."""
    numbers = mx.arange(257)
    for turn in range(4):
        if turn % 2:
            numbers = _doubled(numbers)
        else:
            with switch.single_launches():
                numbers = _doubled(numbers)
        if not switch.on:
            return "MLX stays without CUDA graphs"
    return "" if numbers.tolist() == [number * 16 for number in range(257)] else "its numbers are wrong"


def _doubled(numbers: Any) -> Any:
    doubled = numbers + numbers
    mx.eval(doubled)
    return doubled


@cache
def symbols(library: Path, *names: bytes) -> tuple[int, ...]:
    """Addresses of symbols in a library for 64 bits, from where it is loaded on. Raises ValueError where one is
    missing, or the file is another one."""
    try:
        data = np.memmap(library, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise ValueError(f"{library.name} can't be read: {error}") from error
    header = np.frombuffer(data[: _HEADER.itemsize].tobytes().ljust(_HEADER.itemsize, b"\0"), _HEADER)[0]
    if (header["magic"], header["bits"], header["order"]) != (b"\x7fELF", 2, 1):
        raise ValueError(f"{library.name} is no library of this system")
    sections = np.frombuffer(data, _SECTION, int(header["count"]), int(header["sections"]))
    tables = sections[sections["type"] == _SYMBOL_TABLE]
    if not len(tables):
        raise ValueError(f"{library.name} has no table of symbols")
    table, texts = tables[0], sections[tables[0]["link"]]
    text = data[int(texts["start"]) : int(texts["start"] + texts["size"])].tobytes()
    found = np.frombuffer(data, _SYMBOL, int(table["size"]) // _SYMBOL.itemsize, int(table["start"]))
    return tuple(_address(text, found, name, library) for name in names)


def _address(text: bytes, found: Any, name: bytes, library: Path) -> int:
    place = text.find(b"\0" + name + b"\0") + 1
    values: list[int] = found["value"][found["name"] == place].tolist() if place else []
    if len(values) != 1:
        raise ValueError(f"{library.name} has no symbol {name.decode()}")
    return values[0]


def _base(library: Path) -> int:
    """Where a library is loaded. Raises ValueError where it is not."""
    try:
        lines = [line.split(maxsplit=5) for line in _MAPS.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ValueError(f"{_MAPS} can't be read: {error}") from error
    for line in lines:
        if line[-1] == str(library) and int(line[2], 16) == 0:
            return int(line[0].partition("-")[0], 16)
    raise ValueError(f"{library.name} is not loaded")
