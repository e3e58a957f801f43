"""Reasons why admission refuses a request: one vocabulary for `/v1/status` (`admission.refused`) and for the label
`reason` of the metric `treadle_refused_total`."""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """A reason. Those for which the engine takes nothing at all are the codes of the errors that clients get. Those
    from RATE_LIMITED on are the fronts'."""

    QUEUE_FULL = "queue_full"  # every slot and every place in the queue is taken
    PROMISED = "promised"  # the places left are promised to requests that were told when to come back
    DISPLACED = "displaced"  # it waited, and gave its place to a tenant that holds less; counts requests
    TOKENS = "tokens"  # the KV cache has no room left for the request's tokens
    WAIT_TOO_LONG = "wait_too_long"  # no slot is expected to come free within `max_wait`
    WAIT_OVER = "wait_over"  # no slot came free within `max_wait` or the request's own timeout; counts sequences
    TOO_MANY_ROWS = "too_many_rows"  # more sequences than the server has places
    TOO_LONG = "too_long"  # more tokens than the KV cache holds
    TEXT_BUSY = "text_busy"  # no text worker came free within `max_wait`, or too much waits for one; counts requests
    IMAGE_BUSY = "image_busy"  # no image process came free in time, or no memory is left for pixels; counts images
    ENGINE_UNAVAILABLE = "engine_unavailable"  # loading, restarting or failed
    SERVER_STOPPING = "server_stopping"  # draining or stopping
    RATE_LIMITED = "rate_limit_exceeded"  # the API key's own limit
    INSUFFICIENT_SCOPE = "insufficient_scope"  # the API key does not allow this
    NOT_AUTHENTICATED = "invalid_api_key"  # no API key, or a wrong one
    TOO_MANY_WRONG_KEYS = "too_many_wrong_keys"  # from one address
    CONNECTIONS = "connections"  # as many connections as there are descriptors for; counts connections
    PEER_CONNECTIONS = "peer_connections"  # one address has its share of them; counts connections
    CALLS = "calls"  # as many gRPC calls as are served at a time; counts calls
    PEER_CALLS = "peer_calls"  # one address has its share of them; counts calls
    STREAMS = "streams"  # as many gRPC streams of Watch and reflection as are served at a time
    PEER_STREAMS = "peer_streams"  # one address has its share of them
    MESSAGE_TIMEOUT = "message_timeout"  # a gRPC call's message did not come in time
    BODY_BYTES = "body_bytes"  # request bodies, of all or of one tenant, hold as much memory as they may
    QUARANTINED = "request_quarantined"  # the same request took the engine down before


def param_at_fault(prompts: int, most: int) -> str:
    """The field of a request that asks for more than `most` sequences: `prompt` where one choice of each prompt is too
    many already, else `n`."""
    return "prompt" if prompts > most else "n"
