"""Warm-up with images: pieces of the vision tower, and prompts in which features stand.

The first piece of a tower compiles its operations, and plans its attention for a size. A pass over features, with
positions of three axes, or in which tokens see others behind them, is another program than that of plain text.

Then a large image and the smallest one are timed: steps take as many images as fill their time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil, prod

from msgspec.structs import replace

from ... import shared_memory
from ...core.chunk_limits import MIN_CHUNK
from ...core.image import Image, VisionCapabilities
from ...core.messages import Submit
from ...core.plan import Admit, Encode, StepPlan
from ...errors import one_line
from ..device.owner_thread import OutOfMemory
from ..kv.backend import WarmLimits, WarmPass
from ..mlxvlm import TABLE, Picture
from ..vision.model import Vision
from .synthetic_steps import SALT, Warmable, release, run_pass
from .warmup import named, tell_slow

_log = logging.getLogger(__name__)

_LONG = 1024
"""The longest chunk with an image for which passes are compiled ahead."""
_MOST_PASSES = 160
"""Of chunks alone and beside up to 384 sequences; a runner of 16 has 48."""
_TIMES = 2
"""The shorter time of an image counts: the first may compile."""


def warm_up_images(
    runner: Warmable, vision: Vision, passes: Sequence[WarmPass], limits: WarmLimits
) -> VisionCapabilities:
    """Encode the usual images of `vision`, and compute chunks of prompts with the first of them as in those of the KV
    backend's `passes` that have one chunk. Return its capabilities, with the cost of images. Leaves nothing behind,
    also when it raises. Where there is no shared memory for their pixels, or none for a step, or one can't be encoded,
    the log says so, and text is served all the same."""
    try:
        for number, picture in enumerate(vision.usual):
            with _pixels(picture) as name:
                image = _image(vision, picture, name)
                _warm_up_image(runner, vision, image, passes if number == 0 else (), limits)
        return _measured(runner, vision, limits)
    except (OSError, ValueError, MemoryError, OutOfMemory) as error:
        _log.warning("images are not warmed up, and the first one will take longer: %s", _reason(error))
        return vision.capabilities


def _measured(runner: Warmable, vision: Vision, limits: WarmLimits) -> VisionCapabilities:
    """The capabilities of `vision`, with what its timed images cost, a large one first."""
    timed, layers = [], vision.capabilities.layers
    for picture in vision.timed:
        with _pixels(picture) as name:
            image = _image(vision, picture, name)
            if not _fits(vision, image, limits):
                break  # the smallest alone would not tell what a unit takes
            timed.append((vision.capabilities.units(image), _seconds(runner, vision, image)))
    if not timed:
        return vision.capabilities
    (units, large_s), (_, small_s) = timed[0], timed[-1]
    least = ceil(units * min(1.0, small_s / large_s)) if len(timed) > 1 else 0
    return replace(vision.capabilities, least=least, unit_s=large_s / (units * layers))


def _seconds(runner: Warmable, vision: Vision, image: Image) -> float:
    """Seconds of a step that encodes an image."""
    request = _request("timed image", vision, image, 0)
    admit: tuple[Admit, ...] = (Admit(request=request),)
    found = []
    try:
        for _ in range(_TIMES):
            began, encode = time.perf_counter(), Encode(request.id, 0, 0, vision.capabilities.layers)
            _execute(runner, StepPlan(step=0, admit=admit, encode=(encode,)))
            found.append(time.perf_counter() - began)
            admit = ()
        return min(found)
    finally:
        release(runner, [request])


def _reason(error: Exception) -> str:
    return f"there is no shared memory for one ({error.strerror})" if isinstance(error, OSError) else one_line(error)


@contextmanager
def _pixels(picture: Picture) -> Iterator[str]:
    """The name of shared memory with an image of zeros, and a table of zeros behind it."""
    owner = shared_memory.Owner()
    name = owner.new_name()
    try:
        with shared_memory.create(name, prod(picture.shape) + 4 * prod(TABLE)):
            pass
        yield name
    finally:
        shared_memory.unlink(name)
        owner.close()


def _image(vision: Vision, picture: Picture, name: str) -> Image:
    count = vision.tower.count(picture.shape, picture.grid)
    return Image(0, count, f"{SALT} {picture}".encode(), name, picture.shape, "uint8", picture.grid)


def _warm_up_image(
    runner: Warmable, vision: Vision, image: Image, passes: Sequence[WarmPass], limits: WarmLimits
) -> None:
    if not _fits(vision, image, limits):
        return
    longest = _longest(limits)
    request = _request("warm-up image", vision, image, 0)
    try:
        tell_slow("image in the vision tower", _encode(runner, request, vision.capabilities.layers))
        for one in _image_passes(passes, image, longest, whole=vision.capabilities.whole):
            prompt = _request("warm-up", vision, image, max(0, one.chunks[0] - image.count))
            tell_slow(f"{named(one)} with an image", run_pass(runner, one, whole=prompt))
    finally:
        release(runner, [request])


def _fits(vision: Vision, image: Image, limits: WarmLimits) -> bool:
    return image.count <= (_longest(limits) if vision.capabilities.whole else limits.context - 1)


def _longest(limits: WarmLimits) -> int:
    """Tokens of the longest chunk with an image."""
    return min(limits.context - 1, limits.prefill_tokens or _LONG, _LONG)


def _request(id_: str, vision: Vision, image: Image, text: int) -> Submit:
    """A prompt of `text` tokens in front of an image, and one behind it."""
    placed = replace(image, start=text)
    prompt = (0,) * text + (vision.image_token,) * image.count + (0,)
    return Submit(id=id_, prompt=prompt, max_tokens=1, images=(placed,), salt=SALT)


def _encode(runner: Warmable, request: Submit, layers: int) -> float:
    """Encode the image of a request that is admitted: a layer by itself, as a step that has little time for it does,
    and then the others. Return the seconds."""
    began, first = time.perf_counter(), Encode(request.id, 0, 0, 1)
    plans = [StepPlan(step=0, admit=(Admit(request=request),), encode=(first,))]
    if layers > 1:
        plans.append(StepPlan(step=0, encode=(Encode(request.id, 0, 1, layers - 1),)))
    for plan in plans:
        _execute(runner, plan)
    return time.perf_counter() - began


def _execute(runner: Warmable, plan: StepPlan) -> None:
    """Compute a step. Raises ValueError where its image can't be encoded."""
    if failures := runner.execute(plan).failures:
        raise ValueError(failures[0].message)


def _image_passes(passes: Sequence[WarmPass], image: Image, longest: int, *, whole: bool) -> list[WarmPass]:
    """Those of `passes` that have one chunk, of up to `longest` tokens; where tokens of an image see each other, only
    those that the image fits into. One pass where there are none."""
    least = image.count if whole else MIN_CHUNK
    plain = [one for one in passes if len(one.chunks) == 1 and one.scored is None]
    fitting = [one for one in plain if least <= one.chunks[0] <= longest]
    return fitting[:_MOST_PASSES] or [WarmPass(1, (min(image.count, longest),))]
