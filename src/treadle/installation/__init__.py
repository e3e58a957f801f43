"""State of this installation: its origin, missing packages, and the shell commands that fix it.

Only metadata of installed packages is read, so no process needs to import MLX for it. The commands install from where
Treadle was installed: a checkout, a file, a URL. They never name Treadle on a package index, as no index is known to
have it.
"""

from __future__ import annotations

from .backend import (
    Problem,
    blocking_problem,
    builds,
    combine,
    diagnose,
    package_problem,
    platform_problem,
    reinstall_command,
    version_of,
)
from .commands import backend_extra, install_command, pip_install, requirement
from .grpc_packages import diagnose_grpc
from .invoked import command
from .origin import version

__all__ = [
    "Problem",
    "backend_extra",
    "blocking_problem",
    "builds",
    "combine",
    "command",
    "diagnose",
    "diagnose_grpc",
    "install_command",
    "package_problem",
    "pip_install",
    "platform_problem",
    "reinstall_command",
    "requirement",
    "version",
    "version_of",
]
