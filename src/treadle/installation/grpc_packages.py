"""The installed packages of gRPC: which of them keeps the gRPC front from being imported, and the cure."""

from __future__ import annotations

from packaging.requirements import Requirement
from packaging.version import Version

from .backend import Problem, version_of
from .commands import pip_install, requirement

PACKAGES = ("grpcio", "grpcio-health-checking", "grpcio-reflection", "smg-grpc-proto")


def diagnose_grpc(error: BaseException) -> Problem:
    """Return the cause of `error`, which importing the gRPC front raised."""
    for package in PACKAGES:
        version, needed = version_of(package), requirement(package)
        if version is None:
            return Problem(f"{package} is not installed", pip_install(needed))
        if not Requirement(needed).specifier.contains(Version(version), prereleases=True):
            wanted = needed.removeprefix(package)
            return Problem(f"{package} {version} is installed and Treadle needs {wanted}", pip_install(needed))
    line = " ".join(str(error).split())[:300] or type(error).__name__
    fix = pip_install("--upgrade", "protobuf", *map(requirement, PACKAGES))
    return Problem(f"gRPC can't be imported ({line})", fix)
