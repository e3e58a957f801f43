"""Model folders with image tokens, as small as a tokenizer can be, and the templates that families have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.text import TextModel

from .. import builders

QWEN = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part.type == 'image' or 'image' in part -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

USER_ONLY = QWEN.replace("part.type == 'image' or 'image' in part", "part.type == 'image' and message.role == 'user'")
"""A template that has no place for the image of a tool's result."""

GEMMA = builders.GEMMA.replace(
    "{%- if item['type'] == 'text' -%}",
    "{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}{%- elif item['type'] == 'text' -%}",
)
TOKENS = {
    "qwen3_vl": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    "gemma3": ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    "pixtral": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 4096},
    "gemma3": {"image_seq_length": 4, "size": {"height": 16, "width": 16}},
    "pixtral": {"patch_size": 4, "size": 64},
}


def image_folder(
    folder: Path, kind: str = "qwen3_vl", template: str = QWEN, *, special: bool = True, **config: Any
) -> Path:
    """Write a folder of a vision model of type `kind`, without weights."""
    tokenizer = builders.byte_level()
    add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
    add([*TOKENS[kind]])
    config = {
        "model_type": kind,
        "vision_config": {"patch_size": 4},
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "max_position_embeddings": 4096,
    } | config
    return builders.write_folder(
        folder,
        tokenizer,
        config=config,
        preprocessor_config=PREPROCESSORS[kind],
        tokenizer_config={"eos_token": "<|im_end|>", "bos_token": ""},
        chat_template=template,
    )


def image_model(folder: Path, kind: str = "qwen3_vl", template: str = QWEN, **more: Any) -> TextModel:
    return TextModel.load(image_folder(folder, kind, template, **more))
