"""Checks of MLX's installed packages by their metadata, without importing MLX.

`mlx` is the Python package. The library, libmlx, comes with a build for one kind of device: `mlx-metal`, `mlx-cpu` or
`mlx-cuda-*`. All builds own the same file, so two of them overwrite each other.
"""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from .commands import backend_extra, install_command, pip_install, pip_uninstall, requirement
from .invoked import command

MIN_GLIBC = (2, 35)
"""The glibc version required by MLX's builds for Linux."""
IMPORT_S = 60.0
_BUILDS = ("mlx-cpu", "mlx-cuda", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal")
_NO_DRIVER = "libcuda.so"


@dataclass(frozen=True)
class Problem:
    """A problem of the installation.

    `message`: the fault. `fix`: the cure, a shell command if there is one. `extra`: Treadle's extra that fixes it, if
    any. `certain`: MLX can't work; otherwise it may.
    """

    message: str
    fix: str
    extra: str = ""
    certain: bool = True

    def __str__(self) -> str:
        return f"{self.message}: {self.fix}"


def reinstall_command() -> str:
    """Return the shell command that reinstalls MLX at its version, or installs it for this machine if it is missing."""
    return _reinstall({"mlx": version_of("mlx") or "", **builds()})


def backend_command() -> str:
    """Return the shell command that installs MLX for this machine."""
    extra = backend_extra()
    return install_command(extra) if extra else pip_install(requirement("mlx"))


def combine(problems: Sequence[Problem]) -> str:
    """Format several problems in one line, with a single command for those that an extra fixes."""
    extras = [one.extra for one in problems if one.extra]
    without_extra = [str(one) for one in problems if not one.extra]
    if not extras:
        return "; ".join(without_extra)
    missing = ", ".join(one.message for one in problems if one.extra)
    return "; ".join([*without_extra, f"{missing}: {install_command(*extras)}"])


def builds() -> dict[str, str]:
    """Return the installed builds of MLX's library and their versions."""
    return {name: version for name in _BUILDS if (version := version_of(name)) is not None}


def platform_problem() -> Problem | None:
    """Return the reason why MLX has no build for this operating system and processor; None if it has one."""
    machine = platform.machine()
    if sys.platform == "darwin":
        if machine == "arm64":
            return None
        fix = "use an arm64 Python (on Apple silicon this one runs under Rosetta)"
        return Problem("MLX has no build for Intel Macs", fix)
    if sys.platform != "linux":
        return Problem(f"MLX has no build that Treadle can use on {platform.system()}", "use macOS or Linux (or WSL)")
    name, _, number = " ".join(platform.libc_ver()).partition(" ")
    if name == "glibc" and _numbers(number) < MIN_GLIBC:
        fix = "use a newer system, such as Debian 12, Ubuntu 22.04 or RHEL 10"
        return Problem(f"MLX's Linux builds need glibc 2.35 or newer, and this is {number}", fix)
    if name != "glibc" or machine not in ("x86_64", "aarch64"):
        fix = "use glibc (not musl) on x86_64 or aarch64"
        return Problem(f"MLX has no Linux build for {machine} with {name or 'this C library'}", fix)
    return None


def package_problem(installed: Mapping[str, str] | None = None) -> Problem | None:
    """Return the first problem of MLX's installed packages; None if there is none.

    `installed`: builds and their versions (default: the installed ones).
    """
    built = builds() if installed is None else installed
    version = version_of("mlx")
    if version is None:
        return _missing()
    if (minimum := _min_version()) is not None and _number(version) < minimum:
        return _too_old(version, minimum)
    if not built:
        return None if _has_library() else _without_build(version)
    if len(built) > 1:
        return _conflicting_builds(built)
    return _mismatch(version, *next(iter(built.items())))


def blocking_problem() -> Problem | None:
    """Return the problem that prevents importing MLX; None if there is none. If the metadata is inconclusive, another
    process tries the import, for at most IMPORT_S seconds."""
    found = package_problem()
    if found is not None and found.certain:
        return found
    if found is None and not _is_cuda_without_gpu():
        return None
    error_line = _import_error()
    return diagnose(ImportError(error_line)) if error_line else None


def diagnose(error: BaseException) -> Problem:
    """Return the cause of an error raised by importing or first using MLX."""
    line = " ".join(str(error).split())[:300]
    if _NO_DRIVER in line:
        fix = f"install NVIDIA's driver, or for the CPU: {pip_uninstall(*builds())} && {install_command('cpu')}"
        return Problem("MLX's CUDA build needs NVIDIA's driver, which was not found (libcuda.so.1)", fix)
    if (found := package_problem()) is not None:
        return found
    if isinstance(error, RuntimeError):
        return Problem(f"MLX can't compute on its device ({line})", _check_device(builds()))
    return Problem(f"MLX can't be imported ({line or type(error).__name__})", reinstall_command())


def version_of(name: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _missing() -> Problem | None:
    """Return the problem of a missing MLX; None if it can be imported without being installed as a package."""
    if importlib.util.find_spec("mlx") is not None and importlib.util.find_spec("mlx.core") is not None:
        return None
    return platform_problem() or Problem("MLX is not installed", backend_command(), backend_extra())


def _too_old(version: str, minimum: Version) -> Problem:
    return Problem(f"MLX {version} is older than the {minimum} that Treadle needs", backend_command(), backend_extra())


def _without_build(version: str) -> Problem:
    message = f"MLX {version} is installed without a build for any device (libmlx is missing)"
    return Problem(message, backend_command(), backend_extra(), certain=False)


def _conflicting_builds(built: Mapping[str, str]) -> Problem:
    message = f"{' and '.join(built)} are both installed and overwrite each other's library"
    return Problem(message, f"{pip_uninstall(*built)} && {backend_command()}", certain=False)


def _mismatch(version: str, build: str, its: str) -> Problem | None:
    newest = max(version, its, key=_number)
    fix = _reinstall({"mlx": newest, build: newest})
    if its != version:
        return Problem(f"mlx {version} and {build} {its} differ", fix, certain=False)
    return Problem(f"the library file of {build} is missing", fix) if _library_is_missing(build) else None


def _reinstall(packages: Mapping[str, str]) -> str:
    """Return the shell command that reinstalls `packages` at the given versions, without dependencies."""
    pinned = [f"{name}=={version}" for name, version in packages.items() if version]
    return pip_install("--force-reinstall", "--no-deps", *pinned) if pinned else backend_command()


def _check_device(built: Mapping[str, str]) -> str:
    if "mlx-cuda-13" in built:
        return "check NVIDIA's driver with nvidia-smi (CUDA 13 needs 580 or newer)"
    if any(name.startswith("mlx-cuda") for name in built):
        return "check NVIDIA's driver with nvidia-smi"
    return f"{command()} doctor says what this machine has; on a Mac without Metal (a virtual machine) MLX does not run"


def _is_cuda_without_gpu() -> bool:
    return backend_extra() == "cpu" and any(name.startswith("mlx-cuda") for name in builds())


def _import_error() -> str:
    """Return the last error line of another process that imports MLX; "" if it succeeds or does not end in time."""
    try:
        command = [sys.executable, "-c", "import mlx.core"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode == 0:
        return ""
    last = done.stderr.strip().rpartition("\n")[2]
    return last.removeprefix("ImportError: ") or f"exit status {done.returncode}"


def _library_is_missing(build: str) -> bool:
    """Whether the libmlx file of `build` is missing, as after the removal of another build."""
    files = metadata.distribution(build).files or ()
    return any(file.name.startswith("libmlx.") and not Path(str(file.locate())).exists() for file in files)


def _has_library() -> bool:
    """Whether libmlx is where MLX's packages install it. Builds from source may have it elsewhere."""
    spec = importlib.util.find_spec("mlx")
    folders = (spec.submodule_search_locations if spec else None) or ()
    return any(any(Path(folder, "lib").glob("libmlx.*")) for folder in folders)


def _min_version() -> Version | None:
    """Return the oldest MLX version that Treadle's requirements allow."""
    bounds = [one.version for one in Requirement(requirement("mlx")).specifier if one.operator == ">="]
    return Version(bounds[0]) if bounds else None


def _number(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        return Version("99999")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
