"""Reads a page as a browser would: its text, its links and ids, and whether its scripts and styles may run."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

VOID = {"br", "input", "link", "meta", "path", "circle", "rect"}


class Page(HTMLParser):
    """One parsed document. `data` maps ids to their text; `code` are the texts of all `code` elements within `pre`."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.links: list[str] = []
        self.ids: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.code: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.inline: list[str] = []
        self._open: list[tuple[str, str]] = []
        self._texts: dict[str, str] = {}
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self.tags.append(tag)
        self.links += [found[key] for key in ("src", "href", "action", "srcset") if key in found]
        self.inline += [key for key in found if key.startswith("on") or key == "style"]
        if "id" in found:
            self.ids.append(found["id"])
        if tag == "pre":
            self.code.append("")
        if tag == "script":
            self.scripts.append("")
        if tag == "style":
            self.styles.append("")
        if tag not in VOID:
            self._open.append((tag, found.get("id", "")))

    def handle_endtag(self, tag: str) -> None:
        while self._open:
            if self._open.pop()[0] == tag:
                return

    def handle_data(self, data: str) -> None:
        inside = [tag for tag, _ in self._open]
        if "script" in inside:
            self.scripts[-1] += data
        elif "style" in inside:
            self.styles[-1] += data
        else:
            self.text += data
            if "pre" in inside:
                self.code[-1] += data
            for _, name in self._open:
                self._texts[name] = self._texts.get(name, "") + data

    def of(self, name: str) -> str:
        """The text of the element with this id."""
        return self._texts.get(name, "").strip()

    def blocked_by(self, policy: str) -> list[str]:
        """The inline scripts and styles that the policy would not let run, and attributes that it never does."""
        directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
        pairs = [("script-src", text) for text in self.scripts] + [("style-src", text) for text in self.styles]
        blocked = [text for name, text in pairs if _source(text) not in directives[name].split()]
        return blocked + self.inline


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def contrast(style: str, one: str, other: str, *, dark: bool) -> float:
    """WCAG's contrast ratio of two colours of the style sheet, by the names of their custom properties."""
    light, _, night = style.partition("@media(prefers-color-scheme:dark)")
    colours = dict(re.findall(r"--([\w-]+):(#[0-9a-f]+)", light))
    if dark:
        colours |= dict(re.findall(r"--([\w-]+):(#[0-9a-f]+)", night))
    low, high = sorted(map(_luminance, (colours[one], colours[other])))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
