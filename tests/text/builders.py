"""Builders of tokenizers, chat templates and model folders for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "Hello world, this is a small text about looms and weaving.",
    "The quick brown fox jumps over the lazy dog 1234567890.",
    "Über den Dächern lag Schnee. 今日は天気がいい。 🙂👍🏽 naïve café",
    "def weave(threads):\n    return [t for t in threads if t]\n\n",
] * 3


def byte_level() -> Tokenizer:
    """Byte-level BPE as Qwen and Llama 3 use it: no BOS of its own, ChatML's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    return tokenizer


def sentence(*, strip: bool = True) -> Tokenizer:
    """BPE with byte tokens and U+2581 for spaces: Llama 2's way with `strip` (a space is prepended to the text and
    stripped when decoding), Gemma's without."""
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(marks if strip else marks[1:])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    plain = [text for text in CORPUS if text.isascii()]
    tokenizer.train_from_iterator(plain, trainers.BpeTrainer(vocab_size=420, special_tokens=special))
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = [t for t in made["added_tokens"] if not t["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """Unigram with a Metaspace decoder, as in T5 and XLNet."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """WordPiece, whose decoding of a token depends on its position in the text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=250, special_tokens=special))
    return tokenizer


KINDS = {"byte_level": byte_level, "sentence": sentence, "gemma": lambda: sentence(strip=False)}
OTHER_KINDS = {"metaspace": metaspace, "word_piece": word_piece}


def write_folder(folder: Path, tokenizer: Tokenizer | None, **files: Any) -> Path:
    """Write a model folder; `config`, `generation_config`, `tokenizer_config`, `special_tokens_map` are JSON objects
    and `chat_template` is text. config.json has a vocabulary and a context unless it is given."""
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        files.setdefault("config", {"vocab_size": size, "max_position_embeddings": 2048})
    if "chat_template" in files:
        (folder / "chat_template.jinja").write_text(files.pop("chat_template"), encoding="utf-8")
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

LLAMA3 = """{{- bos_token }}
{%- set today = strftime_now("%d %b %Y") %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|head|>system<|/head|>\\n\\nToday: " + today + "\\n" + system + "<|eot|>" }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """{{ bos_token }}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<turn>' + role + '\\n' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '</turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<turn>model\\n' }}{%- endif -%}
"""

MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{% continue %}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\
{% else %}{{ raise_exception('Only user, system and assistant roles are supported!') }}{% endif %}{% endfor %}"""

PARTS_ONLY = """{% for message in messages %}[{{ message.role }}]{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{% endfor %}"""

QWEN3 = """{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last or thought %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

MOVES_THE_MARK = """{%- set mark = 'CONTINUE_FINAL_MESSAGE_TAG ' -%}
{%- for message in messages -%}
{%- set content = message.content -%}
{%- set marked = content.endswith(mark) -%}
{%- if marked -%}{%- set content = content[:(content | length) - (mark | length)] -%}{%- endif -%}
{{- '[' + message.role + ']' + content + '(end of text)' -}}
{%- if marked -%}{{- mark -}}{%- endif -%}
{{- '[/]' -}}
{%- endfor -%}"""
