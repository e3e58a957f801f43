"""The text side of one model: its tokenizer, its chat template and what its folder says about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ..errors import ContextLengthExceeded, InvalidRequest, ModelError, one_line
from .check import check_text
from .decoders import byte_pieces
from .folder import FolderFacts, read_regular
from .special_tokens import Separator, SpecialTokenGuard
from .templates import ChatTemplate, find_template
from .token_bytes import BytePieces, TokenBytes
from .view import TextView
from .window import WindowPieces

MOST_TOKENS = 1 << 22
_NAME_CHARS = 256
_ENOUGH = 2.0  # contexts of text to tokenize first where there are over twice as many
_SPARE = 16
_SAMPLE = (
    "The ship left the harbour at 06:45, three hours late, and nobody aboard could say why.\n\n"
    'def area(width: float, height: float) -> float:\n    """Square metres."""\n    return width * height\n\n'
    '{"name": "Ada", "tags": ["first", "programmer"], "born": 1815, "active": false}\n'
    "Über den Dächern lag Schnee; les élèves rentraient déjà à la maison. ¿Dónde está la estación?\n"
    "今日は天気がいいので、公園まで歩きました。Сегодня хорошая погода. 🙂👍🏽\n"
    "- item one\n- item two: https://example.org/path?query=1&page=2\n\t| a | b |\n"
)


@dataclass(frozen=True, eq=False)
class TextModel(TextView):
    """A loaded tokenizer and chat template, with everything that is known of the model's text.

    `chat_template` is None when the folder has none.
    """

    chat_template: ChatTemplate | None
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
        stage: Callable[[str, int], None] = lambda name, size_bytes: None,
    ) -> TextModel:
        """Load a folder in Hugging Face layout; `chat_template` is a file that replaces the folder's own template.
        `stage` is told what is read now, "template" or "tokenizer", and the size of its file where that matters.

        Parsing a large tokenizer.json holds the GIL (about a second for 262,144 tokens), on whatever thread this runs.
        Raises ModelError when the folder is unfit, ConfigError when `context` or `chat_template` is.
        """
        facts = FolderFacts.read(folder)
        length = facts.context(context)
        stage("template", 0)
        template = find_template(facts, chat_template)
        path = folder / "tokenizer.json"
        stage("tokenizer", path.stat().st_size if path.is_file() else 0)
        tokenizer = _open(path)
        _add_declared(tokenizer, facts)
        return cls._of(facts, tokenizer, length, template)

    @classmethod
    def _of(cls, facts: FolderFacts, tokenizer: Tokenizer, context: int, template: ChatTemplate | None) -> TextModel:
        plain = _ids(tokenizer, _SAMPLE, add_special_tokens=False)
        added = tokenizer.get_added_tokens_decoder()
        ceiling = _ceiling(tokenizer)
        vocabulary, special = facts.vocabulary() or ceiling, facts.special_tokens()
        if max(ceiling, vocabulary) > MOST_TOKENS:
            raise ModelError(f"{facts.folder} has a vocabulary of over {MOST_TOKENS} tokens, which no model has")
        eos = tokenizer.token_to_id(special.get("eos_token", ""))
        pieces = byte_pieces(tokenizer, [plain]) or WindowPieces(tokenizer)
        return cls(
            folder=facts.folder,
            vocabulary=vocabulary,
            context=context,
            eos_token_ids=facts.eos_ids(vocabulary) or (() if eos is None else (eos,)),
            default_sampling=facts.default_sampling(),
            stop_strings=facts.stop_strings(),
            special_tokens=special,
            special_ids=frozenset(i for i, token in added.items() if token.special),
            named_ids=_named_ids(tokenizer, added, special),
            bytes_per_token=len(_SAMPLE.encode("utf-8")) / max(1, len(plain)),
            longest_token=_longest(pieces, range(max(ceiling, vocabulary))),
            model_type=str(facts.config.get("model_type", ""))[:_NAME_CHARS],
            architectures=facts.architectures(),
            has_template=template is not None,
            pieces=pieces,
            prefix=_prefix(tokenizer),
            chat_template=template,
            guard=_guard(added, template, special.get("eos_token")),
            _tokenizer=tokenizer,
            _overflows=ceiling > vocabulary,
        )

    @property
    def ids(self) -> range:
        """All ids that the model or the tokenizer has."""
        return range(max(self.vocabulary, _ceiling(self._tokenizer)))

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """The text's token ids; with `add_special_tokens` also what the tokenizer puts around it (BOS).

        Releases the GIL while it works. Raises InvalidRequest for text that is none (lone surrogates) and for tokens
        that the model has no embedding for; ContextLengthExceeded for a text that a part of it shows to have more than
        `most` tokens. A text that passes may still have more.
        """
        check_text(text)
        if most is not None:
            self._check_start(text, most)
        ids = _ids(self._tokenizer, text, add_special_tokens=add_special_tokens)
        if self._overflows and ids and (top := max(ids)) >= self.vocabulary:
            name = self._tokenizer.id_to_token(top)
            raise InvalidRequest(f"the text holds the token {name!r}, which this model has no embedding for; remove it")
        return ids

    def _check_start(self, text: str, most: int) -> None:
        """Tokenize the start of a text that looks far too long: no more of it is needed to refuse it."""
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
        """The messages as the model's chat template writes them, see `ChatTemplate.render`.

        Raises InvalidRequest when there is no template.
        """
        if self.chat_template is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE",
                param="messages",
            )
        return self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            extra=extra,
        )

    def encode_chat(self, rendered: str, sign: str | None = None, *, most: int | None = None) -> list[int]:
        """Ids of a rendered chat, with exactly one BOS where the tokenizer wants one, whether the template wrote it
        or not. `sign` splits special tokens that are to stay text (`guard`); `most` is that of `encode`."""
        if sign is None or sign not in rendered:
            ids = self.encode(rendered, add_special_tokens=False, most=most)
        else:
            text, ours, count = self.guard.separated(rendered, sign)
            ids = self.guard.without(self.encode(text, add_special_tokens=False, most=most), ours, count)
        if self.prefix and tuple(ids[: len(self.prefix)]) != self.prefix:
            return [*self.prefix, *ids]
        return ids

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        extra: Mapping[str, Any] | None = None,
        rendered: Callable[[], None] = lambda: None,
        most: int | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Ids of the messages as the model's chat template writes them; special tokens in their texts stay text.

        `most` is that of `encode`; `rendered` is called between the template's work and the tokenizer's.
        """
        guarded = self.guard.marked(messages, extra or {})
        if guarded is not None:
            messages, extra = guarded.messages, guarded.extra
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            extra=extra,
        )
        rendered()
        return self.encode_chat(text, None if guarded is None else guarded.sign, most=most)


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
    # Files saved during training may cut or pad every text without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _guard(added: Mapping[int, AddedToken], template: ChatTemplate | None, eos: str | None) -> SpecialTokenGuard:
    """The separator is a token that takes no neighbouring space along, the end token if it may be."""
    special = {token.content: token for token in added.values() if token.special and token.content}
    ids = {token.content: i for i, token in added.items()}
    plain = sorted(
        special.values(), key=lambda t: (t.single_word, t.lstrip or t.rstrip or t.normalized, t.content != eos)
    )
    separator = Separator(plain[0].content, ids[plain[0].content]) if plain else None
    written = "" if template is None else template.written
    markers = [token.content for token in added.values() if not token.special and token.content in written]
    return SpecialTokenGuard(special, markers, separator)


def _ceiling(tokenizer: Tokenizer) -> int:
    """One above the tokenizer's highest id."""
    added = tokenizer.get_added_tokens_decoder()
    return max([tokenizer.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])


def _longest(pieces: TokenBytes, ids: range) -> int:
    """The bytes of the longest token."""
    find = pieces.find if isinstance(pieces, BytePieces) else pieces.bytes_of
    return max(1, *(len(find(token) or b"") for token in ids))


def _named_ids(tokenizer: Tokenizer, added: Mapping[int, AddedToken], special: Mapping[str, str]) -> dict[str, int]:
    """The ids of special tokens by their texts: those that text hides, and those that the folder names."""
    found = {token.content: i for i, token in added.items() if token.special}
    named = {content: tokenizer.token_to_id(content) for content in special.values()}
    return found | {content: i for content, i in named.items() if i is not None}


def _add_declared(tokenizer: Tokenizer, facts: FolderFacts) -> None:
    """Add the tokens that tokenizer_config.json declares and tokenizer.json lacks, where their ids come out right."""
    known = tokenizer.get_added_tokens_decoder()
    names = {token.content for token in known.values()}
    for number, token in facts.declared_tokens():
        expected = tokenizer.token_to_id(token["content"])
        free = tokenizer.get_vocab_size(with_added_tokens=True)
        if token["content"] not in names and number == (free if expected is None else expected):
            tokenizer.add_tokens([AddedToken(**token)])
            names.add(token["content"])
    special = [v for v in facts.special_tokens().values() if v not in names and tokenizer.token_to_id(v) is not None]
    tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in special])


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    # The batch call is the one that releases the GIL.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the tokenizer puts before a text: usually BOS or nothing."""
    bare, full = (_ids(tokenizer, "a", add_special_tokens=add) for add in (False, True))
    for start in range(len(full) - len(bare) + 1):
        if bare and full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()
