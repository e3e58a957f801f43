"""Lines in the log about fields that an API does not know and ignores, as new versions of its clients send new ones."""

from __future__ import annotations

from collections.abc import Iterable

from ..log_once import LogOnce


def report_unknown_fields(once: LogOnce, names: Iterable[str], api: str, page: str) -> None:
    """Log fields of a request to `api`, whose known ones are in `page` of the documents: each name `once`."""
    for name in names:
        once.warn(
            name,
            "the field %r of a request to %s is not known here and was ignored: leave it out, or use a field of %s",
            name,
            api,
            page,
        )
