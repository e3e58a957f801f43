"""Regular expressions of the integers of a range."""

from __future__ import annotations


def integers_between(least: int, most: int) -> str:
    """Return the regular expression of the integers from `least` to `most`, which is not below it, in decimal."""
    parts = []
    if least < 0:
        parts.append(f"-({_naturals(max(1, -most), -least)})")
    if most >= 0:
        parts.append(_naturals(max(0, least), most))
    return f"({'|'.join(parts)})"


def _naturals(least: int, most: int) -> str:
    parts = []
    for digits in range(len(str(least)), len(str(most)) + 1):
        first, last = max(least, 10 ** (digits - 1) if digits > 1 else 0), min(most, 10**digits - 1)
        parts.append(_of_length(str(first), str(last)))
    return "|".join(parts)


def _of_length(first: str, last: str) -> str:
    """Return the expression of the numbers from `first` to `last`, which have the same number of digits."""
    if not first:
        return ""
    rest = len(first) - 1
    if first[0] == last[0]:
        return first[0] + _of_length(first[1:], last[1:])
    low, high, parts = int(first[0]), int(last[0]), []
    if first[1:] != "0" * rest:
        parts.append(first[0] + _of_length(first[1:], "9" * rest))
        low += 1
    if last[1:] != "9" * rest:
        parts.append(last[0] + _of_length("0" * rest, last[1:]))
        high -= 1
    if low <= high:
        parts.append(f"[{low}-{high}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return f"({'|'.join(parts)})"
