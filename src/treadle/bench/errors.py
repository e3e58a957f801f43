"""Error of a benchmark that can't be run, read or compared."""

from __future__ import annotations

from ..errors import TreadleError


class BenchError(TreadleError):
    """Error of one line with cause and fix; the command ends with a non-zero exit."""

    code = "bench_failed"
