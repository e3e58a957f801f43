"""Text view with a token for every byte, and special tokens: tokens cut code points and markers anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from treadle.text import TextView
from treadle.text.formats.reader import Segment
from treadle.text.token_decoder import ByteTokenDecoder


class ByteModel:
    """The parts of a TextView that streams use."""

    def __init__(self, special: Sequence[str] = ()) -> None:
        tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in special]
        self.token_decoder = ByteTokenDecoder(lambda token: tokens[token] if token < len(tokens) else None)
        self.named_ids = {text: 256 + place for place, text in enumerate(special)}
        self.special_ids = frozenset(self.named_ids.values())

    def token_text(self, token: int) -> str:
        return self.token_decoder.bytes_of(token).decode("utf-8", "replace")

    @property
    def view(self) -> TextView:
        return cast(TextView, self)

    def tokens(self, segments: Sequence[Segment]) -> list[int]:
        return [token for segment in segments for token in self._tokens(*segment)]

    def _tokens(self, text: str, special: bool) -> Iterator[int]:
        if special:
            yield self.named_ids[text]
        else:
            yield from text.encode()
