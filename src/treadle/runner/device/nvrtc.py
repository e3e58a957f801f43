"""NVRTC, CUDA's runtime compiler, called through ctypes: the text of kernels to machine code (a cubin)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_SYSTEM = "/usr/local/cuda"
_HEADERS = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp")
_TARGETS = "nv/target"
"""A header of CCCL that `cuda_fp16.h` includes."""


class NvrtcMissing(Exception):
    """NVRTC, or a header that the kernels need, can't be found or called."""


class CompilationFailed(Exception):
    """NVRTC refused a text; the message is its log."""


class Nvrtc:
    """The compiler in `library`, with `includes` as folders of headers. Calls release the GIL, and threads may compile
    at the same time.

    `version` and `headers`, a digest of the headers, decide the machine code beside a text and its options.
    """

    def __init__(self, library: Any, includes: Sequence[Path]) -> None:
        self._library = library
        self._includes = includes
        self.version = self._version()
        self.headers = _digest(includes)

    def compile(self, text: str, name: str, options: Sequence[str]) -> bytes:
        """Return the cubin of `text`, called `name` in messages. Raises CompilationFailed."""
        program = ctypes.c_void_p()
        self._check("nvrtcCreateProgram", ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
        try:
            flags = [*options, *(f"--include-path={folder}" for folder in self._includes)]
            words = (ctypes.c_char_p * len(flags))(*[os.fsencode(flag) for flag in flags])
            if self._library.nvrtcCompileProgram(program, len(flags), words):
                raise CompilationFailed(self._read("ProgramLog", program).rstrip(b"\0").decode(errors="replace"))
            return self._read("CUBIN", program)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        """Return the log or the cubin of a program."""
        size = ctypes.c_size_t()
        self._check(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        try:
            self._check("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        except (AttributeError, CompilationFailed) as error:
            raise NvrtcMissing(f"NVRTC can't be called: {error}") from error
        return f"{major.value}.{minor.value}"

    def _check(self, function: str, *arguments: Any) -> None:
        if code := getattr(self._library, function)(*arguments):
            raise CompilationFailed(f"{function} failed with error {code}")


def find_nvrtc(mlx: Path, environment: Mapping[str, str]) -> Nvrtc:
    """Return the NVRTC that MLX's CUDA build, in the folder `mlx`, has loaded into this process, with the headers that
    MLX uses. Raises NvrtcMissing."""
    return Nvrtc(_loaded(), find_headers(_header_folders(mlx, environment)))


def _loaded() -> Any:
    """The library of this process: a library of that name that is not loaded is not looked for."""
    for name in _SONAMES:
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
    raise NvrtcMissing(f"MLX has not loaded {' or '.join(_SONAMES)}")


def _header_folders(mlx: Path, environment: Mapping[str, str]) -> Iterable[Path]:
    """Folders that may have headers: MLX's own, those of NVIDIA's packages beside it, and an installed toolkit."""
    yield mlx / "include" / "cccl"
    for package in ("cu13", "cuda_runtime"):
        yield mlx.parent / "nvidia" / package / "include"
    toolkit = Path(environment.get("CUDA_HOME") or environment.get("CUDA_PATH") or _SYSTEM) / "include"
    yield from (toolkit, toolkit / "cccl")


def find_headers(folders: Iterable[Path]) -> list[Path]:
    """Return the first of `folders` with each header that kernels need. Raises NvrtcMissing."""
    possible, found = list(folders), []
    for header in (_TARGETS, _HEADERS[0]):
        folder = next((folder for folder in possible if (folder / header).is_file()), None)
        if folder is None:
            looked = ", ".join(map(str, possible))
            raise NvrtcMissing(f"{header} is in none of {looked}; install nvidia-cuda-runtime, or set CUDA_HOME")
        found.append(folder)
    return list(dict.fromkeys(found))


def _digest(includes: Sequence[Path]) -> str:
    """Return a digest of the headers with the types of kernels' arrays."""
    digest = sha256()
    for name in _HEADERS:
        for path in (folder / name for folder in includes):
            if path.is_file():
                digest.update(path.read_bytes())
    return digest.hexdigest()
