"""Names of models in Anthropic's dialect, and the model list in its shape."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...served_models import Models, ServedModel

PREFIX = "claude-"
"""Beginning of the names for which the default model stands in: clients of Anthropic have them built in."""


def named_model(models: Models, name: str | None) -> ServedModel:
    """Return the model of this name, or the default one for a name of Anthropic's that no model has. Raises as
    `Models.get` does."""
    if name is not None and name.startswith(PREFIX) and name not in models:
        return models.default
    return models.get(name)


def anthropic_list(listed: Sequence[tuple[ServedModel, str]], created: int) -> dict[str, Any]:
    """Return the model list: one page that holds all. `created` is in seconds since 1970."""
    cards = [anthropic_card(model, name, created) for model, name in listed]
    return {"data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}


def anthropic_card(model: ServedModel, name: str, created: int) -> dict[str, Any]:
    """Return the entry of a model under one of its names, with its limits once they are known."""
    card: dict[str, Any] = {
        "type": "model",
        "id": name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
    }
    capabilities = model.engine.capabilities
    if capabilities is None:
        return card
    context = capabilities.context
    return {**card, "max_input_tokens": context, "max_tokens": min(context, model.max_tokens or context)}
