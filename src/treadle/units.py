"""Quantities as text. Bytes have binary units everywhere, as in `--memory 8GiB`."""

from __future__ import annotations

import math

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """Format bytes: "0 B", "2.0 KiB", "511 MiB", "10.5 GiB"."""
    power = _power(count)
    return f"{_scaled(count, power)} {_UNITS[power]}"


def portion(done: float, total: float) -> str:
    """Format bytes out of bytes, in the unit of the total: "1.1 of 2.6 GiB"."""
    power = _power(total)
    return f"{_scaled(done, power)} of {_scaled(total, power)} {_UNITS[power]}"


def duration(seconds: float) -> str:
    """A time to wait as text: "1 ms", "430 ms", "1.4 s", "45 s", "10 min"."""
    if seconds < 0.9995:
        return f"{max(1, math.ceil(1000 * seconds - 0.5))} ms"
    if seconds < 119.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


def count(number: float) -> str:
    """Format a large number: "268 M", "1.72 B"."""
    for unit in ("", " K", " M"):
        if number < 1000:
            return f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.2f} B"


def _power(count: float) -> int:
    """Return the power of 1024 that leaves a number below 1024 after rounding."""
    power = 0
    while round(count) >= 1024 and power < len(_UNITS) - 1:
        count /= 1024
        power += 1
    return power


def _scaled(count: float, power: int) -> str:
    value = count / 1024**power
    return f"{value:.1f}" if power > 2 or (power and value < 9.95) else f"{value:.0f}"
