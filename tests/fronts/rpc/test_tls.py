"""TLS files of the gRPC server: what is wrong with them is said by their setting."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import support
from treadle.config import Settings
from treadle.errors import ConfigError
from treadle.fronts.rpc.tls import credentials

TLS = Path(support.__file__).parent / "tls"
ANOTHER = r"`grpc_key` .* is the key of another certificate than `grpc_cert`"
NO_CERTIFICATE = r"`grpc_cert` .* holds no certificates in PEM form"


def given(cert: Path, key: Path, client_ca: Path | None = None) -> Settings:
    return Settings(grpc_port=1, grpc_cert=TLS / cert, grpc_key=TLS / key, grpc_client_ca=client_ca and TLS / client_ca)


@pytest.mark.parametrize("client_ca", [None, Path("ca.pem")])
def test_files_that_belong_together_are_credentials(client_ca: Path | None) -> None:
    assert credentials(given(Path("server.pem"), Path("server.key"), client_ca)) is not None
    assert credentials(Settings()) is None


@pytest.mark.parametrize(
    ("cert", "key", "client_ca", "says"),
    [
        ("server.pem", "client.key", None, ANOTHER),
        ("server.key", "server.pem", None, NO_CERTIFICATE + ".* seem to be swapped"),
        ("README.md", "server.key", None, NO_CERTIFICATE + r" \([^)]+\)$"),
        ("server.pem", "README.md", None, "`grpc_key` .* holds no private key in PEM form"),
        ("server.pem", "encrypted.key", None, "`grpc_key` .* is encrypted.*openssl pkey"),
        ("server.pem", "server.key", "README.md", "`grpc_client_ca` .* holds no certificates"),
        ("server.pem", "server.key", "none.pem", "`grpc_client_ca` .* can't be read: No such file"),
        ("/dev/null", "server.key", None, "`grpc_cert` /dev/null can't be read: it is not a regular file"),
    ],
)
def test_a_file_that_can_t_be_used_is_named(cert: str, key: str, client_ca: str | None, says: str) -> None:
    settings = given(Path(cert), Path(key), None if client_ca is None else Path(client_ca))
    with pytest.raises(ConfigError, match=says):
        credentials(settings)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"`grpc_key` .* can't be read: it is not a regular file"):
        credentials(given(TLS / "server.pem", tmp_path / "pipe"))
