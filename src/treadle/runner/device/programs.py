"""Compiled programs of custom kernels: from this process, from the cache on disk, or from NVRTC.

MLX compiles a custom kernel with its own headers, a second and more for each, and keeps it for a process alone. A
program here has no headers but those of its types, and its machine code outlives the process: a second start compiles
nothing.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from ...core.compute_path import KernelPrograms
from ...environment import cache_folder
from .cubin_cache import CacheUnusable, CubinCache
from .image_names import Hash, library_hash, short_name
from .nvrtc import CompilationFailed, NvrtcMissing, find_nvrtc
from .program_text import NAME, KernelText, Sizes

_log = logging.getLogger(__name__)

FOLDER = "kernels"
"""Folder of the cache in the user's cache folder."""
_TRIAL = KernelText(("given",), ("made",), "", "made[threadIdx.x] = given[threadIdx.x] * 2 + given_shape[0];")
_NUMBERS = 32


class Compiler(Protocol):
    """The compiler of programs, as `Nvrtc`."""

    version: str
    headers: str

    def compile(self, text: str, name: str, options: Sequence[str]) -> bytes:
        """Return the machine code. Raises CompilationFailed."""


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program: the `cubin` with the function `name`, the `sizes` that it takes, and the shared memory of its
    blocks in bytes. Without a cubin MLX compiles it.

    MLX loads a cubin at its first launch and keeps it under the function's name, so the name is of one cubin alone. Of
    a program that was loaded, the cubin is a short text that MLX takes for it (`image_names`).
    """

    name: str
    cubin: bytes = field(default=b"", repr=False)
    sizes: Sizes = ()
    shared_memory: int = 0

    def launch(
        self, inputs: Sequence[Any], blocks: tuple[int, int], threads: int, shapes: Sequence[Any], dtypes: Sequence[Any]
    ) -> list[Any]:
        """Outputs of `shapes` and `dtypes` of `inputs`, which MLX copies where they are not contiguous."""
        scalars = [inputs[i].shape[dim] for i, dim in self.sizes]
        return self._launch(inputs, scalars, (blocks[0] * threads, blocks[1], 1), threads, shapes, dtypes)

    def load(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Let MLX load the program, for arrays of these types. Raises RuntimeError where it can't."""
        given = [mx.zeros(1, dtype) for dtype in inputs]
        mx.eval(self._launch(given, [0] * len(self.sizes), (1, 1, 2), 1, [(1,)] * len(outputs), outputs))

    def _launch(
        self,
        inputs: Sequence[Any],
        scalars: Sequence[int],
        grid: tuple[int, int, int],
        threads: int,
        shapes: Sequence[Any],
        dtypes: Sequence[Any],
    ) -> list[Any]:
        made: list[Any] = mx.fast.precompiled_cuda_kernel(
            name=self.name,
            compiled_source=self.cubin,
            inputs=inputs,
            output_shapes=shapes,
            output_dtypes=dtypes,
            scalars=scalars,
            grid=grid,
            threadgroup=(threads, 1, 1),
            shared_memory=self.shared_memory,
            ensure_row_contiguous=True,
        )
        return made


_OPTIONS = ("--device-as-default-execution-space",)
"""Options beside the architecture: NVRTC 13.0 takes generic lambdas inside kernels for host functions without it."""


class Programs:
    """The programs of a process for one device of `architecture`, such as sm_90. Without a `compiler` there are none,
    for the `reason`. Without `kept` none is kept on disk."""

    def __init__(
        self, compiler: Compiler | None, architecture: str, kept: CubinCache | None = None, *, reason: str = ""
    ) -> None:
        self._compiler = compiler
        self._options = (f"--gpu-architecture={architecture}", *_OPTIONS)
        self._kept = kept
        self._cubins: dict[str, bytes] = {}
        self._reasons = [f"compiled by MLX: {reason}"] if reason else []
        self._by_mlx: set[tuple[Any, ...]] = set()
        self._compiled = self._from_cache = 0
        self._seconds = 0.0
        self._hashed: Hash | None = None

    def name_shortly(self, hashed: Hash) -> None:
        """Let launches of loaded programs pass short texts, found by this hash, in place of machine code."""
        self._hashed = hashed

    def whole_at_launches(self, reason: str) -> None:
        """Report why launches pass all of a program's machine code."""
        self._reasons.append(f"launches take the host longer: {reason}")
        _log.warning("launches of custom kernels pass their whole machine code (%s): the host takes longer", reason)

    def get(self, label: str, text: str, sizes: Sizes, shared_memory: int) -> Program | None:
        """Return the program of `text`, whose function is called NAME there; None where it can't be compiled here, and
        MLX has to. One warning says why."""
        if self._compiler is None:
            return None
        key = self._key(self._compiler, text, shared_memory)
        if key not in self._cubins:
            self._cubins[key] = self._from_disk(key) or self._compiled_now(self._compiler, label, key, text)
        return Program(_name(label, key), cubin, sizes, shared_memory) if (cubin := self._cubins[key]) else None

    def loaded(self, program: Program, inputs: Sequence[Any], outputs: Sequence[Any]) -> Program:
        """Return `program` as launches pass it, for arrays of these types; MLX has loaded it where that is a short
        text. Raises RuntimeError where MLX can't."""
        if self._hashed is None:
            return program
        program.load(inputs, outputs)
        return replace(program, cubin=short_name(program.cubin, self._hashed))

    def left_to_mlx(self, name: str, types: Sequence[Any], template: Sequence[tuple[str, Any]]) -> Program:
        """Count a program that MLX compiles, with a kernel's name, types and template."""
        self._by_mlx.add((name, *types, *template))
        return Program(name)

    def report(self) -> KernelPrograms:
        """The programs so far."""
        return KernelPrograms(
            compiled=self._compiled,
            cached=self._from_cache,
            by_mlx=len(self._by_mlx),
            compile_s=round(self._seconds, 2),
            reasons=tuple(self._reasons),
        )

    def _key(self, compiler: Compiler, text: str, shared_memory: int) -> str:
        """Return the digest of all that decides a program."""
        parts = [compiler.version, compiler.headers, *self._options, shared_memory, text]
        return sha256(json.dumps(parts).encode()).hexdigest()

    def _from_disk(self, key: str) -> bytes:
        """Return the cubin of an earlier process; an empty one where there is none."""
        try:
            found = (self._kept and self._kept.get(key)) or b""
        except CacheUnusable as error:
            self._without_cache(error)
            return b""
        self._from_cache += bool(found)
        return found

    def _compiled_now(self, compiler: Compiler, label: str, key: str, text: str) -> bytes:
        """Return the cubin of `text`, and keep it; an empty one where the compiler refuses the text."""
        began = time.perf_counter()
        try:
            cubin = compiler.compile(text.replace(NAME, _name(label, key)), f"{label}.cu", self._options)
        except CompilationFailed as error:
            self._refused(label, str(error))
            return b""
        self._compiled += 1
        self._seconds += time.perf_counter() - began
        self._keep(key, cubin)
        return cubin

    def _keep(self, key: str, cubin: bytes) -> None:
        try:
            if self._kept is not None:
                self._kept.put(key, cubin)
        except CacheUnusable as error:
            self._without_cache(error)

    def _without_cache(self, error: CacheUnusable) -> None:
        """Go on without the folder, and say so once."""
        self._kept = None
        self._reasons.append(f"not kept on disk: {error}")
        _log.warning(
            "compiled kernels can't be kept on disk (%s): each start compiles them anew, some ten seconds; give this "
            "user a folder of its own there, or set XDG_CACHE_HOME",
            error,
        )

    def _refused(self, label: str, said: str) -> None:
        """Report a refusal, once for all types and templates of a kernel for which the compiler says the same."""
        line = next((line for line in said.splitlines() if "error" in line), said)[:300]
        if (reason := f"NVRTC refused {label}: {line}") in self._reasons:
            return
        self._reasons.append(reason)
        _log.warning("NVRTC refused the kernel %s (%s): MLX compiles it, at each start", label, line)


def _name(label: str, key: str) -> str:
    return f"treadle_{label}_{key[:32]}"


def programs_so_far() -> KernelPrograms:
    """Report of this process's programs; an empty one where no kernel was launched."""
    return kernel_programs().report() if kernel_programs.cache_info().currsize else KernelPrograms()


@cache
def kernel_programs() -> Programs:
    """The programs of this process for MLX's device; the first call tries one."""
    info = mx.device_info()
    architecture = f"sm_{info.get('compute_capability_major', 0)}{info.get('compute_capability_minor', 0)}"
    return tried(architecture, Path(mx.__file__).parent, os.environ)


def tried(architecture: str, mlx: Path, environment: Mapping[str, str]) -> Programs:
    """Programs by the NVRTC of MLX's folder, after a program was launched and returned the right numbers; else none,
    with a warning."""
    try:
        made = Programs(find_nvrtc(mlx, environment), architecture, CubinCache(cache_folder(environment) / FOLDER))
        reason = _why_not(made)
    except (NvrtcMissing, OSError, RuntimeError) as error:  # a user without a home has no cache folder
        reason = str(error)
    if not reason:
        _shorten(made)
        return made
    _log.warning(
        "custom kernels can't be compiled without MLX (%s): MLX compiles them at each start, which takes up to a "
        "minute; see `treadle doctor`",
        reason,
    )
    return Programs(None, architecture, reason=reason)


def _why_not(programs: Programs) -> str:
    """Return what is wrong with a launched program; empty if nothing is."""
    program = _trial(programs)
    if program is None:
        return "; ".join(programs.report().reasons)
    try:
        right = _is_right(program)
    except _OTHER_MLX as error:
        return f"MLX can't launch them: {_line(error)}"
    return "" if right else "a launched one returned wrong numbers"


def _shorten(programs: Programs) -> None:
    """Let launches pass short texts for programs, if the trial's program, which MLX has loaded, is found by one."""
    program = _trial(programs)
    if program is None:
        return
    try:
        hashed = library_hash()
        reason = "" if _is_right(replace(program, cubin=short_name(program.cubin, hashed))) else "wrong numbers"
    except (OSError, *_OTHER_MLX) as error:
        reason = _line(error)
    if reason:
        programs.whole_at_launches(reason)
    else:
        programs.name_shortly(hashed)


_OTHER_MLX = (AttributeError, TypeError, ValueError, RuntimeError)
"""What an MLX raises that launches in another way."""


def _trial(programs: Programs) -> Program | None:
    return programs.get("trial", _TRIAL.program([mx.int32], [], [mx.int32]), _TRIAL.sizes, 0)


def _is_right(program: Program) -> bool:
    given = mx.arange(_NUMBERS)
    (made,) = program.launch([given], (1, 1), _NUMBERS, [given.shape], [given.dtype])
    return bool(made.tolist() == [number * 2 + _NUMBERS for number in range(_NUMBERS)])


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
