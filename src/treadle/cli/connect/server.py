"""Model name, context and need of a key, asked of a running server."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from ...environment import KEY_VARIABLE
from ...errors import ConfigError
from ...host_names import server_of
from ...installation import command
from .errors import ConnectError

_TIMEOUT_S = 5
_MAX_BYTES = 1 << 20
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class KeyRefused(ConnectError):
    """The server needs an API key, or another one."""


@dataclass(frozen=True)
class Server:
    """A server for a client to use: its root URL without a path, its model, the model's context in tokens where it is
    known, whether it reads images or makes embeddings alone, and the API key that it needs, if any."""

    url: str
    model: str
    context: int | None = None
    needs_key: bool = False
    images: bool = False
    embeds_only: bool = False
    written_key: str | None = None
    """The key, where it may be written to a file."""

    def key_as(self, reference: str) -> str:
        """Return the text for a client's setting of the key: `reference` names the environment's variable in the
        client's form. Most clients demand a key, also for servers without one."""
        if self.written_key is not None:
            return self.written_key
        return reference if self.needs_key else "none"

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def output(self) -> int | None:
        """Tokens of an answer for which clients should leave space in the context."""
        return None if self.context is None else max(1, self.context // 4)


def root_of(url: str) -> str:
    """Return the server's root for a URL with or without /v1. Raises ConfigError."""
    parts = server_of(url, ("http", "https"))
    if parts is None or parts.query or parts.fragment:
        raise ConfigError(f"--url '{url}' is no address of a server: give one such as http://127.0.0.1:8000")
    return parts.geturl().rstrip("/").removesuffix("/v1").rstrip("/")


def ask(url: str, model: str | None, key: str | None) -> Server:
    """Return the server at `url`, with `model` in place of the one that it lists. A server that does not answer is no
    error where `model` is given. Raises ConnectError and ConfigError."""
    root = root_of(url)
    try:
        cards = _models(root, key)
    except ConnectError as error:
        if model is None:
            raise
        return Server(root, model, needs_key=key is not None or isinstance(error, KeyRefused))
    listed = {str(card["id"]): card for card in cards if isinstance(card, dict) and "id" in card}
    if not listed:
        raise ConnectError(f"{root}/v1/models lists no model: name one with --model")
    name = next(iter(listed)) if model is None else model
    if name not in listed:
        raise ConnectError(f"{root} does not serve '{name}': it serves {', '.join(listed)}")
    context = listed[name].get("max_model_len")
    modalities = listed[name].get("modalities")
    images = isinstance(modalities, list) and "image" in modalities
    return Server(
        root,
        name,
        context if isinstance(context, int) else None,
        needs_key=key is not None,
        images=images,
        embeds_only=_embeds_only(root, key),
    )


def _embeds_only(root: str, key: str | None) -> bool:
    """Whether the server says that its model generates no text. Other servers have no such status."""
    try:
        only: Any = json.loads(_get(f"{root}/v1/status", key))
        for name in ("capabilities", "embedding", "only"):
            only = only[name]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, RecursionError):
        return False
    return only is True


def _models(root: str, key: str | None) -> list[Any]:
    try:
        body = _get(f"{root}/v1/models", key)
    except urllib.error.HTTPError as error:
        raise _refusal(root, error.code, key) from None
    except OSError as error:
        raise _no_answer(root, error) from None
    except (http.client.HTTPException, ValueError) as error:
        raise ConnectError(
            f"{root} answers, but not as an HTTP server ({type(error).__name__}): is this its gRPC port? Give that of "
            "HTTP with --url"
        ) from None
    try:
        data = json.loads(body)["data"]
    except (ValueError, KeyError, TypeError, RecursionError):
        data = None
    if not isinstance(data, list):
        raise ConnectError(
            f"{root}/v1/models answers with no list of models: is this the address of a server of models? Give its "
            "own with --url"
        )
    return data


def _get(url: str, key: str | None) -> bytes:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with _DIRECT.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S) as answer:
        body: bytes = answer.read(_MAX_BYTES)
    return body


def _refusal(root: str, status: int, key: str | None) -> ConnectError:
    if status not in (401, 403):
        return ConnectError(f"{root}/v1/models answered with status {status}: is this the address of the server?")
    if key is None:
        return KeyRefused(f"{root} needs an API key: set {KEY_VARIABLE}, or give --api-key")
    return KeyRefused(f"{root} refuses this API key: give one that it knows in {KEY_VARIABLE} or --api-key")


def _no_answer(root: str, error: Exception) -> ConnectError:
    reason = getattr(error, "reason", None) or error
    return ConnectError(
        f"no server answers at {root} ({reason}): start one with '{command()} serve MODEL', give its address with "
        "--url, or name the model with --model"
    )
