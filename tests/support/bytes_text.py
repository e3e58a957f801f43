"""A text model of one token per byte, for tests of the fronts: ids 0 to 255 are bytes, then EOS and BOS."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treadle.errors import EngineUnavailable

EOS, BOS, VOCABULARY = 256, 257, 258


class BytesText:
    vocabulary = VOCABULARY
    eos_token_ids = (EOS,)
    bytes_per_token = 1.0

    def __init__(self, context: int = 4096, default_sampling: Mapping[str, float] | None = None) -> None:
        self.context = context
        self.default_sampling = dict(default_sampling or {"temperature": 0.0})
        self.chats: list[dict[str, Any]] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS, *text.encode()] if add_special_tokens else list(text.encode())

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        self.chats.append({"messages": list(messages), "kwargs": dict(template_kwargs or {})})
        turns = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return self.encode(turns + ("<assistant>" if add_generation_prompt else ""))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_text(self, token: int) -> str:
        return {EOS: "<eos>", BOS: "<bos>"}.get(token) or bytes([token]).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return {EOS: b"<eos>", BOS: b"<bos>"}.get(token) or bytes([token])

    def stream(self, *, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> BytesStream:
        return BytesStream(tuple(stop), skip_special_tokens)


class BytesStream:
    def __init__(self, stop: tuple[str, ...], skip_special_tokens: bool) -> None:
        self._stop = stop
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    @property
    def held(self) -> int:
        return len(self._held)

    def feed(self, token: int) -> str:
        special = {EOS: "<eos>", BOS: "<bos>"}.get(token)
        self._held += ("" if self._skip else special) if special else self._decoder.decode(bytes([token]))
        cuts = [self._held.find(s) for s in self._stop if s in self._held]
        if cuts:
            self.stopped = True
            shown, self._held = self._held[: min(cuts)], ""
            return shown
        keep = max((n for s in self._stop for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        shown, self._held = self._held + self._decoder.decode(b"", True), ""
        return shown


class InlinePool:
    """Does the work at once, unless `gate` holds it up."""

    def __init__(self) -> None:
        self.gate: Callable[[], Any] | None = None
        self.runs = 0

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        self.runs += 1
        if self.gate is not None:
            await self.gate()
        return work(*args)


class BytesTexts:
    def __init__(self, model: BytesText | None) -> None:
        self.pool = InlinePool()
        self._model = model

    def model(self) -> BytesText:
        if self._model is None:
            raise EngineUnavailable("the model is loading", retry_after_s=2.0)
        return self._model
