"""Content negotiation: HTML or JSON, by the request's Accept header."""

from __future__ import annotations

from starlette.types import Scope

HTML = ("text/html", "application/xhtml+xml")
JSON = ("application/json",)


def wants_html(scope: Scope) -> bool:
    """Whether the request names HTML and does not rank JSON above it, as browsers do. Wildcards name nothing: a program
    that accepts everything gets JSON."""
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == b"accept"]
    ranked = _ranked(",".join(values))
    html = max(ranked.get(kind, 0.0) for kind in HTML)
    return html > 0 and html >= max(ranked.get(kind, 0.0) for kind in JSON)


def _ranked(accept: str) -> dict[str, float]:
    """Return media types with their weights; a weight that can't be read is 0."""
    ranked: dict[str, float] = {}
    for part in accept.lower().split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        ranked[kind] = max(ranked.get(kind, 0.0), _weight(parameters))
    return ranked


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return min(1.0, max(0.0, float(value)))
            except ValueError:
                return 0.0
    return 1.0
