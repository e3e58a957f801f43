"""The models that a server serves, by name. Every front gets an engine and its text side from here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol

from ..config import Settings
from ..core.capabilities import Capabilities
from ..engine.client import EngineClient, Health
from ..errors import ConfigError, EngineUnavailable, InvalidRequest, ModelNotFound, ServerStopping, spelled
from ..text import TextView
from ..text.images.families import NO_TOWER
from .validate import Limits

if TYPE_CHECKING:
    from .media.service import ImageService, RequestImages
    from .text_jobs import TextJobRunner

STOPPING = ("draining", "stopping", "stopped")
BLOCKED = "blocked"
IMAGE = "image"
NO_SERVICE = "images are not read here"


class Texts(Protocol):
    """The text side of one model: its view, and the processes or threads that render and tokenize."""

    @property
    def pool(self) -> TextJobRunner: ...

    def model(self) -> TextView:
        """The text model. Raises EngineUnavailable while it loads."""
        ...

    @property
    def trouble(self) -> str:
        """Reason why no text work can be done now, though the model is loaded; empty while it can."""
        ...

    @property
    def restarting(self) -> bool:
        """Whether `model` raises though the model was loaded: its processes are started again."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Plain values for `/v1/status`."""
        ...


@dataclass(frozen=True)
class ServedModel:
    """One model under its `names`, the served one first. `max_tokens` caps one completion. `aliases` are the names that
    lists of models have besides the served one. `images` prepares those of its requests. A step computes up to
    `prefill_tokens` tokens of prompts (0: any number)."""

    names: tuple[str, ...]
    engine: EngineClient
    texts: Texts
    max_tokens: int | None = None
    aliases: tuple[str, ...] = ()
    images: ImageService | None = None
    prefill_tokens: int = 0

    @property
    def name(self) -> str:
        return self.names[0]

    def text(self) -> TextView:
        """Facts about the model's text. Raises EngineUnavailable while it loads."""
        return self.texts.model()

    def limits(self) -> Limits:
        """Limits of requests, by the text model, the runner once it is known, and `max_tokens`. Raises
        EngineUnavailable while the text model loads."""
        text, can = self.texts.model(), self.engine.capabilities
        return Limits(
            vocabulary=text.vocabulary if can is None else min(text.vocabulary, can.vocabulary),
            context=text.context if can is None else min(text.context, can.context),
            max_tokens=self.max_tokens,
            eos_token_ids=text.eos_token_ids,
            sampling=text.default_sampling,
            grammars=can is None or can.grammars,
            no_images=self._no_images(text, can),
            spec_prefill=can is None or bool(can.steps.spec_prefill.scorer),
        )

    def _no_images(self, text: TextView, can: Capabilities | None) -> str:
        """Return the reason why no images are read; "" where they are."""
        if text.images is None:
            return text.no_images
        if self.images is None or self.images.trouble:
            return NO_SERVICE if self.images is None else self.images.trouble
        if can is not None and IMAGE not in can.modalities:
            return can.no_images or NO_TOWER
        least, most = text.images.least_tokens, self.most_image_tokens
        if not 0 < most < least:
            return ""
        cure = "raise --prefill-tokens" if most == self.prefill_tokens else "its memory is short"
        return f"an image has at least {least} tokens and a step of this server computes {most} ({cure})"

    @property
    def most_image_tokens(self) -> int:
        """The most tokens of an image, where one step has to compute all of them; 0 for any number."""
        can = self.engine.capabilities
        if can is None or not can.vision.whole:
            return 0
        return min(filter(None, (self.prefill_tokens, can.steps.prefill_tokens)), default=0)

    def images_for(self, tenant: str, salt: str) -> RequestImages | None:
        """Return what prepares the images of a tenant's request; None where none are read. Raises EngineUnavailable
        while the text model loads."""
        settings = self.texts.model().images
        if self.images is None or settings is None:
            return None
        return self.images.of_request(settings, tenant, salt, self.most_image_tokens)

    @property
    def modalities(self) -> tuple[str, ...]:
        """What prompts may hold; text alone until the model is loaded."""
        try:
            return ("text",) if self.engine.capabilities is None or self.limits().no_images else ("text", IMAGE)
        except EngineUnavailable:
            return ("text",)

    def check_generates(self) -> None:
        """Raise InvalidRequest where the model makes embeddings alone."""
        can = self.engine.capabilities
        if can is not None and can.embedding.only:
            raise InvalidRequest(
                f"the model '{self.name}' generates no text: it is for embeddings (/v1/embeddings)", param="model"
            )

    def health(self) -> Health:
        """The engine's health; not ready before the text side is, nor while no text worker takes work (C4)."""
        health = self.engine.health()
        if health.ready:
            try:
                self.texts.model()
            except EngineUnavailable as error:
                state = "restarting" if self.texts.restarting else "starting"
                back_s = error.retry_after_s
                return replace(health, ready=False, state=state, reason=error.message, retry_after_s=back_s)
            if self.texts.trouble:
                return replace(health, ready=False, state=BLOCKED, reason=self.texts.trouble)
        return health


class Models:
    """The served models; the first is the default, for requests that name none. With `require_name` such requests are
    refused."""

    def __init__(self, default: ServedModel, *others: ServedModel, require_name: bool = False) -> None:
        self.default = default
        self.require_name = require_name
        self._all = (default, *others)
        self._by_name = {name: model for model in reversed(self._all) for name in model.names}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._all)

    def __contains__(self, name: str | None) -> bool:
        return name in self._by_name

    def get(self, name: str | None) -> ServedModel:
        """The model of this name; the default one for None. Raises ModelNotFound, and InvalidRequest for None with
        `require_name`."""
        if name is None:
            return self._unnamed()
        model = self._by_name.get(name)
        if model is None:
            raise ModelNotFound(f"the model '{name[:80]}' is not served here: use '{self.default.name}'", param="model")
        return model

    def _unnamed(self) -> ServedModel:
        if self.require_name:
            message = f"model is missing: this server requires it; use '{self.default.name}'"
            raise InvalidRequest(message, param="model")
        return self.default


def model_names(settings: Settings) -> tuple[str, ...]:
    """The names of the settings' model: the served name first, then others that requests may use."""
    return tuple(dict.fromkeys((*_own_names(settings), *alias_names(settings))))


def _own_names(settings: Settings) -> tuple[str, ...]:
    """Return the names of the settings' model without its aliases."""
    model = settings.model
    is_path = model.startswith(("/", ".", "~"))
    short = PurePath(model).name if is_path else model
    return tuple(dict.fromkeys((settings.served_model_name or short, short, model)))


def alias_names(settings: Settings) -> tuple[str, ...]:
    """Return the names in the setting `alias`. Raises ConfigError for an alias of another model."""
    own = _own_names(settings)
    found = []
    for alias in settings.alias:
        name, equals, target = (part.strip() for part in alias.partition("="))
        if equals and target not in own:
            with spelled(settings.spelling):
                raise ConfigError(
                    f"`alias` '{alias}' names a model that is not served: this server has {' and '.join(own)}",
                    param="alias",
                )
        found.append(name)
    return tuple(dict.fromkeys(name for name in found if name != own[0]))


def unready_error(health: Health) -> EngineUnavailable:
    """The error with which a server in this state refuses requests."""
    reason = health.reason or f"the engine is {health.state}"
    if health.state in STOPPING:
        return ServerStopping(reason, retry_after_s=5.0)
    return EngineUnavailable(reason, retry_after_s=2.0 if health.retry_after_s is None else health.retry_after_s)
