"""The service of images: processes with the first image, errors by their field, and nothing left behind."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, ClassVar

import pytest

from tests.media.pictures import png
from tests.support.aio import in_loop
from tests.support.images import InlineWorkers, data_url, exists, inline_service, vision_text
from tests.support.shared_pixels import left_over
from treadle import shared_memory
from treadle.compose.images import image_service, missing_packages
from treadle.config import Settings
from treadle.errors import Busy, ContextLengthExceeded, InvalidRequest, ServerStopping
from treadle.fronts.media.needed import MAX_IMAGE_BYTES, NeededImage, needed_image
from treadle.fronts.media.service import MOST_FETCHED, ImageService
from treadle.fronts.media.store import PixelStore
from treadle.text.images import ImageSource
from treadle.text.images.prompt import PlacedImage

SETTINGS: Any = vision_text().images


def needed(data: bytes = b"", at: str = "at", url: str = "", *, low: bool = False) -> NeededImage:
    return NeededImage(at, at.encode() + data, data, "", url, low)


async def prepared(service: ImageService, *images: NeededImage, context: int = 1000, salt: str = "s") -> Any:
    return await service.prepare(images, SETTINGS, context=context, salt=salt, tenant="t")


@in_loop
async def test_an_image_is_held_until_it_is_released() -> None:
    store = PixelStore()
    service = inline_service(store=store)
    picture = needed(png(16, 16))
    held = await prepared(service, picture)
    (image,) = held.placed([PlacedImage(picture.key, 3, 4)])
    assert (image.start, image.count, image.grid, len(image.hash)) == (3, 4, ((1, 4, 4),), 32)
    assert exists(image)
    assert store.free_bytes < store.budget
    held.release()
    held.release()
    assert store.free_bytes == store.budget
    await service.close()
    assert not exists(image)
    with pytest.raises(ServerStopping):
        await prepared(service, picture)


@in_loop
async def test_an_image_of_more_tokens_than_it_may_have_is_refused_by_its_place() -> None:
    """Its prompt counts, of which its tokens and those between them are known only then."""
    service = inline_service()
    small, large = needed(png(16, 16), "a"), needed(png(64, 64), "b")
    held = await service.of_request(SETTINGS, "t", "s", 63).prepare([small, large], 1000)
    with pytest.raises(InvalidRequest, match="b has 64 tokens, and a step computes 63: send a smaller image") as caught:
        held.placed([PlacedImage(small.key, 3, 4), PlacedImage(large.key, 9, 64)])
    assert caught.value.param == "b"
    assert len(held.placed([PlacedImage(small.key, 3, 4), PlacedImage(large.key, 9, 63)])) == 2
    held.release()
    await service.close()


@in_loop
async def test_pixels_go_when_the_last_prompt_that_has_them_has_ended() -> None:
    """Equal images under several keys are let go together."""
    store = PixelStore()
    service = inline_service(store=store)
    cat, again, dog = needed(png(16, 16, 1)), needed(png(16, 16, 1), "again"), needed(png(16, 16, 2))
    held = await prepared(service, cat, again, dog)
    one, both = (
        held.placed([PlacedImage(picture.key, 4 * i, 4) for i, picture in enumerate(pictures)])
        for pictures in ((cat, again), (cat, dog))
    )
    used = store.used_bytes
    held.spare(one)
    assert store.used_bytes == used
    held.spare(both)
    assert store.free_bytes == store.budget
    held.release()
    assert store.free_bytes == store.budget
    await service.close()


@in_loop
async def test_one_bad_image_lets_the_others_go_and_names_itself() -> None:
    store = PixelStore()
    service = inline_service(store=store)
    with pytest.raises(InvalidRequest, match=r"b: the bytes are not an image") as caught:
        await prepared(service, needed(png(16, 16), "a"), needed(b"junk", "b"), needed(png(8, 8), "c"))
    assert caught.value.param == "b"
    assert store.free_bytes == store.budget
    await service.close()


@in_loop
async def test_more_images_than_the_context_holds_are_refused_before_all_are_read() -> None:
    service = inline_service()
    before = InlineWorkers.made
    images = [needed(png(32, 32, seed), f"at{seed}") for seed in range(40)]
    with pytest.raises(ContextLengthExceeded, match=r"context length is 50 tokens\. However, your images up to at"):
        await prepared(service, *images, context=50)
    assert InlineWorkers.made == before + 1
    statistics = service.statistics()
    assert statistics["done"] < 10
    await service.close()


@in_loop
async def test_images_come_by_url_too() -> None:
    class Fetcher:
        def __init__(self, hosts: Any) -> None:
            self.hosts = hosts

        def deadline(self) -> float:
            return 0.0

        async def fetch(self, url: str, at: str, tenant: str = "", until: float | None = None) -> tuple[bytes, str]:
            if self.hosts != ("pics.example",) or tenant != "t":
                raise InvalidRequest("not allowed", param=at)
            return png(16, 16), "text/html" if url.endswith("html") else ""

    service = inline_service(hosts=("pics.example",), fetcher=Fetcher)
    held = await prepared(service, needed(url="http://pics.example/a"))
    assert [layout.grid for layout in held.layouts.values()] == [((1, 4, 4),)]
    held.release()
    with pytest.raises(InvalidRequest, match="media type 'text/html'"):
        await prepared(service, needed(url="http://pics.example/a.html"))
    await service.close()


@in_loop
async def test_slow_urls_of_a_request_are_fetched_beside_each_other_until_one_deadline() -> None:
    class Fetcher:
        most = under_way = 0
        untils: ClassVar[set[float | None]] = set()

        def __init__(self, hosts: Any) -> None:
            pass

        def deadline(self) -> float:
            return 7.0

        async def fetch(self, url: str, at: str, tenant: str = "", until: float | None = None) -> tuple[bytes, str]:
            Fetcher.under_way += 1
            Fetcher.untils.add(until)
            Fetcher.most = max(Fetcher.most, Fetcher.under_way)
            await asyncio.sleep(0.02)
            Fetcher.under_way -= 1
            return png(16, 16), ""

    service = inline_service(fetcher=Fetcher)
    held = await prepared(service, *(needed(url=f"http://pics.example/{i}", at=f"{i}") for i in range(20)))
    assert len(held.layouts) == 20
    assert Fetcher.most == MOST_FETCHED
    assert Fetcher.untils == {7.0}
    held.release()
    await service.close()


@in_loop
async def test_being_busy_is_no_fault_of_the_image() -> None:
    service = inline_service(store=PixelStore(budget=1 << 18))
    held = await prepared(service, *(needed(png(64, 64, seed), f"{seed}") for seed in range(8)))
    with pytest.raises(Busy):
        await prepared(service, *(needed(png(64, 64, seed), f"{seed}") for seed in range(8, 40)))
    held.release()
    await service.close()


@in_loop
async def test_a_request_that_leaves_releases_what_it_has() -> None:
    class Slow(InlineWorkers):
        async def prepare(self, data: bytes, media_type: str = "", **options: Any) -> Any:
            if len(self.names) > 1:
                await asyncio.sleep(1000)
            return await super().prepare(data, media_type, **options)

    store = PixelStore()
    service = ImageService(Slow, store=store)
    waiting = asyncio.create_task(prepared(service, *(needed(png(16, 16, seed), f"{seed}") for seed in range(4))))
    await asyncio.sleep(0.05)
    assert store.free_bytes < store.budget
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert store.free_bytes == store.budget
    await service.close()


@in_loop
async def test_large_images_are_hashed_aside() -> None:
    service = inline_service()
    data = png(400, 400)
    assert len(data) > 1 << 18
    first, again = [await prepared(service, needed(data)) for _ in range(2)]
    places = [PlacedImage(needed(data).key, 0, 1)]
    assert first.placed(places)[0].hash == again.placed(places)[0].hash
    for held in (first, again):
        held.release()
    await service.close()


# Bytes of requests


def source(data: str) -> ImageSource:
    return ImageSource("at", data=data)


def test_base64_may_have_line_breaks() -> None:
    data = data_url(png(40, 40)).partition(",")[2]
    lines = "\n".join(data[i : i + 76] for i in range(0, len(data), 76))
    assert needed_image(source(lines)).data == needed_image(source(data)).data == png(40, 40)


@pytest.mark.parametrize("data", ["%", "abcde", "abc===", "a-_b", "\u00e4bcd"])
def test_what_is_not_base64_is_refused(data: str) -> None:
    with pytest.raises(InvalidRequest, match="at is not base64") as caught:
        needed_image(source(data))
    assert caught.value.param == "at"


def test_no_and_too_many_bytes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="an empty image"):
        needed_image(source(""))
    with pytest.raises(InvalidRequest, match="over 20 MiB"):
        needed_image(source("A" * (MAX_IMAGE_BYTES * 4 // 3 + 8)))


# The service of a server


@in_loop
async def test_a_server_prepares_images_in_a_process_and_removes_what_others_left() -> None:
    left = f"{shared_memory.PREFIX}1.{secrets.token_hex(3)}-1"
    with shared_memory.create(left, 4):
        pass
    refused: list[int] = []
    service = image_service(Settings(), lambda: refused.append(1))
    assert service.trouble == ""
    assert service.statistics()["processes"] == 0
    held = await prepared(service, needed(png(16, 16)))
    assert service.statistics()["processes"] == 1
    held.release()
    await service.close()
    with pytest.raises(FileNotFoundError), shared_memory.attach(left, 4):
        pass
    assert not left_over()


def test_missing_packages_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_packages() == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "the packages for images are not installed (" in missing_packages()
    assert "vision" in missing_packages() or "pillow" in missing_packages()
