"""Images of a server's requests: their service, whose processes start with the first image."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..config import Settings
from ..errors import ConfigError
from ..fronts.media.service import ImageService, Workers
from ..fronts.media.store import PixelStore

if TYPE_CHECKING:
    from ..fronts.served_models import ServedModel
    from ..text.images import AnySettings

PACKAGES = ("numpy", "PIL")

log = logging.getLogger(__name__)


def image_service(
    settings: Settings, on_refused: Callable[[], None], on_killed: Callable[[], None] = lambda: None
) -> ImageService:
    """Return the service of images. Nothing of it runs yet. `on_refused` and `on_killed` are called for the metrics."""

    def make(images: AnySettings) -> Workers:
        from .. import shared_memory
        from ..media.workers import ImageWorkers, image_workers

        if left := shared_memory.remove_left_over():
            log.info("removed the shared memory of %d images that a killed server has left", left)
        return ImageWorkers(
            images,
            most=image_workers(),
            max_wait_s=settings.max_wait_s,
            on_refused=on_refused,
            on_killed=on_killed,
        )

    store = PixelStore(on_refused=on_refused)
    return ImageService(make, hosts=settings.image_hosts, trouble=missing_packages(), store=store)


def check_image_hosts(settings: Settings, model: ServedModel) -> None:
    """Raise ConfigError where images would be fetched for a model that takes none. Its text side has been loaded; the
    engine is asked only once it is ready, as a tower may be missing."""
    if settings.image_hosts and (why := model.limits().no_images):
        raise ConfigError(f"`image_hosts` would do nothing: {why}; leave it out", param="image_hosts")


def warn_of_long_images(model: ServedModel) -> None:
    """Log it where usual images of a model, which has been loaded, have more tokens than they may."""
    settings, most, why = model.text().images, model.most_image_tokens, model.limits().no_images
    if settings is None or not 0 < most < settings.typical_tokens:
        return
    if why:
        log.warning("%s takes no images: %s", model.name, why)
    else:
        usual, cure = settings.typical_tokens, "raise --prefill-tokens for larger ones"
        log.warning(
            "an image may have %d tokens, as a step computes no more, and usual ones have %d: %s", most, usual, cure
        )


def missing_packages() -> str:
    """Return why images can't be read with the packages that are installed; "" where they can."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    from ..installation import install_command

    return f"the packages for images are not installed ({install_command('vision')})"
