"""The installed packages of MLX: whether they can work together here, told without importing MLX.

`mlx` is the Python side. The library itself, libmlx, comes with a build for one kind of device: `mlx-metal`, `mlx-cpu`
or `mlx-cuda-*`. All builds own the same file, so two of them overwrite each other.
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

LEAST_GLIBC = (2, 35)
"""What MLX's builds for Linux are made for."""
IMPORT_S = 60.0
_BUILDS = ("mlx-metal", "mlx-cpu", "mlx-cuda")
_NO_DRIVER = "libcuda.so"


@dataclass(frozen=True)
class Problem:
    """`what` is wrong and the `fix`, a shell command where one mends it. `extra` is the extra of Treadle that mends it,
    if one does. `certain`: MLX can't work; else it may."""

    what: str
    fix: str
    extra: str = ""
    certain: bool = True

    def __str__(self) -> str:
        return f"{self.what}: {self.fix}"


def reinstall_command() -> str:
    """The shell command that installs MLX anew as it is, or for this machine where it is not there at all."""
    return _reinstall({"mlx": version_of("mlx") or "", **builds()})


def backend_command() -> str:
    """The shell command that installs MLX for this machine."""
    extra = backend_extra()
    return install_command(extra) if extra else pip_install(requirement("mlx"))


def together(problems: Sequence[Problem]) -> str:
    """Several problems in one line; one command mends all those that an extra mends."""
    extras = [one.extra for one in problems if one.extra]
    others = [str(one) for one in problems if not one.extra]
    if not extras:
        return "; ".join(others)
    missing = ", ".join(one.what for one in problems if one.extra)
    return "; ".join([*others, f"{missing}: {install_command(*extras)}"])


def builds() -> dict[str, str]:
    """The installed builds of MLX's library, with their versions."""
    found = ((str(one.metadata["Name"] or "").lower(), one.version) for one in metadata.distributions())
    return {name: version for name, version in sorted(found) if name.startswith(_BUILDS)}


def unsupported() -> Problem | None:
    """What of the operating system and the processor keeps MLX from being installed."""
    machine = platform.machine()
    if sys.platform == "darwin":
        if machine == "arm64":
            return None
        fix = "use an arm64 Python (on Apple silicon this one runs under Rosetta)"
        return Problem("MLX has no build for Intel Macs", fix)
    if sys.platform != "linux":
        return Problem(f"MLX has no build that Treadle can use on {platform.system()}", "use macOS or Linux (or WSL)")
    name, _, number = " ".join(platform.libc_ver()).partition(" ")
    if name == "glibc" and _numbers(number) < LEAST_GLIBC:
        fix = "use a newer system, such as Debian 12, Ubuntu 22.04 or RHEL 10"
        return Problem(f"MLX's Linux builds need glibc 2.35 or newer, and this is {number}", fix)
    if name != "glibc" or machine not in ("x86_64", "aarch64"):
        fix = "use glibc (not musl) on x86_64 or aarch64"
        return Problem(f"MLX has no Linux build for {machine} with {name or 'this C library'}", fix)
    return None


def problem(installed: Mapping[str, str] | None = None) -> Problem | None:
    """The first thing that is wrong with the installed packages of MLX; None where nothing is.

    `installed` are the builds with their versions; by default those that are.
    """
    built = builds() if installed is None else installed
    version = version_of("mlx")
    if version is None:
        return _missing()
    if (least := _least()) is not None and _number(version) < least:
        return _too_old(version, least)
    if not built:
        return None if _has_library() else _without_build(version)
    if len(built) > 1:
        return _several(built)
    return _mismatch(version, *next(iter(built.items())))


def unusable() -> Problem | None:
    """What keeps MLX from being imported. Where its metadata leaves that in doubt another process tries it, for at most
    IMPORT_S seconds."""
    found = problem()
    if found is not None and found.certain:
        return found
    if found is None and not _is_cuda_without_gpu():
        return None
    said = _import_error()
    return diagnose(ImportError(said)) if said else None


def diagnose(error: BaseException) -> Problem:
    """The cause of `error`, which importing or first using MLX raised."""
    line = " ".join(str(error).split())[:300]
    if _NO_DRIVER in line:
        fix = f"install NVIDIA's driver, or for the CPU: {pip_uninstall(*builds())} && {install_command('cpu')}"
        return Problem("MLX's CUDA build needs NVIDIA's driver, which was not found (libcuda.so.1)", fix)
    if (found := problem()) is not None:
        return found
    if isinstance(error, RuntimeError):
        return Problem(f"MLX can't compute on its device ({line})", _check_device(builds()))
    return Problem(f"MLX can't be imported ({line or type(error).__name__})", reinstall_command())


def version_of(name: str) -> str | None:
    """The installed version of a package; None when it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _missing() -> Problem | None:
    """MLX is not among the installed packages. One that is importable all the same is left to itself."""
    if importlib.util.find_spec("mlx") is not None and importlib.util.find_spec("mlx.core") is not None:
        return None
    return unsupported() or Problem("MLX is not installed", backend_command(), backend_extra())


def _too_old(version: str, least: Version) -> Problem:
    return Problem(f"MLX {version} is older than the {least} that Treadle needs", backend_command(), backend_extra())


def _without_build(version: str) -> Problem:
    what = f"MLX {version} is installed without a build for any device (libmlx is missing)"
    return Problem(what, backend_command(), backend_extra(), certain=False)


def _several(built: Mapping[str, str]) -> Problem:
    what = f"{' and '.join(built)} are both installed and overwrite each other's library"
    return Problem(what, f"{pip_uninstall(*built)} && {backend_command()}", certain=False)


def _mismatch(version: str, build: str, its: str) -> Problem | None:
    newest = max(version, its, key=_number)
    fix = _reinstall({"mlx": newest, build: newest})
    if its != version:
        return Problem(f"mlx {version} and {build} {its} differ", fix, certain=False)
    return Problem(f"the library file of {build} is missing", fix) if _has_lost_library(build) else None


def _reinstall(packages: Mapping[str, str]) -> str:
    """The shell command that installs `packages` anew at the given versions, and nothing else."""
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
    """The last line that another process says when it can't import MLX; empty where it can, or does not end."""
    try:
        command = [sys.executable, "-c", "import mlx.core"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode == 0:
        return ""
    last = done.stderr.strip().rpartition("\n")[2]
    return last.removeprefix("ImportError: ") or f"exit status {done.returncode}"


def _has_lost_library(build: str) -> bool:
    """Whether a file that `build` installed as libmlx is gone, as after another build was removed."""
    files = metadata.distribution(build).files or ()
    return any(file.name.startswith("libmlx.") and not Path(str(file.locate())).exists() for file in files)


def _has_library() -> bool:
    """Whether libmlx lies where MLX's packages put it. Builds from source may have it elsewhere."""
    spec = importlib.util.find_spec("mlx")
    folders = (spec.submodule_search_locations if spec else None) or ()
    return any(any(Path(folder, "lib").glob("libmlx.*")) for folder in folders)


def _least() -> Version | None:
    """The oldest MLX that Treadle's requirements admit."""
    bounds = [one.version for one in Requirement(requirement("mlx")).specifier if one.operator == ">="]
    return Version(bounds[0]) if bounds else None


def _number(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        return Version("99999")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
