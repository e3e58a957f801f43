"""A vision model of one token per byte, and image processes without processes."""

from __future__ import annotations

import atexit
import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.media.pictures import png
from tests.support.bytes_text import bytes_text
from treadle import shared_memory
from treadle.core.messages import Image
from treadle.fronts.media.service import ImageService
from treadle.fronts.media.store import PixelStore
from treadle.media.child import prepare
from treadle.media.messages import Prepare, Start
from treadle.media.pixels_memory import Pixels, bytes_of
from treadle.media.workers import MEMORY_BYTES, MOST_PIXELS
from treadle.text import TextModel
from treadle.text.images.qwen import QwenImages

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
TEMPLATE = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
_OWNER = shared_memory.Owner()
atexit.register(_OWNER.close)


def vision_text(context: int = 4096) -> TextModel:
    """A text model that reads images: a token for each 8 x 8 pixels."""
    return vision(bytes_text(context, special=MARKS, chat_template=TEMPLATE))


def vision(model: TextModel) -> TextModel:
    """A text model with the tokens `MARKS`, that reads images."""
    pad = MARKS[1]
    token = model.named_ids[pad]
    names: dict[str, Any] = {"token": pad, "token_id": token, "placeholder": pad, "placeholder_id": token}
    settings = QwenImages(**names, patch=4, merge=2, min_pixels=64, max_pixels=4096)
    return replace(model, images=settings, no_images="")


def data_url(data: bytes | None = None, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(png(16, 16) if data is None else data).decode()}"


class InlineWorkers:
    """Image processes that are none: images are prepared at once, in this process."""

    most = 2
    made = 0

    def __init__(self, settings: Any) -> None:
        InlineWorkers.made += 1
        self._start = Start(settings, MOST_PIXELS, MEMORY_BYTES, 10.0)
        self.names: list[str] = []

    async def prepare(self, data: bytes, media_type: str = "", **options: Any) -> Pixels:
        options.pop("tenant")
        name = _OWNER.new_name()
        prepared = prepare(self._start, Prepare(name, media_type, **options), data)
        self.names.append(name)
        return Pixels(name, prepared.shape, prepared.layout)

    async def close(self) -> None: ...

    def statistics(self) -> dict[str, Any]:
        return {"done": len(self.names)}


def inline_service(*, hosts: Sequence[str] = (), store: PixelStore | None = None, fetcher: Any = None) -> ImageService:
    return ImageService(InlineWorkers, hosts=hosts, store=store, fetcher=fetcher)


def exists(image: Image) -> bool:
    """Whether the image's pixels are there."""
    try:
        with shared_memory.attach(image.shm, bytes_of(image.shape)):
            return True
    except FileNotFoundError:
        return False
