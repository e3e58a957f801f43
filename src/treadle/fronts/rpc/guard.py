"""Authentication of gRPC calls: the caller is found before a message is received.

A key comes as metadata, `authorization: Bearer KEY` or `x-api-key: KEY`; a wrong one is always refused. The SMG gateway
sends none: where keys are configured, a call without one is accepted from this machine, with a certificate that
`--grpc-client-ca` signed, or from anywhere with `--grpc-no-auth`; never with `--grpc-auth`. `grpc.health.v1` answers
every client.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from ...config import Settings
from ...core.refusals import Refusal
from ...errors import InvalidRequest, TreadleError
from ...host_names import is_this_machine
from ...keys import ALL, Scope
from ..authentication import USE, Authenticator, Caller
from .context import Context, host_of, refuse

OPEN = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
Metadata = Sequence[tuple[str, str | bytes]]

_CALLER: ContextVar[Caller] = ContextVar("treadle_grpc_caller")


def caller_of() -> Caller:
    """Return the caller of the current call."""
    return _CALLER.get()


class KeyGuard:
    """Admission of callers: those that `authenticator` knows, and those that the settings trust without a key."""

    def __init__(self, authenticator: Authenticator, settings: Settings) -> None:
        self._authenticator = authenticator
        self._key_required = settings.grpc_auth
        self._certified = settings.grpc_client_ca is not None
        self._key_optional = settings.grpc_no_auth

    def enter(self, context: Context, details: Any) -> None:
        """Find the caller of a call by its metadata. Raises NotAuthenticated, TooManyWrongKeys, InvalidRequest."""
        if details.method not in OPEN:
            peer = host_of(context)
            keys = _keys_in(details.invocation_metadata)
            _CALLER.set(self._authenticator.caller(keys, peer, keyless=self._trusted(peer)))

    def _trusted(self, peer: str) -> frozenset[Scope] | None:
        """Return the scopes of a caller without a key, where keys are configured; None if it is refused."""
        if self._key_required:
            return None
        if self._certified:
            return ALL
        return USE if self._key_optional or is_this_machine(peer) else None


async def check_admin(context: Context, authenticator: Authenticator, action: str) -> None:
    """End the call with PERMISSION_DENIED unless its caller may do `action`, which needs the scope admin."""
    try:
        caller_of().check_admin(action)
    except TreadleError as error:
        authenticator.refused(Refusal.INSUFFICIENT_SCOPE)
        await refuse(context, error)


def _keys_in(metadata: Metadata) -> tuple[bytes, ...]:
    """Return the keys in a call's metadata. Raises InvalidRequest if one kind comes twice."""
    given: dict[str, bytes] = {}
    for name, value in metadata:
        if name in ("authorization", "x-api-key"):
            if name in given:
                raise InvalidRequest(f"a call may have one '{name}' in its metadata: send one")
            given[name] = value if isinstance(value, bytes) else value.encode()
    scheme, _, token = given.get("authorization", b"").partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    return bearer, given.get("x-api-key", b"").strip()
