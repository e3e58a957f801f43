"""Scans of a JPEG, counted before it is decoded: each goes over all its pixels, also one of a few bytes."""

from __future__ import annotations

import re

MOST_SCANS = 100
"""Encoders write ten to some dozens."""
_SCAN, _END = 0xDA, 0xD9
_SEGMENT = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")
"""The markers that begin a segment, and that of the end. Others are parts of a scan."""


def has_too_many_scans(data: bytes) -> bool:
    """Whether a JPEG has more than MOST_SCANS scans in front of its end."""
    if data.count(b"\xff\xda") <= MOST_SCANS:
        return False
    scans = place = 0
    while scans <= MOST_SCANS and (found := _SEGMENT.search(data, place)):
        place, marker = found.end(), data[found.end() - 1]
        if marker == _END:
            break
        scans += marker == _SCAN
        place += max(2, int.from_bytes(data[place : place + 2]))
    return scans > MOST_SCANS
