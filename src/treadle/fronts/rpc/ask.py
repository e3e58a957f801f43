"""A generation request as both wires understand it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import InvalidRequest
from ..validate import RawParams

MAX_REQUEST_ID_CHARS = 512


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a client asked for. `prompt` are token ids, or text that is tokenized here. `max_tokens` beyond what the
    context leaves means as much as it leaves: the gateway passes on what its clients send, unchecked."""

    request_id: str
    prompt: Sequence[int] | str
    wanted: RawParams
    max_tokens: int | None
    stream: bool
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if not self.request_id:
            raise InvalidRequest("request_id is empty: give each request its own", param="request_id")
        if len(self.request_id) > MAX_REQUEST_ID_CHARS:
            raise InvalidRequest(
                f"request_id has {len(self.request_id)} characters: give at most {MAX_REQUEST_ID_CHARS}",
                param="request_id",
            )
        if not self.prompt:
            raise InvalidRequest("the prompt is empty: give at least one token", param="input")
        if self.max_tokens == 0:
            raise InvalidRequest("max_tokens is 0: ask for at least 1, or leave it out", param="max_tokens")
