"""Quantities as text. Memory has binary units everywhere, as `--memory 8GiB` does."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """Bytes as text: "0 B", "2 KiB", "511 MiB", "1.5 GiB". From a GiB on with one decimal."""
    power = 0
    while round(count) >= 1024 and power < len(_UNITS) - 1:
        count /= 1024
        power += 1
    return f"{count:.{int(power > 2)}f} {_UNITS[power]}"
