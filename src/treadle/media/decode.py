"""Decoding of images: bytes of a few formats to RGB pixels, upright, under limits that hold before anything is decoded.

An image is what its bytes are. A media type that says otherwise is refused, as it is in the clouds' APIs.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from ..errors import InvalidRequest
from .jpeg_scans import MOST_SCANS, has_too_many_scans

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
NAMES = "PNG, JPEG, WebP, GIF or BMP"
MEDIA_TYPES = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",
    "image/pjpeg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
    "image/x-ms-bmp": "BMP",
}
UNTOLD = ("", "application/octet-stream", "binary/octet-stream", "image/*")
"""Media types that don't tell the format."""
_TURNED = (5, 6, 7, 8)  # orientations of EXIF that exchange width and height
_TRANSPOSED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""How to make an image of an orientation upright. Pillow's own function writes the EXIF data anew, and fails where one
of its entries is of another type than it should be."""

T = TypeVar("T")


def open_image(data: bytes, media_type: str, most_pixels: int) -> Image.Image:
    """Return an image whose header alone was read. Raises InvalidRequest."""
    if not data:
        raise InvalidRequest("the image is empty: send its bytes")
    Image.MAX_IMAGE_PIXELS = None  # this limit is checked below
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    expected = _format_of(media_type)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InvalidRequest(f"the bytes are not an image that can be read here: send {NAMES}") from None
    except MemoryError:
        raise
    except Exception as error:
        raise _damaged(error) from None
    found = "JPEG" if image.format == "MPO" else str(image.format)
    if expected is not None and found != expected:
        raise InvalidRequest(f"the image is said to be {media_type}, and its bytes are {found}: correct the media type")
    _check_size(image, most_pixels)
    if found == "JPEG" and has_too_many_scans(data):
        raise InvalidRequest(f"the image has over {MOST_SCANS} scans, as no encoder writes them: save it again")
    return image


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return the width and height of the image as it is seen. Raises InvalidRequest for a damaged one."""
    width, height = image.size
    return (height, width) if _orientation(image) in _TURNED else (width, height)


def decode(image: Image.Image) -> Image.Image:
    """Decode the first frame: upright, in RGB. Raises InvalidRequest for a damaged one."""
    _check_pixels(image)
    orientation = _orientation(image)
    _guarded(image.load)
    plain = _guarded(lambda: _eight_bits(image))
    upright = _TRANSPOSED.get(orientation)
    if upright is not None:
        plain = _guarded(lambda: plain.transpose(upright))
    return _guarded(lambda: plain.convert("RGB"))


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return the image in a mode that Pillow converts as it is seen. Of levels of 16 bits that is the upper byte, as
    Pillow itself reads colours of 16 bits: it converts grey ones so that all but the darkest are white. Older releases
    open them in the mode of 32 bits, whose levels are those of 8 bits in other images."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("LA") if image.mode == "La" else image


def _format_of(media_type: str) -> str | None:
    """Return the format that a media type names; None where it names none. Raises InvalidRequest for other types."""
    name = media_type.partition(";")[0].strip().lower()
    if name in UNTOLD:
        return None
    if name not in MEDIA_TYPES:
        raise InvalidRequest(f"the media type '{name[:64]}' is not read here: send {NAMES}")
    return MEDIA_TYPES[name]


def _check_size(image: Image.Image, most_pixels: int) -> None:
    _check_pixels(image)
    width, height = image.size
    if width * height > most_pixels:
        raise InvalidRequest(
            f"the image has {width} x {height} pixels and {most_pixels} are read here at most: make it smaller"
        )


def _check_pixels(image: Image.Image) -> None:
    if min(image.size) < 1:
        raise InvalidRequest("the image has no pixels: send another")


def _orientation(image: Image.Image) -> int:
    """Return the orientation in the image's EXIF data; 1, upright, where there is none that can be read. Raises
    InvalidRequest for a damaged PNG."""
    if image.format == "PNG":
        _guarded(image.load)  # EXIF data may stand behind the pixels: Pillow would load these, and lose their errors
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = image.getexif().get(ExifTags.Base.Orientation, 1)
    except MemoryError:
        raise
    except Exception:  # the image is shown as it is, as every viewer does
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _guarded(work: Callable[[], T]) -> T:
    """Do work of Pillow, whose errors at damaged data are of many types."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work()
    except MemoryError:
        raise
    except Exception as error:
        raise _damaged(error) from None


def _damaged(error: Exception) -> InvalidRequest:
    if "MAX_TEXT" in str(error):  # Pillow's limits for texts and profiles in a PNG
        return InvalidRequest("the image has more metadata than is read here: save it without its metadata")
    cause = " ".join(str(error).split())[:100] or type(error).__name__
    return InvalidRequest(f"the image is damaged ({cause}): send it again, or another")
