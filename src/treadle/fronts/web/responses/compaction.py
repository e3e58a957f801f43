"""POST /v1/responses/compact: a summary in place of a conversation, written by the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....errors import ContextLengthExceeded
from ....text import TextView
from ....text.events import Text
from ...generation.pieces import STOP, Usage, WholeChoice
from ..parsed import Head
from ..parsing import read
from .items import new_id
from .opaque import SUMMARY, wrap
from .parsed import ParsedResponse
from .response_object import usage_json
from .schema import CompactRequest


class ParsedCompaction(ParsedResponse):
    """One request for a summary, parsed."""

    kind = "responses_compact"

    def _parse(self, value: dict[str, Any]) -> None:
        read(CompactRequest, value)
        super()._parse(value)
        self.facts.compacts, self.facts.store = True, False

    def whole(self, head: Head, choices: Sequence[WholeChoice], usage: Usage, text: TextView) -> bytes:
        """Return the summary. Raises ContextLengthExceeded for one that was cut."""
        (choice,) = choices
        if choice.finish_reason != STOP:
            raise ContextLengthExceeded(
                f"the summary was cut after {usage.completion_tokens} tokens: leave out max_output_tokens, or send "
                "a shorter conversation, so that the model's context holds it and its summary",
                param="input",
            )
        summary = "".join(event.text for event in self.events_of(choice) if isinstance(event, Text)).strip()
        item = {"id": new_id("cmp"), "type": "compaction", "encrypted_content": wrap(SUMMARY, summary)}
        answer = {"id": head.id, "object": "response.compaction", "created_at": head.created, "model": head.model}
        return msgspec.json.encode({**answer, "output": [item], "usage": usage_json(usage)})
