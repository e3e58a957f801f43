"""The ASGI application of Ollama's routes that generate."""

from __future__ import annotations

from starlette.types import Scope, Send

from ....telemetry.access_log import RequestRecord
from ..answer import Answer
from ..body import Body
from ..errors import send_json
from ..parsed import ParsedRequest
from .answers import encode_line, timestamp
from .reports import report_unknown
from .requests import ParsedOllama


class OllamaAnswer(Answer):
    """An answer to a request with a prompt. A request without one asks to load or unload the model, which is always
    loaded: it is answered at once."""

    async def respond(self, parsed: ParsedRequest, body: Body, scope: Scope, send: Send, record: RequestRecord) -> None:
        assert isinstance(parsed, ParsedOllama)
        report_unknown(parsed.unknown)
        if not parsed.loads:
            await super().respond(parsed, body, scope, send, record)
            return
        model = self.models.get(parsed.model)
        reason = "unload" if parsed.unloads else "load"
        line = {"model": model.name, "created_at": timestamp(), "done": True, "done_reason": reason}
        await send_json(send, 200, encode_line(line | parsed.body({"content": ""})))
