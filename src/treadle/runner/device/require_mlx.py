"""The first import of MLX in a process. Everything that makes it impossible becomes one line with its cure."""

from __future__ import annotations

import logging

from ... import installation
from ...errors import StartFailed
from ...installation import Problem

_log = logging.getLogger(__name__)


def try_mlx() -> Problem | None:
    """Import MLX and compute on its device, on the calling thread; the problem where that fails.

    Call `blas.prepare` before. A doubtful installation that works all the same is logged as a warning.
    """
    try:
        import mlx.core as mx

        mx.eval(mx.zeros(1) + 1)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        _log.debug("MLX can't be used", exc_info=True)
        return installation.diagnose(error)
    if (doubt := installation.package_problem()) is not None:
        _log.warning("MLX works here, but %s; to mend that: %s", doubt.message, doubt.fix)
    return None


def require_mlx() -> None:
    """Import MLX and compute on its device. Raises StartFailed with the cause and the command that mends it."""
    if (found := try_mlx()) is not None:
        raise StartFailed(str(found))
