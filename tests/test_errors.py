"""One error tree: every code is one error, with statuses a client can act on."""

from __future__ import annotations

import http

import pytest

from treadle.errors import (
    Busy,
    ConfigError,
    ContextLengthExceeded,
    EngineDied,
    EngineUnavailable,
    InsufficientScope,
    InvalidGrammar,
    InvalidRequest,
    JobFailed,
    MessageTimeout,
    ModelError,
    ModelNotFound,
    NotAuthenticated,
    Quarantined,
    RateLimited,
    ReaderStalled,
    RequestCancelled,
    RequestTooLarge,
    ServerStopping,
    StartFailed,
    StepFailed,
    ThreadUnsupported,
    TooManyWrongKeys,
    TreadleError,
    UnsupportedParameter,
    from_code,
    spell,
    spelled,
)
from treadle.text.templates import TemplateRefusal

GRPC = {
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "FAILED_PRECONDITION",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "RESOURCE_EXHAUSTED",
    "PERMISSION_DENIED",
    "INTERNAL",
    "UNAVAILABLE",
    "UNAUTHENTICATED",
}
CONTRACT = {
    TreadleError: ("internal_error", 500, "INTERNAL"),
    InvalidRequest: ("invalid_request", 400, "INVALID_ARGUMENT"),
    MessageTimeout: ("message_timeout", 408, "DEADLINE_EXCEEDED"),
    ContextLengthExceeded: ("context_length_exceeded", 400, "INVALID_ARGUMENT"),
    UnsupportedParameter: ("unsupported_parameter", 400, "INVALID_ARGUMENT"),
    ThreadUnsupported: ("thread_unsupported_request", 400, "INVALID_ARGUMENT"),
    InvalidGrammar: ("invalid_grammar", 400, "INVALID_ARGUMENT"),
    RequestTooLarge: ("request_too_large", 413, "INVALID_ARGUMENT"),
    ModelNotFound: ("model_not_found", 404, "NOT_FOUND"),
    NotAuthenticated: ("invalid_api_key", 401, "UNAUTHENTICATED"),
    InsufficientScope: ("insufficient_scope", 403, "PERMISSION_DENIED"),
    RateLimited: ("rate_limit_exceeded", 429, "RESOURCE_EXHAUSTED"),
    TooManyWrongKeys: ("too_many_wrong_keys", 429, "RESOURCE_EXHAUSTED"),
    RequestCancelled: ("request_cancelled", 499, "CANCELLED"),
    ReaderStalled: ("reader_stalled", 499, "CANCELLED"),
    Busy: ("text_generation_busy", 503, "RESOURCE_EXHAUSTED"),
    EngineUnavailable: ("engine_unavailable", 503, "UNAVAILABLE"),
    ServerStopping: ("server_stopping", 503, "UNAVAILABLE"),
    StepFailed: ("engine_step_failed", 500, "INTERNAL"),
    EngineDied: ("engine_died", 500, "INTERNAL"),
    Quarantined: ("request_quarantined", 422, "FAILED_PRECONDITION"),
    JobFailed: ("engine_job_failed", 500, "INTERNAL"),
    ConfigError: ("config_error", 500, "INTERNAL"),
    ModelError: ("model_error", 500, "INTERNAL"),
    StartFailed: ("start_failed", 500, "INTERNAL"),
}


def own(root: type[TreadleError] = TreadleError) -> list[type[TreadleError]]:
    """The tree as treadle.errors defines it, without what other modules and tests derive from it."""
    below = [kind for child in root.__subclasses__() for kind in own(child)]
    return [kind for kind in (root, *below) if kind.__module__ == "treadle.errors"]


@pytest.mark.parametrize("kind", CONTRACT)
def test_what_clients_match_on_does_not_change(kind: type[TreadleError]) -> None:
    """D1, E: codes and statuses are the contract."""
    assert (kind.code, kind.http_status, kind.grpc_status) == CONTRACT[kind]


def test_every_error_is_in_the_contract_and_has_a_code_of_its_own() -> None:
    assert set(own()) == CONTRACT.keys()
    assert len({kind.code for kind in own()}) == len(own())


@pytest.mark.parametrize("kind", CONTRACT)
def test_statuses_are_sane(kind: type[TreadleError]) -> None:
    assert kind.http_status == 499 or kind.http_status in {status.value for status in http.HTTPStatus}
    assert 400 <= kind.http_status < 600
    assert kind.grpc_status in GRPC
    assert kind.retryable is (kind.http_status in (429, 503))
    assert kind.kind
    assert kind.__doc__


@pytest.mark.parametrize("kind", CONTRACT)
def test_an_error_comes_back_from_its_code(kind: type[TreadleError]) -> None:
    assert issubclass(TemplateRefusal, InvalidRequest)  # it shares its code, and does not come back
    error = from_code(kind.code, "why", retry_after_s=2.5)
    assert type(error) is kind
    assert (error.message, str(error), error.retry_after_s, error.param) == ("why", "why", 2.5, None)


def test_an_unknown_code_is_an_internal_error() -> None:
    error = from_code("from_the_future", "why")
    assert type(error) is TreadleError
    assert error.message == "why"


def test_an_error_names_the_field_at_fault() -> None:
    assert InvalidRequest("too high", param="temperature").param == "temperature"


def test_settings_in_messages_are_spelled_as_their_reader_writes_them() -> None:
    names = {"max_wait": "--max-wait"}
    assert spell("`max_wait` is low, and so is `memory`", names) == "--max-wait is low, and so is memory"
    with pytest.raises(ConfigError, match=r"^--max-wait is low$") as raised, spelled(names):
        raise ConfigError("`max_wait` is low", param="max_wait")
    assert (raised.value.message, raised.value.param) == ("--max-wait is low", "max_wait")
    with pytest.raises(KeyError, match="`max_wait`"), spelled(names):
        raise KeyError("`max_wait`")
