"""The demo's tokenizer and chat template, from the vocabulary inside its GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_SPACE = "\u2581"
_CONTROL, _USER_DEFINED = 3, 4

# The demo is a base model, not trained on Gemma's turn tokens, but it continues a dialogue in plain text. STOP_STRINGS
# end its turn; they include the empty line before the next one. The template writes BOS, as most do, and its output is
# tokenized without special tokens. No space follows "Assistant:", as the model's words begin with one.
STOP_STRINGS = ("\nUser:", "\n\nUser:", "\nAssistant:", "\n\nAssistant:")

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content is iterable and content is not mapping -%}
    {%- for part in content -%}
      {%- if part.type == 'text' -%}
        {{- part.text -}}
      {%- else -%}
        {{- raise_exception('this model reads text only, not ' ~ part.type) -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role in ['system', 'developer'] -%}
    {{- (text(message.content) | trim) ~ '\\n\\n' -}}
  {%- elif message.role in ['user', 'assistant'] -%}
    {{- message.role | capitalize ~ ': ' ~ (text(message.content) | trim) ~ '\\n' -}}
  {%- else -%}
    {{- raise_exception('this model knows the roles system, user and assistant, not ' ~ message.role) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- 'Assistant:' -}}
{%- endif -%}
"""


def build(tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    """Build Gemma's tokenizer, which adds BOS, from `tokens` in id order and their GGUF token types (`kinds`).

    GGUF stores runs of spaces as spaces, the model uses U+2581. GGUF has no merges; they follow from the order of ids.
    """
    spelled = [token.replace(" ", _SPACE) for token in tokens]
    vocabulary = {token: index for index, token in enumerate(spelled)}
    merges = list(_merges(spelled, vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(_added(spelled, kinds, _CONTROL, special=True))
    tokenizer.add_tokens(_added(spelled, kinds, _USER_DEFINED, special=False))
    bos = vocabulary["<bos>"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", bos)]
    )
    return tokenizer


def _added(tokens: Sequence[str], kinds: Sequence[int], kind: int, *, special: bool) -> list[AddedToken]:
    """Return the added tokens of one kind, without runs of white space, which merges produce."""
    chosen = (token for token, its_kind in zip(tokens, kinds, strict=True) if its_kind == kind)
    named = (token for token in chosen if token.replace(_SPACE, " ").strip())
    return [AddedToken(token, special=special, normalized=False) for token in named]


def _merges(tokens: Sequence[str], vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yield all pairs of tokens that join to a token, ordered by its id, then by the longest left part."""
    for token in tokens:
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                yield left, right
