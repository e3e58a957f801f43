"""Bytes of images in base64: the limit is that of the image, however its base64 is written."""

from __future__ import annotations

import base64

import pytest

from treadle.errors import InvalidRequest
from treadle.fronts.media.needed import MAX_IMAGE_BYTES, needed_image
from treadle.text.images import ImageSource


def test_line_breaks_do_not_count_as_bytes_of_the_image() -> None:
    data = bytes(MAX_IMAGE_BYTES)
    assert needed_image(ImageSource("at", data=base64.encodebytes(data).decode())).data == data
    longer = base64.encodebytes(data + bytes(8)).decode()
    with pytest.raises(InvalidRequest, match="over 20 MiB"):
        needed_image(ImageSource("at", data=longer))


@pytest.mark.parametrize("data", [b"1", b"12", b"123", b"1234"])
def test_padding_may_be_missing(data: bytes) -> None:
    written = base64.b64encode(data).decode()
    for one in (written, written.rstrip("="), written.rstrip("=") + "\n"):
        assert needed_image(ImageSource("at", data=one)).data == data


def test_what_the_library_wrote_may_have_any_size() -> None:
    data = bytes(MAX_IMAGE_BYTES + 8)
    source = ImageSource("at", data=base64.b64encode(data).decode(), any_size=True)
    assert needed_image(source).data == data
