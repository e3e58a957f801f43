"""Images of a model's requests: from what a prompt needs to pixels that live as long as the request.

Nothing of it runs, and no process is started, before the first image.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ...core.messages import Image
from ...errors import ContextLengthExceeded, InvalidRequest, ServerStopping, beyond_context
from ...media.pixels_memory import Pixels
from ...text.images import AnySettings, Layout
from ...text.images.prompt import PlacedImage
from ...units import size
from .needed import NeededImage
from .store import PixelStore, StoreFull

MOST_FETCHED = 8
"""Images of a request that are fetched, or wait for a process behind that: each may have 20 MiB."""
ASIDE_BYTES = 1 << 18
"""The event loop hashes fewer bytes than these, in less than 0.3 ms."""


class Workers(Protocol):
    """Image processes of one model (`media.workers.ImageWorkers`)."""

    most: int

    async def prepare(
        self, data: bytes, media_type: str = "", *, low: bool = False, most_bytes: int = ..., tenant: str = ""
    ) -> Pixels: ...

    async def close(self) -> None: ...

    def statistics(self) -> dict[str, Any]: ...


class Fetcher(Protocol):
    """Fetcher of images by URL (`fetch.ImageFetcher`)."""

    def deadline(self) -> float: ...

    async def fetch(self, url: str, at: str, tenant: str = "", until: float | None = None) -> tuple[bytes, str]: ...


def _image_fetcher(hosts: Sequence[str]) -> Fetcher:
    """Return the fetcher of images. Its import, of an HTTP client, waits for the first URL."""
    from .fetch import ImageFetcher

    return ImageFetcher(hosts)


class HeldImages:
    """Images of one request, prepared; their pixels stay until `release`, or until `spare` for all prompts that have
    them. An image may have up to `most` tokens (0: any number)."""

    def __init__(self, store: PixelStore, most: int = 0) -> None:
        self._store = store
        self._most = most
        self._held: dict[bytes, tuple[bytes, Pixels]] = {}
        self._places: dict[bytes, str] = {}  # in the request
        self._keys: defaultdict[bytes, list[bytes]] = defaultdict(list)  # of each digest
        self._prompts: Counter[bytes] = Counter()

    def hold(self, key: bytes, digest: bytes, pixels: Pixels, at: str) -> None:
        self._held[key] = (digest, pixels)
        self._places[key] = at
        self._keys[digest].append(key)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all pixels. Equal images, by digest, are there once."""
        return sum(pixels.size_bytes for pixels in dict(self._held.values()).values())

    @property
    def layouts(self) -> dict[bytes, Layout]:
        """Return the layout of each image, by the key of its source."""
        return {key: pixels.layout for key, (_, pixels) in self._held.items()}

    def placed(self, places: Sequence[PlacedImage]) -> tuple[Image, ...]:
        """Return the images of a prompt as the engine takes them. Raises InvalidRequest for one of too many tokens."""
        images = tuple(self._placed(place) for place in places)
        self._prompts.update({image.hash for image in images})
        return images

    def spare(self, images: Sequence[Image]) -> None:
        """Let the pixels of a prompt's `images` go, which has ended, but those that other prompts have too."""
        for digest in {image.hash for image in images}:
            self._prompts[digest] -= 1
            if not self._prompts[digest]:
                for key in self._keys.pop(digest, ()):
                    del self._held[key]
                    self._store.release(digest)

    def _placed(self, place: PlacedImage) -> Image:
        digest, pixels = self._held[place.key]
        if 0 < self._most < place.count:
            at = self._places[place.key]
            raise InvalidRequest(
                f"{at} has {place.count} tokens, and a step computes {self._most}: send a smaller image, "
                "or with detail low, or raise the server's --prefill-tokens",
                param=at,
            )
        return Image(
            start=place.start,
            count=place.count,
            hash=digest,
            shm=pixels.name,
            shape=pixels.shape,
            dtype="uint8",
            grid=pixels.layout.grid,
        )

    def release(self) -> None:
        """Let the pixels go. Idempotent."""
        held, self._held = self._held, {}
        self._keys.clear()
        for digest, _ in held.values():
            self._store.release(digest)


class ImageService:
    """Images of one model. `make` starts its image processes, and is called with the first image; `trouble` says why no
    image can be read, where that is known from the start."""

    def __init__(
        self,
        make: Callable[[AnySettings], Workers],
        *,
        hosts: Sequence[str] = (),
        trouble: str = "",
        store: PixelStore | None = None,
        fetcher: Callable[[Sequence[str]], Fetcher] | None = None,
    ) -> None:
        self.trouble = trouble
        self._make = make
        self._hosts = hosts
        self._store = store or PixelStore()
        self._make_fetcher = fetcher or _image_fetcher
        self._fetcher: Fetcher | None = None
        self._workers: Workers | None = None
        self._closed = False

    async def prepare(
        self,
        needed: Sequence[NeededImage],
        settings: AnySettings,
        *,
        context: int,
        salt: str,
        tenant: str,
        prompts: int = 1,
        most: int = 0,
    ) -> HeldImages:
        """Prepare the images of a request, each once, as many at a time as there are processes. Those of URLs are all
        fetched within the time for one, MOST_FETCHED at a time. Pixels and digests are those of `salt` alone, so that
        nobody learns of another's images. Each may have `most` tokens (0: any number).

        Raises InvalidRequest, with the image's field, for one that can't be used, ContextLengthExceeded as soon as
        the images are more than the contexts of its `prompts` hold, Busy, and ServerStopping.
        """
        if self._closed:
            raise ServerStopping("the server is shutting down")
        if self._workers is None:
            self._workers = self._make(settings)
        held, total = HeldImages(self._store, most), _Total(settings, context, prompts)
        slots, fetched = asyncio.Semaphore(self._workers.most), asyncio.Semaphore(MOST_FETCHED)

        async def one(image: NeededImage) -> None:
            if image.url:
                async with fetched:
                    await prepared(image, *await self._fetching.fetch(image.url, image.at, tenant, until))
            else:
                await prepared(image, image.data, image.media_type)

        async def prepared(image: NeededImage, data: bytes, media_type: str) -> None:
            async with slots:
                try:
                    digest, pixels = await self._prepared(image, data, media_type, settings, salt, tenant)
                except StoreFull:
                    if self._store.used_bytes > held.size_bytes:
                        raise
                    raise self._too_many(image.at) from None
                held.hold(image.key, digest, pixels, image.at)
                total.add(pixels.layout, image.at)

        until = self._fetching.deadline() if any(image.url for image in needed) else None

        try:
            async with asyncio.TaskGroup() as group:
                for image in {image.key: image for image in needed}.values():
                    group.create_task(one(image))
        except BaseExceptionGroup as failed:
            held.release()
            raise failed.exceptions[0] from None
        except BaseException:
            held.release()
            raise
        return held

    def of_request(self, settings: AnySettings, tenant: str, salt: str, most: int = 0) -> RequestImages:
        """Return the images of one request, of up to `most` tokens each (0: any number)."""
        return RequestImages(self, settings, tenant, salt, most)

    async def _prepared(
        self, image: NeededImage, data: bytes, media_type: str, settings: AnySettings, salt: str, tenant: str
    ) -> tuple[bytes, Pixels]:
        """Return the digest and the pixels of one image, which the caller holds."""
        assert self._workers is not None
        digest = await _digest(settings, salt, media_type, image.low, data)
        workers, most_bytes = self._workers, self._store.budget
        try:
            pixels = await self._store.take(
                digest,
                lambda: workers.prepare(data, media_type, low=image.low, most_bytes=most_bytes, tenant=tenant),
            )
        except InvalidRequest as error:
            raise type(error)(f"{image.at}: {error.message}", param=image.at) from None
        return digest, pixels

    def _too_many(self, at: str) -> InvalidRequest:
        """Return the refusal of a request whose images have no room even where no others are held."""
        return InvalidRequest(
            f"the images up to {at} have more pixels than the server holds at once, {size(self._store.budget)} of "
            "them: send fewer or smaller ones, or with detail low",
            param=at,
        )

    @property
    def _fetching(self) -> Fetcher:
        if self._fetcher is None:
            self._fetcher = self._make_fetcher(self._hosts)
        return self._fetcher

    async def close(self) -> None:
        """End the image processes and remove all pixels."""
        self._closed = True
        await self._store.close()
        if self._workers is not None:
            await self._workers.close()

    def statistics(self) -> dict[str, Any]:
        """Return plain values for `/v1/status`: of the processes, nothing before the first image."""
        workers = {} if self._workers is None else self._workers.statistics()
        return {"processes": 0, **workers, "pixels": self._store.statistics()}


@dataclass(frozen=True)
class RequestImages:
    """The images of one request: of `tenant`, under `salt`, for a model with `settings`, of up to `most` tokens each
    (0: any number)."""

    service: ImageService
    settings: AnySettings
    tenant: str
    salt: str
    most: int = 0

    async def prepare(self, needed: Sequence[NeededImage], context: int, prompts: int = 1) -> HeldImages:
        """Prepare the images. Raises as `ImageService.prepare` does."""
        return await self.service.prepare(
            needed,
            self.settings,
            context=context,
            salt=self.salt,
            tenant=self.tenant,
            prompts=prompts,
            most=self.most,
        )


class _Total:
    """Tokens of a request's images so far. Its `prompts` have `context` tokens each."""

    def __init__(self, settings: AnySettings, context: int, prompts: int) -> None:
        self._settings = settings
        self._context = context
        self._prompts = prompts
        self._tokens = 0

    def add(self, layout: Layout, at: str) -> None:
        """Count an image. Raises ContextLengthExceeded."""
        self._tokens += self._settings.text(layout).count(self._settings.token)
        if self._tokens > self._context * self._prompts:
            each = f" in {self._prompts} inputs" if self._prompts > 1 else ""
            raise ContextLengthExceeded(
                beyond_context(
                    self._context,
                    f"your images up to {at} have {self._tokens} tokens{each}. Please send fewer or smaller ones, or "
                    "with detail low.",
                ),
                param=at,
            )


async def _digest(settings: AnySettings, salt: str, media_type: str, low: bool, data: bytes) -> bytes:
    """Return the digest of an image and of all that changes its pixels."""
    frame = msgspec.msgpack.encode((settings, salt, media_type, low))
    if len(data) < ASIDE_BYTES:
        return hashlib.sha256(frame + data).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(frame + data).digest())
