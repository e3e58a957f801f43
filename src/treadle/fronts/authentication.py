"""Authentication of clients: finds the caller of a request by its API key, and the caller's permissions. The key itself
goes no further.

Without any configured key every client may do everything, except requests with a raised priority: those are for this
machine alone. With keys, `admin` needs a key that has it, or, over gRPC, a client certificate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config import Settings
from ..core.refusals import Refusal
from ..errors import InsufficientScope, NotAuthenticated, TooManyWrongKeys
from ..host_names import is_this_machine
from ..keys import ALL, Key, KeySource, Scope
from .accounts import Account, KeyUsage
from .auth_throttle import AuthThrottle
from .cache_salts import Salts
from .tenants import peer_tenant

USE = frozenset({Scope.USE})
NOTHING: frozenset[Scope] = frozenset()
ADMIN_CURE = "use an API key that has it (scopes in the keys file, treadle keys add NAME --scope admin)"


@dataclass(frozen=True, slots=True)
class Caller:
    """One client. `tenant_digest` stands for its key in salts, `name` is the key's name ("" without one), `peer` the
    address without its port."""

    tenant_digest: bytes
    peer: str
    scopes: frozenset[Scope]
    account: Account
    name: str = ""

    @property
    def admin(self) -> bool:
        """Whether it may see, and cancel, requests of other tenants."""
        return Scope.ADMIN in self.scopes

    @property
    def tenant(self) -> str:
        """The name under which its share of the server is counted."""
        return f"key {self.name}" if self.name else peer_tenant(self.peer)

    @property
    def may_raise_priority(self) -> bool:
        """Whether its requests may go before others: with the scope admin, or without keys from this machine."""
        return self.admin and bool(self.name or is_this_machine(self.peer))

    def check_admin(self, action: str) -> None:
        """Raise InsufficientScope unless it may do `action`, which needs the scope admin."""
        if not self.admin:
            raise InsufficientScope(f"{action} needs the scope 'admin': {ADMIN_CURE}")

    def check_priority(self, priority: int) -> None:
        """Raise InsufficientScope for a raised priority, unless it may ask for that."""
        if priority < 0 and not self.may_raise_priority:
            raise InsufficientScope(
                f"priority is {priority}, and below 0, which goes before others, needs the scope 'admin': leave it "
                f"out, or {ADMIN_CURE}",
                param="priority",
            )


class Authenticator:
    """Finder of callers, for all fronts of one server. Lives on the event loop. `on_refused` is called with each
    refusal."""

    def __init__(
        self,
        keys: KeySource | None = None,
        salts: Salts | None = None,
        on_refused: Callable[[Refusal], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keys = keys or KeySource()
        self.salts = salts or Salts()
        self.clock = clock
        self._on_refused = on_refused
        self._throttle = AuthThrottle()
        self._shared_account = Account()
        self._accounts: dict[str, Account] = {}

    @classmethod
    def of(cls, settings: Settings, on_refused: Callable[[Refusal], None] = lambda reason: None) -> Authenticator:
        """Build it from the settings. Raises ConfigError for a keys file that is missing or malformed."""
        return cls(KeySource(settings.api_key, settings.api_keys), on_refused=on_refused)

    def caller(self, given: Sequence[bytes], peer: str, *, keyless: frozenset[Scope] | None = None) -> Caller:
        """Return the caller at `peer` with the keys `given`, of which one must be right if keys are configured;
        `keyless` are the scopes of clients without a key in that case, None if they are refused.

        Raises NotAuthenticated, and TooManyWrongKeys with `retry_after_s`.
        """
        given = [key for key in given if key]
        if not self.keys.configured:
            return self._anonymous(given[0] if given else b"", peer, ALL)
        if given:
            return self._authenticated(given, peer)
        if keyless is not None:
            return self._anonymous(b"", peer, keyless)
        raise self._refusal()

    def report_refusals_to(self, on_refused: Callable[[Refusal], None]) -> None:
        """Replace the callback for refusals."""
        self._on_refused = on_refused

    def refused(self, reason: Refusal) -> None:
        """Count a refusal."""
        self._on_refused(reason)

    def usage(self) -> list[KeyUsage]:
        """Return the use of the server by each key that is valid now."""
        return [self._account(key).usage() for key in self.keys.ring]

    def _anonymous(self, key: bytes, peer: str, scopes: frozenset[Scope]) -> Caller:
        return Caller(self.salts.tenant(key), peer, scopes, self._shared_account)

    def _authenticated(self, given: Sequence[bytes], peer: str) -> Caller:
        found = next(((key, entry) for key in given if (entry := self.keys.ring.find(key)) is not None), None)
        now = self.clock()
        try:
            self._throttle.check(peer, None if found is None else found[1].name, now)
        except TooManyWrongKeys:
            self._on_refused(Refusal.TOO_MANY_WRONG_KEYS)
            raise
        if found is None:
            self._throttle.wrong(peer, len(given), now)
            raise self._refusal()
        given_key, key = found
        self._throttle.right(peer, key.name, now)
        return Caller(self.salts.tenant(given_key), peer, key.scopes, self._account(key), key.name)

    def _account(self, key: Key) -> Account:
        """Return the key's account; accounts of removed keys are dropped when a new one is made."""
        account = self._accounts.get(key.name)
        if account is None:
            names = {known.name for known in self.keys.ring}
            self._accounts = {name: account_ for name, account_ in self._accounts.items() if name in names}
            account = self._accounts[key.name] = Account(key.name, key.limits, self.clock())
        account.limit(key.limits, self.clock())
        return account

    def _refusal(self) -> NotAuthenticated:
        self._on_refused(Refusal.NOT_AUTHENTICATED)
        return NotAuthenticated("a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
