"""The state of this installation: its origin, its missing parts, and the shell commands that mend it.

Only the metadata of installed packages is read, so any process may ask without importing MLX. A command works from
where Treadle was really installed: a checkout, a file, a URL. It never names Treadle on a package index, as no index is
known to have it.
"""

from __future__ import annotations

from .backend import (
    Problem,
    builds,
    diagnose,
    problem,
    reinstall_command,
    together,
    unsupported,
    unusable,
    version_of,
)
from .commands import backend_extra, install_command, pip_install, requirement
from .invoked import command
from .origin import version

__all__ = [
    "Problem",
    "backend_extra",
    "builds",
    "command",
    "diagnose",
    "install_command",
    "pip_install",
    "problem",
    "reinstall_command",
    "requirement",
    "together",
    "unsupported",
    "unusable",
    "version",
    "version_of",
]
