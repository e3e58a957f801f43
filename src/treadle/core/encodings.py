"""Images whose features are being computed, and the sequences that wait for them.

A vision tower is run a few layers a step. Each image is encoded once, by its hash, for all running sequences that need
it; when one of them leaves, another goes on with it. Images are taken in the order in which their sequences came, as
two of them that take turns are both done later. A sequence whose features the runner keeps waits for none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .chunk_cost import CHUNK_S
from .chunk_limits import ChunkLimits
from .image import VisionCapabilities
from .plan import Encode, StepPlan
from .sequence import Sequence
from .statistics import VisionStatistics

HasFeatures = Callable[[bytes], bool]


def no_features(hash_: bytes) -> bool:
    """Return False: features of no image are kept."""
    return False


def image_limits(vision: VisionCapabilities) -> ChunkLimits:
    """Return the limits for units of images in a step: those that take CHUNK_S, where the time of one was measured. A
    learned cost alone may be far too low, as a step that encodes is prepared while another one is computed, and on
    some devices encoding is all preparation."""
    return ChunkLimits(max_tokens=max(1, int(CHUNK_S / vision.unit_s)) if vision.unit_s else 1 << 40, quantum=1)


@dataclass(slots=True, eq=False)
class Encoding:
    """An image of `units` of work a layer, of which `planned` layers are computed or in flight. `users` wait for it:
    the image's places among those of each."""

    units: int
    planned: int = 0
    users: dict[Sequence, list[int]] = field(default_factory=dict)


class Encodings:
    """Encodings by a tower of `vision`; `has_features` says whether the runner keeps those of an image. `encode_s` are
    seconds of steps that encoded."""

    def __init__(self, vision: VisionCapabilities, has_features: HasFeatures = no_features) -> None:
        self._vision = vision
        self._has_features = has_features
        self._open: dict[bytes, Encoding] = {}
        self._encoded = self._reused = 0
        self.encode_s = 0.0

    def join(self, seq: Sequence) -> None:
        """Note the images of `seq`, which joins with its cached tokens, that it has to wait for."""
        for place, image in enumerate(seq.request.images):
            if image.end <= seq.num_computed_tokens:
                continue
            found = self._open.get(image.hash)
            if found is None:
                if self._has_features(image.hash):
                    self._reused += 1
                    continue
                found = self._open[image.hash] = Encoding(self._vision.units(image))
            else:
                self._reused += 1
            found.users.setdefault(seq, []).append(place)
            seq.awaited_images[place] = image.hash

    def leave(self, seq: Sequence) -> None:
        """Forget `seq`, and encodings that nobody else waits for."""
        for hash_ in set(seq.awaited_images.values()):
            found = self._open[hash_]
            del found.users[seq]
            if not found.users:
                del self._open[hash_]
        seq.awaited_images.clear()

    def plan(self, seqs: Iterable[Sequence], units: int, *, decoding: bool) -> tuple[tuple[Encode, ...], int]:
        """Plan layers of images that `seqs` wait for, of `units` of work at most, but one layer at least. Return them,
        and their units. Where others are `decoding` no image begins in the step in which one ends: both take the host
        milliseconds beside the layers."""
        planned, spent = list[Encode](), 0
        for seq in sorted((seq for seq in seqs if seq.awaited_images), key=lambda seq: seq.order):
            for hash_ in dict.fromkeys(seq.awaited_images.values()):
                found = self._open[hash_]
                left = self._vision.layers - found.planned
                count = min(left, (units - spent) // found.units if planned else max(1, units // found.units))
                if count <= 0 or (planned and decoding):
                    return tuple(planned), spent
                planned.append(Encode(seq.id, found.users[seq][0], found.planned, count))
                spent += count * found.units
                found.planned += count
                if count == left:
                    self._finish(hash_)
        return tuple(planned), spent

    def _finish(self, hash_: bytes) -> None:
        """All layers are planned: the features are there for the next step."""
        self._encoded += 1
        for user, places in self._open.pop(hash_).users.items():
            for place in places:
                del user.awaited_images[place]

    def void(self, plan: StepPlan, sequences: dict[str, Sequence]) -> None:
        """Begin anew the encodings of `plan`, which was not computed. The runner names in `evicted` whoever goes on
        with one that this leaves as it is."""
        for encode in plan.encode:
            seq = sequences.get(encode.id)  # the runner may have lost it meanwhile
            found = None if seq is None else self._open.get(seq.request.images[encode.image].hash)
            if found is not None:
                found.planned = 0

    def statistics(self) -> VisionStatistics:
        """Return the counters, and how many images are waited for."""
        return VisionStatistics(
            encoded=self._encoded, reused=self._reused, encode_s=self.encode_s, awaited=len(self._open)
        )
