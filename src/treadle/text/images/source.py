"""An image of a message, as its client sent it."""

from __future__ import annotations

import hashlib

import msgspec


class ImageSource(msgspec.Struct, frozen=True, omit_defaults=True):
    """The place of an image in the request, `at`, and the image: `data` in base64 with its media type ("" where the
    client tells none), or the `url` it is at. `low`: few tokens are enough. `any_size`: it is no file of a client but
    was written by the library, and no limit of bytes holds for it."""

    at: str
    data: str = ""
    media_type: str = ""
    url: str = ""
    low: bool = False
    any_size: bool = False

    @property
    def key(self) -> bytes:
        """Digest of the image as it was sent: equal images of a request are prepared once."""
        digest = hashlib.sha256(b"low" if self.low else b"all")
        for part in (self.media_type, self.url, self.data):
            digest.update(b"\0" + part.encode("utf-8", "surrogatepass"))
        return digest.digest()
