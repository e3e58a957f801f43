"""What the doctor reads of this machine without MLX: system, cores, memory, limits, installed versions."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from ..runner import blas
from .findings import Finding, Mark, size

SYSTEM, SOFTWARE = "System", "Software"
FEW_FILES = 1024
_CGROUP = Path("/sys/fs/cgroup")
_BESIDE = ("tokenizers", "transformers", "huggingface_hub", "fastapi", "starlette", "uvicorn", "pydantic", "numpy")
_INSTALL = "pip install 'treadle[cpu]' (Linux), 'treadle[cuda]' (Linux with an NVIDIA GPU) or treadle (macOS)"


def system() -> list[Finding]:
    """The machine as the operating system shows it."""
    return [_platform(), _cores(), _memory(), _open_files()]


def software() -> list[Finding]:
    """Python and the packages that decide how things behave."""
    return [_python(), *_packages()]


def _platform() -> Finding:
    value = f"{platform.platform()} ({platform.machine()})"
    facts = {"system": platform.system(), "release": platform.release(), "machine": platform.machine()}
    if sys.platform == "darwin" and platform.machine() != "arm64":
        fix = "use an arm64 Python (on Apple silicon this one runs under Rosetta); MLX has no Intel build"
        return Finding(SYSTEM, "platform", value, Mark.FAIL, fix, facts)
    if sys.platform not in ("darwin", "linux"):
        return Finding(SYSTEM, "platform", value, Mark.FAIL, "use macOS or Linux (WSL counts)", facts)
    return Finding(SYSTEM, "platform", value, facts=facts)


def _cores() -> Finding:
    usable, there, quota = usable_cores(), os.cpu_count(), blas.cpu_quota(_CGROUP)
    value = f"{usable} usable" + ("" if usable == there else f" of {there}")
    if quota is not None:
        value += f", {quota:g} of them by the container's quota" if quota < usable else ""
    return Finding(SYSTEM, "CPU cores", value, facts={"usable": usable, "machine": there, "quota": quota})


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = memory_limit(_CGROUP)
    value = size(total) + (f", limited to {size(limit)} by the container" if limit and limit < total else "")
    return Finding(SYSTEM, "memory", value, facts={"total_bytes": total, "limit_bytes": limit})


def memory_limit(cgroup: Path) -> int | None:
    """The container's memory limit in bytes; None where there is none."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (cgroup / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() else None
    return None


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = {"soft": soft, "hard": hard}
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        value = f"{hard}: each connection takes one, and no more clients than that are taken"
        return Finding(SYSTEM, "open files", value, Mark.WARN, "ulimit -Hn 8192 before the start", facts)
    most = "no limit" if hard == resource.RLIM_INFINITY else f"up to {hard}"
    return Finding(SYSTEM, "open files", most, facts=facts)


def _python() -> Finding:
    version = platform.python_version()
    facts = {"version": version, "implementation": platform.python_implementation()}
    return Finding(SOFTWARE, "Python", f"{version} ({platform.python_implementation()})", facts=facts)


def _packages() -> Iterator[Finding]:
    for name in ("treadle", "mlx", "mlx-lm"):
        version = version_of(name)
        if version is None:
            yield Finding(SOFTWARE, name, "not installed", Mark.FAIL, _INSTALL)
        elif name == "mlx":
            yield _mlx(version)
        else:
            yield Finding(SOFTWARE, name, version, facts={"version": version})
    beside = {name: version for name in _BESIDE if (version := version_of(name))}
    yield Finding(SOFTWARE, "beside", ", ".join(f"{name} {v}" for name, v in beside.items()), facts=beside)


def _mlx(version: str) -> Finding:
    builds = {name: found for name in _mlx_builds() if (found := version_of(name))}
    value = version + (f" ({', '.join(f'{name} {v}' for name, v in builds.items())})" if builds else "")
    facts = {"version": version, "builds": builds}
    if not builds:
        return Finding(SOFTWARE, "mlx", f"{value}, without a build for any device", Mark.FAIL, _INSTALL, facts)
    if len(builds) > 1:
        fix = f"pip uninstall {' '.join(builds)}, then install one of treadle[cpu] and treadle[cuda] again"
        return Finding(SOFTWARE, "mlx", f"{value}: two builds share one library file", Mark.WARN, fix, facts)
    others = {v for v in builds.values() if v != version}
    if others:
        fix = f"pip install --upgrade mlx=={version} {next(iter(builds))}=={version}"
        return Finding(SOFTWARE, "mlx", f"{value}: the parts' versions differ", Mark.WARN, fix, facts)
    return Finding(SOFTWARE, "mlx", value, facts=facts)


def _mlx_builds() -> list[str]:
    names = {str(found.metadata["Name"]).lower() for found in metadata.distributions()}
    return sorted(name for name in names if name.startswith(("mlx-metal", "mlx-cpu", "mlx-cuda")))


def version_of(name: str) -> str | None:
    """The installed version of a package; None when it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
