"""Warnings about requests: each once, and a bounded number of them."""

from __future__ import annotations

import logging
from collections.abc import Hashable

MOST = 64


class LogOnce:
    """Warnings of one logger, each distinct one once. Clients repeat their requests, and hostile ones vary them: behind
    MOST warnings one line reports the end of them."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged: set[Hashable] = set()

    def warn(self, key: Hashable, message: str, *args: object) -> None:
        """Log a warning, unless one with `key` was logged."""
        if key in self._logged or len(self._logged) > MOST:
            return
        self._logged.add(key)
        if len(self._logged) <= MOST:
            self._log.warning(message, *args)
        else:
            self._log.warning(
                "requests gave %d different warnings here: further ones are not logged until the next start", MOST
            )
