"""Answers with the number of tokens of a prompt, as an answer to it would report them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import msgspec
from starlette.types import Scope, Send

from ...telemetry.access_log import RequestRecord
from ..authentication import Caller
from ..media.parts import check_images
from ..validate import check_size
from .answer import Answer
from .body import Body
from .body_jobs import count_in_worker
from .errors import send_json
from .guard import caller_of
from .parsed import ParsedRequest


class CountAnswer(Answer):
    """ASGI application of a route that counts tokens. Nothing is generated, and no place is taken: it works before the
    engine is ready, once the model's text side is loaded. Its JSON begins with `fields`."""

    fields: ClassVar[Mapping[str, Any]] = {}

    async def respond(self, parsed: ParsedRequest, body: Body, scope: Scope, send: Send, record: RequestRecord) -> None:
        caller = caller_of(scope)
        caller.account.check(self.now())
        model = parsed.served_by(self.models)
        text, limits = model.text(), model.limits()
        parsed.check_against(limits)
        with self.completed(parsed, caller):
            check_images(parsed.image_places, text.images, limits.no_images, limits.countable.context)
            check_size(parsed.size(text), 1, limits, parsed.prompt_param)
            record.prompt_tokens = await count_in_worker(
                model.texts.pool,
                parsed.kind,
                body.data,
                limits,
                caller.tenant,
                partial(self.images_for, caller),
                carried=parsed.carried,
                cuts=parsed.cuts,
            )
        await send_json(send, 200, msgspec.json.encode({**self.fields, "input_tokens": record.prompt_tokens}))

    def completed(self, parsed: ParsedRequest, caller: Caller) -> AbstractContextManager[Any]:
        """Context manager in which a request has all that its prompt needs, such as what is stored of it."""
        return nullcontext()
