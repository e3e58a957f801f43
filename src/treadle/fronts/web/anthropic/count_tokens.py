"""POST /v1/messages/count_tokens: the tokens of a conversation's prompt, as an answer to it would report them.

Nothing is generated, and no place is taken.
"""

from __future__ import annotations

from functools import partial

from starlette.types import Scope, Send

from ....telemetry.access_log import RequestRecord
from ...media.parts import check_images
from ...validate import HOPELESS, check_size
from ..answer import Answer
from ..body import Body
from ..body_jobs import count_in_worker
from ..errors import send_json
from ..guard import caller_of
from ..parsed import ParsedRequest
from .wire import encode


class CountTokens(Answer):
    """ASGI application of the route. It works before the engine is ready, once the model's text side is loaded."""

    async def respond(self, parsed: ParsedRequest, body: Body, scope: Scope, send: Send, record: RequestRecord) -> None:
        caller = caller_of(scope)
        caller.account.check(self.now())
        model = parsed.served_by(self.models)
        text, limits = model.text(), model.limits()
        parsed.check_against(limits)
        check_images(parsed.image_places, text.images, limits.no_images, HOPELESS * limits.context)
        check_size(parsed.size(text), 1, limits, parsed.prompt_param)
        record.prompt_tokens = await count_in_worker(
            model.texts.pool, parsed.kind, body.data, limits, caller.tenant, partial(self.images_for, caller)
        )
        await send_json(send, 200, encode({"input_tokens": record.prompt_tokens}))
