"""Error types of the whole server. Each has one code, one HTTP status and one gRPC status.

Clients match on `code`. `retryable`: the same request may succeed later, unchanged.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

_SETTING = re.compile(r"`([a-z_]+)`")


class TreadleError(Exception):
    """Base of every error that Treadle raises on purpose.

    `param` names the request field at fault, where there is one. `retry_after_s` is the time a client should wait
    before it tries again, where that is known; `ticket` then names the slot promised to it, where one is. `harmful`:
    the same request again would do the same harm, so clients that retry its HTTP status by themselves are told not to.
    """

    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "server_error"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False
    harmful: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.ticket = ""


# The scope of one request: the client can mend it.


class InvalidRequest(TreadleError):
    """The request is malformed or asks for something out of range."""

    code = "invalid_request"
    kind = "invalid_request_error"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt plus completion, is longer than the model's context. `prompt_tokens` and `context` are set
    where the prompt alone leaves no token for an answer."""

    code = "context_length_exceeded"
    prompt_tokens: int | None = None
    context: int | None = None


def beyond_context(context: int, excess: str) -> str:
    """Return the beginning of a message about more tokens than the context holds, in the words of OpenAI and vLLM:
    clients search for them, to shorten a conversation and try again."""
    return f"This model's maximum context length is {context} tokens. However, {excess}"


class UnsupportedParameter(InvalidRequest):
    """A known field asks for something this server does not do."""

    code = "unsupported_parameter"


class ThreadUnsupported(UnsupportedParameter):
    """The request goes on from a conversation that a server would hold, and this one holds none. Anthropic's clients
    know the code, and send the whole conversation instead."""

    code = "thread_unsupported_request"


class InvalidGrammar(InvalidRequest):
    """The grammar of a constraint can't be compiled, or this server compiles none."""

    code = "invalid_grammar"


class RequestTooLarge(InvalidRequest):
    """The request's body is over the byte limit."""

    code = "request_too_large"
    http_status = 413


class Quarantined(InvalidRequest):
    """The request killed the engine, alone and repeatedly: it is not computed any more. Neither SDKs nor gateways retry
    its statuses, and FAILED_PRECONDITION counts for no gateway's circuit breaker."""

    code = "request_quarantined"
    http_status = 422
    grpc_status = "FAILED_PRECONDITION"
    harmful = True


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here."""

    code = "model_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class NotAuthenticated(TreadleError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"
    kind = "authentication_error"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class InsufficientScope(TreadleError):
    """The API key is right and does not allow this."""

    code = "insufficient_scope"
    kind = "permission_error"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class RateLimited(TreadleError):
    """The API key has used up its requests or tokens of this minute, or has reached its limit of sequences."""

    code = "rate_limit_exceeded"
    kind = "rate_limit_error"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    retryable = True


class TooManyWrongKeys(RateLimited):
    """Too many wrong API keys have come from this address."""

    code = "too_many_wrong_keys"


class RequestCancelled(TreadleError):
    """The client left, or cancelled, before the request ended."""

    code = "request_cancelled"
    kind = "cancelled"
    http_status = 499
    grpc_status = "CANCELLED"


class ReaderStalled(RequestCancelled):
    """The client stopped reading its stream for too long."""

    code = "reader_stalled"


class MessageTimeout(TreadleError):
    """The client opened a call and did not send its message in time."""

    code = "message_timeout"
    http_status = 408
    grpc_status = "DEADLINE_EXCEEDED"


# The scope of the server: try again later.


class Busy(TreadleError):
    """Overload: every slot and every place in the queue is taken, or the wait was over before a slot came free."""

    code = "text_generation_busy"
    kind = "overloaded_error"
    http_status = 503
    grpc_status = "RESOURCE_EXHAUSTED"
    retryable = True


class EngineUnavailable(TreadleError):
    """The engine is loading, restarting, hung or dead."""

    code = "engine_unavailable"
    kind = "overloaded_error"
    http_status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True


class ServerStopping(EngineUnavailable):
    """The server is shutting down."""

    code = "server_stopping"


class StepFailed(TreadleError):
    """A step of the engine raised and this request could not be saved."""

    code = "engine_step_failed"


class EngineDied(TreadleError):
    """The engine died while it worked on this request, which can't be replayed: no other engine will start, or each one
    was killed. The request may be at fault, so its gRPC status is not UNAVAILABLE: a gateway would carry it to the next
    worker."""

    code = "engine_died"
    harmful = True


class JobFailed(TreadleError):
    """A job on the owner raised."""

    code = "engine_job_failed"


# The scope of the process: a person must act before it can start.


class ConfigError(TreadleError):
    """A setting is unknown, malformed or out of range."""

    code = "config_error"


class ModelError(TreadleError):
    """A model can't be found, read, trusted or run."""

    code = "model_error"


class StartFailed(TreadleError):
    """The engine could not be built or warmed up."""

    code = "start_failed"


# How messages name settings.


def spell(message: str, names: Mapping[str, str]) -> str:
    """Replace the settings in backquotes in `message` by their names in `names`: flags, or keys of a file. Settings
    that `names` lacks keep their own name."""
    return _SETTING.sub(lambda match: names.get(match[1], match[1]), message)


@contextlib.contextmanager
def spelled(names: Mapping[str, str]) -> Iterator[None]:
    """Context manager that applies `spell` to the message of each TreadleError that leaves the block."""
    try:
        yield
    except TreadleError as error:
        error.message = spell(error.message, names)
        error.args = (error.message,)
        raise


def _tree(root: type[TreadleError]) -> dict[str, type[TreadleError]]:
    found: dict[str, type[TreadleError]] = {}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found | {root.code: root}  # a subclass without a code of its own is for one process alone


def from_code(code: str, message: str, *, retry_after_s: float | None = None) -> TreadleError:
    """Build the error of the given `code`, for errors that crossed a process boundary as plain values."""
    return _tree(TreadleError).get(code, TreadleError)(message, retry_after_s=retry_after_s)


def one_line(error: object, longest: int = 300) -> str:
    """Return the text of an exception or a value as one line of at most `longest` characters; its type's name if it has
    none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= longest else text[: longest - 3] + "..."
