"""Grammars that text workers have checked: those that passed, and those that cost a worker its process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ...errors import InvalidRequest

MAX_GRAMMARS = 1024
REFUSED_S = 300.0
"""Seconds for which a refusal is repeated: on a busy machine a grammar may just have missed a limit."""


class CheckedGrammars:
    """Results of the MAX_GRAMMARS grammars used last, by their digests."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refusals: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def passed(self, digest: bytes) -> None:
        """Remember a grammar that passed."""
        self._remember(digest, "")

    def broke_a_limit(self, digest: bytes, message: str) -> None:
        """Remember a grammar whose check broke a limit, and the message of its refusal."""
        self._remember(digest, message)

    def is_new(self, digest: bytes) -> bool:
        """Whether it is unknown what the check of a grammar takes. b"" stands for none."""
        return digest != b"" and digest not in self._refusals

    def refusal(self, digest: bytes) -> InvalidRequest | None:
        """Return the refusal of a grammar that broke a limit before."""
        message, since = self._refusals.get(digest, ("", 0.0))
        if not message:
            return None
        if self._clock() - since > REFUSED_S:
            del self._refusals[digest]
            return None
        return InvalidRequest(message)

    def _remember(self, digest: bytes, message: str) -> None:
        if digest:
            self._refusals[digest] = (message, self._clock())
            self._refusals.move_to_end(digest)
            if len(self._refusals) > MAX_GRAMMARS:
                self._refusals.popitem(last=False)
