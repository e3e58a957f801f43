"""Reader of content blocks: their places, their types, and the text of those that are text.

`cache_control`, `citations` of earlier answers and unknown keys change nothing about a prompt and are ignored. A block
that the model can't read is refused by its type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ....errors import InvalidRequest, UnsupportedParameter
from ....text.images import ImageSource
from ....text.images.prompt import image_part
from ...chat_messages import MAX_PARTS
from ...field_checks import checked, quoted, require_array, require_type
from ...media.parts import source_of_url

IMAGE = "image"
TEXT, DOCUMENT, SEARCH_RESULT, TOOL_REFERENCE = "text", "document", "search_result", "tool_reference"


Content = str | list[dict[str, Any]]


class Block(NamedTuple):
    """A content block and its place in the request. Blocks of unknown types have been refused."""

    kind: str
    value: Mapping[str, Any]
    at: str


def read_blocks(content: Any, at: str, *, may_be_empty: bool = False) -> list[Block]:
    """Return the blocks of a message's or a result's content; a string is one block of text. Raises InvalidRequest."""
    if isinstance(content, str):
        return [Block(TEXT, {"text": content}, at)]
    if content is None:
        content = [] if may_be_empty else None
    expected = "a string or an array of content blocks"
    require_array(content, at, "block", MAX_PARTS, expected=expected, may_be_empty=may_be_empty)
    return [_block(value, f"{at}[{i}]") for i, value in enumerate(content)]


def _block(value: Any, at: str) -> Block:
    require_type(value, Mapping, "an object with a type", at)
    kind = value.get("type")
    require_type(kind, str, "a type of content block", f"{at}.type")
    return Block(kind, value, at)


def refused(block: Block) -> UnsupportedParameter:
    """Return the refusal of a block that can't be at its place."""
    place = f"{block.at}.type"
    cure = (
        "images are in messages of the user and in results of tools" if block.kind == IMAGE else "send text or images"
    )
    return UnsupportedParameter(f"{place} '{block.kind[:64]}' is not supported here: {cure}", param=place)


def required(block: Block, key: str) -> str:
    """Return a string of the block. Raises InvalidRequest where it is missing or has another type."""
    text = checked(block.value, key, str, "a string", block.at)
    if text is None:
        place = f"{block.at}.{key}"
        raise InvalidRequest(f"{place} is missing: give a string", param=place)
    return str(text)


# Images ----------------------------------------------------------------------------------------------------------


def pieces_of(blocks: Iterable[Block]) -> Content:
    """Return the content of blocks of text and images: one text, or parts where there are images."""
    pieces: list[list[str] | ImageSource] = []
    for block in blocks:
        if block.kind == IMAGE:
            pieces.append(_image(block))
        elif pieces and isinstance(pieces[-1], list):
            pieces[-1].append(text_of(block))
        else:
            pieces.append([text_of(block)])
    if not any(isinstance(piece, ImageSource) for piece in pieces):
        return joined(text for piece in pieces if isinstance(piece, list) for text in piece)
    return [
        image_part(piece) if isinstance(piece, ImageSource) else {"type": TEXT, "text": joined(piece)}
        for piece in pieces
    ]


def _image(block: Block) -> ImageSource:
    at = f"{block.at}.source"
    source = checked(block.value, "source", Mapping, "an object with a type", block.at)
    if source is None:
        raise InvalidRequest(f"{at} is missing: give an object with a type", param=at)
    kind, own = source.get("type"), Block("source", source, at)
    if kind == "base64":
        return ImageSource(f"{at}.data", data=required(own, "data"), media_type=required(own, "media_type")[:128])
    if kind == "url":
        return source_of_url(required(own, "url"), f"{at}.url")
    raise UnsupportedParameter(
        f"{at}.type {quoted(kind, 64)} is not supported here: send the image as 'base64' or 'url'", param=f"{at}.type"
    )


# Text ------------------------------------------------------------------------------------------------------------


def text_of(block: Block) -> str:
    """Return the text of a block that is text, or holds text. Raises UnsupportedParameter for others."""
    reader = _READERS.get(block.kind)
    if reader is None:
        raise refused(block)
    return reader(block)


def joined(texts: Iterable[str]) -> str:
    """Return texts of several blocks as one. Blocks are apart by a line break, unless one is there."""
    whole = ""
    for text in texts:
        apart = not whole or not text or whole.endswith("\n") or text.startswith("\n")
        whole += text if apart else "\n" + text
    return whole


def _text(block: Block) -> str:
    return required(block, "text")


def _document(block: Block) -> str:
    _refuse_citations(block)
    source = checked(block.value, "source", Mapping, "an object with a type", block.at) or {}
    at = f"{block.at}.source"
    if source.get("type") == "text":
        text = required(Block("source", source, at), "data")
    elif source.get("type") == "content":
        text = joined(_plain(part) for part in read_blocks(source.get("content"), f"{at}.content"))
    else:
        kind = quoted(source.get("type"), 64)
        raise UnsupportedParameter(
            f"{at}.type {kind} is not supported here: send the document's text, as 'text' or 'content'",
            param=f"{at}.type",
        )
    return _tagged("document", block, ("title", "context"), text)


def _search_result(block: Block) -> str:
    _refuse_citations(block)
    required(block, "source")
    text = joined(_plain(part) for part in read_blocks(block.value.get("content"), f"{block.at}.content"))
    return _tagged("search_result", block, ("source", "title"), text)


def _tool_reference(block: Block) -> str:
    """Return the name of a tool that a client's own search has found. All tools are described in the prompt."""
    return f"Tool: {required(block, 'tool_name')}"


def _plain(block: Block) -> str:
    if block.kind != TEXT:
        raise refused(block)
    return _text(block)


def _tagged(tag: str, block: Block, keys: Sequence[str], text: str) -> str:
    given = {key: checked(block.value, key, str, "a string", block.at) for key in keys}
    attributes = "".join(f' {key}="{value}"' for key, value in given.items() if value)
    return f"<{tag}{attributes}>\n{text}\n</{tag}>"


def _refuse_citations(block: Block) -> None:
    citations = checked(block.value, "citations", Mapping, "an object", block.at) or {}
    if checked(citations, "enabled", bool, "true or false", f"{block.at}.citations"):
        place = f"{block.at}.citations.enabled"
        raise UnsupportedParameter(f"{place} is not supported here: leave it out or send false", param=place)


_READERS: Mapping[str, Callable[[Block], str]] = {
    TEXT: _text,
    DOCUMENT: _document,
    SEARCH_RESULT: _search_result,
    TOOL_REFERENCE: _tool_reference,
}
