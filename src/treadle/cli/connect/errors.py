"""Errors of `treadle connect`."""

from __future__ import annotations

from ...errors import TreadleError


class ConnectError(TreadleError):
    """A client's settings can't be read, changed or written."""

    code = "connect_failed"


class UnreadableSettings(ConnectError):
    """A settings file has a form that can't be changed safely. The message names the reason, without the file."""
