"""Images in a step: layers of the tower that it computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import mlx.core as mx

from ..core.plan import Encode
from ..errors import one_line
from .device.owner_thread import mlx_runtime
from .step import RunningRow, Step
from .vision.encoder import ImageEncoder, Stale


def encode_images(
    step: Step, encodes: Iterable[Encode], rows: Mapping[str, RunningRow], encoder: ImageEncoder
) -> list[RunningRow]:
    """Begin to compute layers of images of `rows`, before all else in the step. Return the rows whose layers before are
    missing; those whose pixels are fail."""
    try:
        stale = list(_begin(step, encodes, rows, encoder))
        with mlx_runtime("encoding an image"):
            mx.async_eval(step.encoding)  # type: ignore[no-untyped-call]
    except BaseException:
        encoder.drop(step.encoded)  # or their features would count as computed
        raise
    return stale


def _begin(
    step: Step, encodes: Iterable[Encode], rows: Mapping[str, RunningRow], encoder: ImageEncoder
) -> Iterator[RunningRow]:
    for encode in encodes:
        row = rows.get(encode.id)
        if row is None or encode.id in step.failed:
            continue
        image = row.request.images[encode.image]
        step.rows[encode.id] = row
        step.encoded.append(image.hash)
        try:
            step.encoding += encoder.encode(image, encode)
        except Stale:
            yield row
        except (OSError, ValueError) as error:
            encoder.drop([image.hash])
            step.failed[encode.id] = f"an image can't be encoded: {one_line(error)}"
