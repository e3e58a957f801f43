"""What can keep a benchmark from being run, read or compared."""

from __future__ import annotations

from ..errors import TreadleError


class BenchError(TreadleError):
    """One line with cause and fix; the command ends with a non-zero exit."""

    code = "bench_failed"
