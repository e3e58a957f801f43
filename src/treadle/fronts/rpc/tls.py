"""TLS credentials of the gRPC server, from PEM files that are checked first: gRPC reports any fault of them as a port
that can't be bound."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc

from ...config import Settings
from ...errors import ConfigError, one_line
from ...regular_files import read_regular

ANY_STRENGTH = "DEFAULT:@SECLEVEL=0"  # the strength of keys is not checked here


def credentials(settings: Settings) -> Any:
    """Return TLS credentials from the settings' PEM files; None if they name none. Raises ConfigError for files that
    can't be read or used."""
    if settings.grpc_cert is None or settings.grpc_key is None:
        return None
    cert, key, client_ca = settings.grpc_cert, settings.grpc_key, settings.grpc_client_ca
    roots = None if client_ca is None else _read("grpc_client_ca", client_ca)
    pair = (_read("grpc_key", key), _read("grpc_cert", cert))
    swapped = b"PRIVATE KEY" in pair[1] and b"PRIVATE KEY" not in pair[0]
    _check_certificates("grpc_cert", cert, "; `grpc_cert` and `grpc_key` seem to be swapped" if swapped else "")
    _check_key(cert, key)
    if client_ca is not None:
        _check_certificates("grpc_client_ca", client_ca)
    return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)


def _read(setting: str, path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise ConfigError(f"`{setting}` {path} can't be read: {error.strerror}", param=setting) from error


def _check_certificates(setting: str, path: Path, hint: str = "") -> None:
    try:
        _context().load_verify_locations(cafile=path)
    except OSError as error:  # ssl's own among them
        raise ConfigError(
            f"`{setting}` {path} holds no certificates in PEM form{_reason(error)}{hint}", param=setting
        ) from error


class _Encrypted(Exception):
    """The key asks for a password."""


def _refuse_password() -> str:
    raise _Encrypted


def _check_key(cert: Path, key: Path) -> None:
    """Raise ConfigError unless `key` is the private key of the certificate."""
    try:
        _context().load_cert_chain(cert, key, _refuse_password)
    except _Encrypted:
        raise ConfigError(
            f"`grpc_key` {key} is encrypted, and there is nobody to ask for its password: write it without one, by "
            "openssl pkey -in FILE -out NEW",
            param="grpc_key",
        ) from None
    except OSError as error:
        if getattr(error, "reason", None) in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            text = f"`grpc_key` {key} is the key of another certificate than `grpc_cert` {cert}: give its own"
        else:
            text = f"`grpc_key` {key} holds no private key in PEM form{_reason(error)}"
        raise ConfigError(text, param="grpc_key") from error


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers(ANY_STRENGTH)
    return context


def _reason(error: OSError) -> str:
    """Return OpenSSL's reason in parentheses; "" where it has none."""
    reason = getattr(error, "reason", None)
    return f" ({one_line(reason, 100)})" if reason else ""
