"""What the two wires have in common, as their servicers see it: a call, an answer's messages, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import grpc

from ...core.messages import TokenLogprob
from ...errors import InvalidRequest, TreadleError
from .sequence import Choice, Part


class Context(Protocol):
    """One call, as grpc.aio gives it."""

    async def write(self, message: Any) -> None:
        """Send a message; returns when the client has room for it."""
        ...

    async def abort(self, code: Any, details: str, trailing_metadata: tuple[tuple[str, str], ...]) -> NoReturn:
        """End the call with a status."""
        ...


class Writer(Protocol):
    """Writes one wire's messages. `choice` has what was counted up to and with `part`."""

    def chunk(self, choice: Choice, part: Part) -> Any:
        """What is new, in a stream."""
        ...

    def complete(self, choice: Choice, part: Part) -> Any:
        """The end of a choice, with all of it that the choice has kept."""
        ...


async def refuse(context: Context, error: TreadleError) -> NoReturn:
    """End the call with the error's status; its code, and when to come again, go along as metadata."""
    metadata = [("treadle-error", error.code)]
    if error.retry_after_s is not None:
        metadata.append(("retry-after-ms", str(round(1000 * error.retry_after_s))))
    await context.abort(grpc.StatusCode[error.grpc_status], error.message, tuple(metadata))


def logprobs_of(messages: Any, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Any:
    """The wire's OutputLogProbs (`messages` is its module), one entry a token; None where none were asked for."""
    if not logprobs:
        return None
    return messages.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in logprobs],
        token_ids=tokens,
        top_logprobs=[
            messages.TopLogProbs(values=[p for _, p in entry.top], token_ids=[token for token, _ in entry.top])
            for entry in logprobs
        ],
    )


def off_at(value: float, *neutral: float) -> float | None:
    """`value`, or None where it means that the parameter is off: protobuf has no other way to leave a number out."""
    return None if value in neutral else value


def given(message: Any, name: str) -> Any:
    """An optional field's value, or None where the client was silent."""
    return getattr(message, name) if message.HasField(name) else None


class NotImplementedHere(InvalidRequest):
    """A field asks for something this worker does not do: the gateway may have another that does."""

    code = "not_implemented"
    http_status = 501
    grpc_status = "UNIMPLEMENTED"
