"""Routes that tokenize and detokenize for clients, in vLLM's form. A text worker makes the whole answer; the engine has
no part in it."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Scope, Send

from .access_log import record_of
from .answer import RouteContext, with_body
from .body import Body
from .errors import send_json
from .guard import caller_of
from .token_jobs import TokenAnswer
from .worker_limits import WorkerLimits

TOKEN_ROUTES = {
    "/tokenize": ("tokenize_request", "TokenizeRequest", "Token ids of a text or a chat"),
    "/detokenize": ("detokenize_request", "DetokenizeRequest", "Text of token ids"),
}
"""Job, schema of the body, and summary by path. Each path is also served under /v1."""


class TokenRoute:
    """The ASGI application of one route. `job` is the text worker's."""

    def __init__(self, server: RouteContext, job: str) -> None:
        self._server = server
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await with_body(self._server, scope, receive, send, lambda body: self._answer(body, scope, send))

    async def _answer(self, body: Body, scope: Scope, send: Send) -> None:
        """Answer under the limits of the default model. The request counts as one of its key's, without tokens."""
        server, caller = self._server, caller_of(scope)
        model, size = server.models.default, len(body.data)
        params = msgspec.msgpack.encode(WorkerLimits.of(model.limits()))
        with caller.account.serve(record_of(scope), rows=0, tokens=0, clock=server.clock):
            data = await model.texts.pool.run(
                self._job, params, body.data, tenant=caller.tenant, parsed=size, tokenized=size
            )
            answer = msgspec.msgpack.decode(data, type=TokenAnswer)
            server.models.get(answer.model)
        await send_json(send, 200, answer.body)
