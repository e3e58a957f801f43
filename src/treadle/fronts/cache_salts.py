"""Salts of the prefix cache: a request reuses only cached prompts of its own API key and `cache_salt`.

A salt is a keyed hash under a secret of this process. So no client can name another's salt, and neither keys nor salts
can be read from data that reaches the engine.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from ..errors import InvalidRequest

DIGEST_BYTES = 16
MAX_CHARS = 256
CONTROLS = "\\x00-\\x1f\\x7f-\\x9f"
_SALT = re.compile(f"[^{CONTROLS}\\ud800-\\udfff]{{1,{MAX_CHARS}}}")


@dataclass(frozen=True)
class Salts:
    """Source of salts, made once per server, for all its fronts."""

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def tenant(self, api_key: bytes = b"") -> bytes:
        """Return the digest that stands for the client with this API key; b"" is every client without one."""
        return blake2b(api_key, key=self.secret, digest_size=32, person=b"tenant").digest()

    def salt(self, tenant: bytes, cache_salt: str | None = None) -> str:
        """Return the salt under which a tenant's prompts are cached; with `cache_salt`, those of a part of its
        requests."""
        part = b"" if cache_salt is None else cache_salt.encode("utf-8")
        return blake2b(tenant + part, key=self.secret, digest_size=DIGEST_BYTES, person=b"salt").hexdigest()


def check_cache_salt(value: Any) -> str | None:
    """Return the client's salt, if it sent one. Raises InvalidRequest unless it is 1 to MAX_CHARS characters, none of
    them a control character."""
    if value is None:
        return None
    if isinstance(value, str) and _SALT.fullmatch(value):
        return value
    description = f"a string of {len(value)} characters" if isinstance(value, str) else "no string"
    raise InvalidRequest(
        f"cache_salt is {description}: it must be a string of 1 to {MAX_CHARS} characters, without control characters",
        param="cache_salt",
    )
