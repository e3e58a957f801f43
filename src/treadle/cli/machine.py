"""Facts of this machine for the doctor, read without MLX: system, cores, memory, limits, installed versions."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator

from .. import installation
from ..installation import version_of
from ..runner.device import blas
from ..runner.device.cgroups import limited_groups
from ..units import size
from .findings import Finding, Mark

SYSTEM, SOFTWARE = "System", "Software"
MIN_FILES = 1024
_FURTHER = ("tokenizers", "transformers", "huggingface_hub", "fastapi", "starlette", "uvicorn", "pydantic", "numpy")


def system() -> list[Finding]:
    """Return the findings about the machine, from the operating system."""
    return [_platform(), _cores(), _memory(), _open_files()]


def software() -> list[Finding]:
    """Return the findings about Python and the packages that decide behaviour."""
    return [_python(), *_packages()]


def _platform() -> Finding:
    value = f"{platform.platform()} ({platform.machine()})"
    facts = {"system": platform.system(), "release": platform.release(), "machine": platform.machine()}
    if (found := installation.platform_problem()) is not None:
        # an MLX that is installed all the same was built for this machine
        mark = Mark.FAIL if version_of("mlx") is None else Mark.WARN
        return Finding(SYSTEM, "platform", f"{value}: {found.message}", mark, found.fix, facts)
    return Finding(SYSTEM, "platform", value, facts=facts)


def _cores() -> Finding:
    usable, there, quota = usable_cores(), os.cpu_count(), blas.cpu_quota()
    value = f"{usable} usable" + ("" if usable == there else f" of {there}")
    if quota is not None:
        value += f", {quota:g} of them by the container's quota" if quota < usable else ""
    return Finding(SYSTEM, "CPU cores", value, facts={"usable": usable, "machine": there, "quota": quota})


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = min((group.limit for group in limited_groups()), default=None)
    value = size(total) + (f", limited to {size(limit)} by its control group" if limit and limit < total else "")
    return Finding(SYSTEM, "memory", value, facts={"total_bytes": total, "limit_bytes": limit})


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = {"soft": soft, "hard": hard}
    if hard != resource.RLIM_INFINITY and hard < MIN_FILES:
        value = f"{hard}: each connection takes one, and no more clients than that are taken"
        return Finding(SYSTEM, "open files", value, Mark.WARN, "ulimit -Hn 8192 before the start", facts)
    limit_text = "no limit" if hard == resource.RLIM_INFINITY else f"up to {hard}"
    return Finding(SYSTEM, "open files", limit_text, facts=facts)


def _python() -> Finding:
    version = platform.python_version()
    facts = {"version": version, "implementation": platform.python_implementation()}
    return Finding(SOFTWARE, "Python", f"{version} ({platform.python_implementation()})", facts=facts)


def _packages() -> Iterator[Finding]:
    for name in ("treadle", "mlx", "mlx-lm"):
        yield _mlx() if name == "mlx" else _package(name)
    further = {name: version for name in _FURTHER if (version := version_of(name))}
    yield Finding(SOFTWARE, "beside", ", ".join(f"{name} {v}" for name, v in further.items()), facts=further)


def _package(name: str) -> Finding:
    version = installation.version() if name == "treadle" else version_of(name)
    if version is None:
        fix = installation.pip_install(installation.requirement(name))
        return Finding(SOFTWARE, name, "not installed", Mark.FAIL, fix)
    return Finding(SOFTWARE, name, version, facts={"version": version})


def _mlx() -> Finding:
    """Return the finding about the installed MLX. A doubtful build is a warning: the probe tries it."""
    version, builds, problem = version_of("mlx"), installation.builds(), installation.package_problem()
    value = version or "not installed"
    value += f" ({', '.join(f'{name} {v}' for name, v in builds.items())})" if builds else ""
    facts = {"version": version, "builds": builds}
    if problem is None:
        return Finding(SOFTWARE, "mlx", value, facts=facts)
    mark = Mark.FAIL if problem.certain else Mark.WARN
    value = problem.message if version is None else f"{value}: {problem.message}"
    return Finding(SOFTWARE, "mlx", value, mark, problem.fix, facts)
