"""Tokenizer, chat template and text settings of one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ..errors import ContextLengthExceeded, InvalidRequest, ModelError, UnsupportedParameter, one_line
from ..regular_files import read_regular
from .answer_formats import AUTO, AnswerFormats, choose_formats
from .byte_decoders import byte_token_decoder
from .check import check_text
from .folder import FolderConfig
from .formats.registry import find
from .images import Layout, read_image_settings
from .images.prompt import ImageForm, ImageTexts, PlacedImage, images_of
from .past_calls import PastCallWriter
from .special_tokens import GuardedChat, Separator, SpecialTokenGuard
from .template_traits import TemplateTraits
from .templates import ChatTemplate, TemplateRefusal, find_template
from .text_view import NO_CHATS_CURE, TextView
from .token_decoder import ByteTokenDecoder, TokenDecoder
from .turn_forms import forms
from .window_decoder import WindowTokenDecoder

MAX_VOCABULARY = 1 << 22
_NAME_CHARS = 256
NO_TEMPLATE = "this model has no chat template"
NO_LAYOUTS: Mapping[bytes, Layout] = {}
_ENOUGH = 2.0  # contexts of text to tokenize first, if the prompt looks over twice as long
_SPARE = 16
_SAMPLE = (
    "The ship left the harbour at 06:45, three hours late, and nobody aboard could say why.\n\n"
    'def area(width: float, height: float) -> float:\n    """Square metres."""\n    return width * height\n\n'
    '{"name": "Ada", "tags": ["first", "programmer"], "born": 1815, "active": false}\n'
    "Über den Dächern lag Schnee; les élèves rentraient déjà à la maison. ¿Dónde está la estación?\n"
    "今日は天気がいいので、公園まで歩きました。Сегодня хорошая погода. 🙂👍🏽\n"
    "- item one\n- item two: https://example.org/path?query=1&page=2\n\t| a | b |\n"
)


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered chat: its token ids, its text, and the places of its images."""

    ids: list[int]
    text: str
    images: Sequence[PlacedImage] = ()


@dataclass(frozen=True, eq=False)
class TextModel(TextView):
    """A text view with its tokenizer, the name of that one's class in transformers, and its chat template (None when
    the folder has none)."""

    chat_template: ChatTemplate | None
    tokenizer_class: str
    guard: SpecialTokenGuard = field(repr=False)
    _tokenizer: Tokenizer = field(repr=False)
    _overflows: bool = field(repr=False)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        chat_template: Path | None = None,
        context: int | None = None,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        stage: Callable[[str, int], None] = lambda name, size_bytes: None,
    ) -> TextModel:
        """Load a folder in Hugging Face layout. `chat_template`: a file that replaces the folder's own template.
        `tool_parser` and `reasoning_parser`: see `choose_formats`.
        `stage(name, size_bytes)` is called before "template" (size 0) and "tokenizer" (size of its file) are read.

        Parsing a large tokenizer.json holds the GIL (about a second for 262,144 tokens). Raises ModelError when the
        folder can't be used, ConfigError when `context` or `chat_template` can't.
        """
        files = FolderConfig.read(folder)
        length = files.context(context)
        stage("template", 0)
        template = find_template(files, chat_template)
        formats = choose_formats(template, tool_parser, reasoning_parser)
        path = folder / "tokenizer.json"
        stage("tokenizer", path.stat().st_size if path.is_file() else 0)
        tokenizer = _open(path)
        _add_declared_tokens(tokenizer, files)
        return cls._of(files, tokenizer, length, template, formats)

    @classmethod
    def _of(
        cls,
        files: FolderConfig,
        tokenizer: Tokenizer,
        context: int,
        template: ChatTemplate | None,
        formats: AnswerFormats,
    ) -> TextModel:
        sample = _ids(tokenizer, _SAMPLE, add_special_tokens=False)
        added = tokenizer.get_added_tokens_decoder()
        ceiling = _id_limit(tokenizer)
        vocabulary, special = files.vocabulary() or ceiling, files.special_tokens()
        if max(ceiling, vocabulary) > MAX_VOCABULARY:
            raise ModelError(f"{files.folder} has a vocabulary of over {MAX_VOCABULARY} tokens, which no model has")
        if sample and max(sample) >= vocabulary:
            raise ModelError(
                f"{files.folder} has a tokenizer of another model: plain text holds the token {max(sample)}, and the "
                f"model has {vocabulary} tokens (vocab_size of config.json); download it again, or use another model"
            )
        eos = tokenizer.token_to_id(special.get("eos_token", ""))
        token_decoder = byte_token_decoder(tokenizer, [sample]) or WindowTokenDecoder(tokenizer)
        images, no_images = read_image_settings(
            files.config, files.preprocessor, files.processor, tokenizer.token_to_id, special
        )
        return cls(
            folder=files.folder,
            vocabulary=vocabulary,
            context=context,
            eos_token_ids=files.eos_ids(vocabulary) or (() if eos is None else (eos,)),
            default_sampling=files.default_sampling(),
            stop_strings=files.stop_strings(),
            special_tokens=special,
            special_ids=frozenset(i for i, token in added.items() if token.special),
            named_ids=_named_ids(tokenizer, added, special),
            bytes_per_token=len(_SAMPLE.encode("utf-8")) / max(1, len(sample)),
            longest_token=_longest_token(token_decoder, range(max(ceiling, vocabulary))),
            model_type=str(files.config.get("model_type", ""))[:_NAME_CHARS],
            architectures=files.architectures(),
            no_chats=_no_chats(template),
            token_decoder=token_decoder,
            prefix=_tokens_before_text(tokenizer),
            formats=formats,
            images=images,
            no_images=no_images,
            chat_template=template,
            tokenizer_class=files.tokenizer_class(),
            guard=_guard(added, template, special.get("eos_token"), () if images is None else images.literal_tokens),
            _tokenizer=tokenizer,
            _overflows=ceiling > vocabulary,
        )

    @property
    def ids(self) -> range:
        """All ids that the model or the tokenizer has."""
        return range(max(self.vocabulary, _id_limit(self._tokenizer)))

    @property
    def grammar_tokens(self) -> dict[str, int]:
        """Ids by text of the tokens that a grammar must name by id: special ones, and added ones in angle brackets,
        which llguidance takes for special."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {
            token.content: i
            for i, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Tokenize `text`; with `add_special_tokens` add the tokenizer's own, such as BOS.

        Releases the GIL. Raises InvalidRequest for lone surrogates and for tokens without an embedding in the model,
        ContextLengthExceeded when a prefix of the text already has more than `most` tokens. The result may still be
        longer than `most`.
        """
        check_text(text)
        if most is not None:
            self._check_start(text, most)
        ids = _ids(self._tokenizer, text, add_special_tokens=add_special_tokens)
        if self._overflows and ids and (top := max(ids)) >= self.vocabulary:
            name = self._tokenizer.id_to_token(top)
            raise InvalidRequest(f"the text holds the token {name!r}, which this model has no embedding for; remove it")
        return ids

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them; "" for ids that the tokenizer does not have."""
        return [self._tokenizer.id_to_token(token) or "" for token in ids]

    def _check_start(self, text: str, most: int) -> None:
        """Tokenize only the start of a text that looks far too long, to refuse it cheaply."""
        start = int(_ENOUGH * (most + _SPARE) * self.bytes_per_token)
        if len(text) <= 2 * start:
            return
        if (count := len(_ids(self._tokenizer, text[:start], add_special_tokens=False))) > most + _SPARE:
            raise ContextLengthExceeded(
                f"the prompt has over {count} tokens and the model's context is {most}: shorten the prompt"
            )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages with the model's chat template, see `ChatTemplate.render`.

        Raises InvalidRequest when there is no template.
        """
        if self.chat_template is None:
            raise InvalidRequest(f"{NO_TEMPLATE}: {NO_CHATS_CURE}", param="messages")
        return self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            extra=extra,
        )

    def encode_chat(self, rendered: str, sentinel: str | None = None, *, most: int | None = None) -> list[int]:
        """Tokenize a rendered chat, with exactly one BOS if the tokenizer adds one, whether the template wrote it or
        not. `sentinel` splits special tokens that stay text (`special_tokens`). `most`: see `encode`."""
        if sentinel is None or sentinel not in rendered:
            ids = self.encode(rendered, add_special_tokens=False, most=most)
        else:
            text, inserted, count = self.guard.to_separators(rendered, sentinel)
            ids = self.guard.drop_separators(self.encode(text, add_special_tokens=False, most=most), inserted, count)
        if self.prefix and tuple(ids[: len(self.prefix)]) != self.prefix:
            return [*self.prefix, *ids]
        return ids

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return the token ids of `chat_prompt`."""
        return self.chat_prompt(messages, **options).ids

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
        rendered: Callable[[], None] = lambda: None,
        most: int | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        images: Mapping[bytes, Layout] = NO_LAYOUTS,
    ) -> ChatPrompt:
        """Render and tokenize messages; special tokens in their texts stay text. Tools and turns that the template
        can't write become text in their place (`turn_forms`).

        `rendered` is called between rendering and tokenizing. `most`: see `encode`. `images` are the layouts of their
        images, by the images' keys. Raises InvalidRequest, the template's own refusal included, and ImagesNeeded for
        images without a layout.
        """
        writer = self._image_texts(messages, images)
        traits = TemplateTraits() if self.chat_template is None else self.chat_template.traits
        definitions = tools if traits.tools else None
        past_calls = PastCallWriter(find(self.formats.tools) if self.formats.by_template else None)
        refusal: TemplateRefusal | None = None
        for turns in forms(messages, tools, traits, past_calls.write):
            for form in self._image_forms(turns, writer):
                guarded = self._guarded(form.turns, extra or {}, definitions or ())
                try:
                    text = self.render_chat(
                        form.turns if guarded is None else guarded.messages,
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=continue_final_message,
                        tools=definitions if guarded is None else guarded.tools,
                        extra=extra if guarded is None else guarded.extra,
                    )
                except TemplateRefusal as error:
                    refusal = refusal or error
                    continue
                restored = past_calls.restore(text)
                filled = restored if writer is None else writer.fill(restored, form, turns)
                if filled is None:
                    refusal = refusal or _no_place_for_images()
                    continue
                rendered()
                ids = self.encode_chat(filled, None if guarded is None else guarded.sentinel, most=most)
                return ChatPrompt(ids, filled, () if writer is None else writer.places(ids, turns))
        assert refusal is not None
        raise refusal

    def _image_texts(self, messages: Sequence[Mapping[str, Any]], images: Mapping[bytes, Layout]) -> ImageTexts | None:
        """Return the writer of the messages' images; None where there are none. Raises ImagesNeeded, and
        UnsupportedParameter where the model reads none."""
        first = next(images_of(messages), None)
        if first is None:
            return None
        if self.images is None:
            raise UnsupportedParameter(f"{first.at} is an image, and {self.no_images}: leave it out", param=first.at)
        return ImageTexts(self.images, images, messages)

    def _image_forms(self, turns: list[dict[str, Any]], writer: ImageTexts | None) -> Iterator[ImageForm]:
        if writer is None or self.images is None or self.chat_template is None:
            yield ImageForm(turns)
            return
        text = self.chat_template.image_text(self.images.placeholder)
        yield from writer.forms(turns, text, by_template=self.chat_template.takes_parts)

    def _guarded(
        self, turns: Sequence[Mapping[str, Any]], extra: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
    ) -> GuardedChat | None:
        try:
            return self.guard.split_special_tokens(turns, extra, tools)
        except RecursionError:
            raise InvalidRequest(
                "tools, or the arguments of a call, are nested too deeply: flatten them", param="messages"
            ) from None


def _no_place_for_images() -> TemplateRefusal:
    return TemplateRefusal("the model's chat template does not write these images: send fewer", param="messages")


def _no_chats(template: ChatTemplate | None) -> str:
    """Return the reason for which chats are refused; "" if they are not."""
    if template is None:
        return NO_TEMPLATE
    return template.fault and f"the chat template in {template.name} {template.fault}"


def _open(path: Path) -> Tokenizer:
    try:
        data = read_regular(path)
    except OSError as error:
        raise ModelError(
            f"can't read {path} ({error.strerror}): Treadle needs the fast tokenizer file tokenizer.json; "
            "save one with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        ) from error
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except ValueError as error:
        raise ModelError(f"{path} is broken or too new for this version of tokenizers: {one_line(error)}") from error
    # A file saved during training may have truncation or padding enabled.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _guard(
    added: Mapping[int, AddedToken], template: ChatTemplate | None, eos: str | None, of_images: Sequence[str]
) -> SpecialTokenGuard:
    """Build the guard. Its separator is a special token that strips no neighbouring space, preferably EOS. The tokens
    `of_images` are special too."""
    special = {token.content: token for token in added.values() if token.special and token.content}
    ids = {token.content: i for i, token in added.items()}
    candidates = sorted(
        special.values(), key=lambda t: (t.single_word, t.lstrip or t.rstrip or t.normalized, t.content != eos)
    )
    separator = Separator(candidates[0].content, ids[candidates[0].content]) if candidates else None
    literal_text = "" if template is None else template.literal_text
    template_tokens = [token.content for token in added.values() if not token.special and token.content in literal_text]
    return SpecialTokenGuard([*special, *of_images], template_tokens, separator)


def _id_limit(tokenizer: Tokenizer) -> int:
    """Return one above the tokenizer's highest id."""
    added = tokenizer.get_added_tokens_decoder()
    return max([tokenizer.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])


def _longest_token(token_decoder: TokenDecoder, ids: range) -> int:
    """Return the length of the longest token in bytes, at least 1."""
    lookup = token_decoder.lookup if isinstance(token_decoder, ByteTokenDecoder) else token_decoder.bytes_of
    return max(1, *(len(lookup(token) or b"") for token in ids))


def _named_ids(tokenizer: Tokenizer, added: Mapping[int, AddedToken], special: Mapping[str, str]) -> dict[str, int]:
    """Return the ids of special tokens by text: added tokens flagged special, and those named in the folder's files."""
    found = {token.content: i for i, token in added.items() if token.special}
    named = {content: tokenizer.token_to_id(content) for content in special.values()}
    return found | {content: i for content, i in named.items() if i is not None}


def _add_declared_tokens(tokenizer: Tokenizer, files: FolderConfig) -> None:
    """Add tokens of tokenizer_config.json that tokenizer.json lacks, if they get their declared ids."""
    known = tokenizer.get_added_tokens_decoder()
    names = {token.content for token in known.values()}
    for number, token in files.declared_tokens():
        expected = tokenizer.token_to_id(token["content"])
        free = tokenizer.get_vocab_size(with_added_tokens=True)
        if token["content"] not in names and number == (free if expected is None else expected):
            tokenizer.add_tokens([AddedToken(**token)])
            names.add(token["content"])
    special = [v for v in files.special_tokens().values() if v not in names and tokenizer.token_to_id(v) is not None]
    tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in special])


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    # Only the batch call releases the GIL.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _tokens_before_text(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that the tokenizer puts before a text: usually BOS or none."""
    bare, full = (_ids(tokenizer, "a", add_special_tokens=add) for add in (False, True))
    for start in range(len(full) - len(bare) + 1):
        if bare and full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()
