"""Routes that tokenize and detokenize for clients, and describe the tokenizer, in vLLM's form. A text worker makes the
whole answer; the engine has no part in it."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.types import Receive, Scope, Send

from ..media.tokenizing import Layouts, with_images
from ..text_jobs import IMAGE_BYTES
from ..validate import Limits
from .access_log import record_of
from .answer import RouteContext, with_body
from .body import Body
from .errors import send_json
from .guard import caller_of
from .token_jobs import TokenAnswer, TokenParams
from .worker_limits import WorkerLimits

TOKEN_ROUTES = {
    "/tokenize": ("tokenize_request", "TokenizeRequest", "Token ids of a text or a chat"),
    "/detokenize": ("detokenize_request", "DetokenizeRequest", "Text of token ids"),
}
"""Job, schema of the body, and summary by path. Each path is also served under /v1."""
TOKENIZER_INFO = "/tokenizer_info"
"""Path of the tokenizer's description, also served under /v1."""


class TokenRoute:
    """The ASGI application of one route. `job` is the text worker's."""

    def __init__(self, server: RouteContext, job: str) -> None:
        self._server = server
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await with_body(self._server, scope, receive, send, lambda body: self._answer(body, scope, send))

    async def _answer(self, body: Body, scope: Scope, send: Send) -> None:
        """Answer under the limits of the default model, also of more images than its context holds. The request counts
        as one of its key's, without tokens."""
        server, caller = self._server, caller_of(scope)
        limits = server.models.default.limits()
        tokenize = partial(self._tokenized, body.data, limits, caller.tenant)
        with caller.account.serve(record_of(scope), rows=0, tokens=0, clock=server.clock):
            async with with_images(tokenize, partial(server.images_for, caller), limits.countable) as (answer, held):
                if held is not None:
                    held.release()
        await send_json(send, 200, answer.body)

    async def _tokenized(self, body: bytes, limits: Limits, tenant: str, layouts: Layouts) -> TokenAnswer:
        params = msgspec.msgpack.encode(TokenParams(WorkerLimits.of(limits), layouts))
        size = len(body) + IMAGE_BYTES * len(layouts)
        pool = self._server.models.default.texts.pool
        data = await pool.run(self._job, params, body, tenant=tenant, parsed=size, tokenized=size)
        answer = msgspec.msgpack.decode(data, type=TokenAnswer)
        self._server.models.get(answer.model)
        return answer


class TokenizerInfo:
    """The ASGI application of the tokenizer's description. A request counts as those of a `TokenRoute`."""

    def __init__(self, server: RouteContext) -> None:
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await with_body(self._server, scope, receive, send, lambda body: self._answer(scope, send))

    async def _answer(self, scope: Scope, send: Send) -> None:
        server, caller = self._server, caller_of(scope)
        model = server.models.default
        model.text()
        with caller.account.serve(record_of(scope), rows=0, tokens=0, clock=server.clock):
            info = await model.texts.pool.run("tokenizer_info", b"", tenant=caller.tenant)
        await send_json(send, 200, info)
