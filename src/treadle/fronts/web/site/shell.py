"""Frame of every HTML page: one style sheet, inline scripts, and a policy under which nothing else runs."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib.resources import files
from string import Template

HTML_TYPE = "text/html; charset=utf-8"
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'%3E%3Crect width='32' height='32' "
    "rx='7' fill='%230b62b0'/%3E%3Cg fill='none' stroke='%23fff' stroke-width='2.6' stroke-linecap='round'%3E%3Ccircle "
    "cx='16' cy='13' r='7'/%3E%3Cpath d='M16 13 20 25M7 25h18'/%3E%3C/g%3E%3C/svg%3E"
)


def asset(name: str) -> str:
    """Return the text of a file under `assets/`."""
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def source_hash(text: str) -> str:
    """Return the CSP source expression that allows an inline script or style with exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


STYLE = asset("style.css")
MARK = asset("mark.svg").strip()
SCRIPTS = {name: asset(f"{name}.js") for name in ("common", "live", "key")}
POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {source_hash(STYLE)}",
        # All scripts on all pages: the key page shows another page in its own document, under its own policy.
        f"script-src {' '.join(map(source_hash, SCRIPTS.values()))}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "vary": "Accept, Authorization",
}


def page(title: str, body: str, *, scripts: tuple[str, ...]) -> str:
    """Return a whole document. `body` is HTML; `scripts` run in this order at its end."""
    run = "".join(f"<script>{SCRIPTS[name]}</script>" for name in scripts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<title>{escape(title)}</title><link rel="icon" href="{ICON}"><style>{STYLE}</style></head>\n'
        f"<body>{body}\n{run}</body></html>\n"
    )


def fill(name: str, **parts: str) -> str:
    """Return the asset `name` with its `$placeholders` replaced by `parts`, which are HTML already."""
    return Template(asset(name)).substitute(parts)


def block(code: str) -> str:
    """Return a block of code, given as HTML."""
    return f'<div class="code"><pre tabindex="0"><code>{code}</code></pre></div>'


def snippet(code: str, *, label: str = "") -> str:
    """Return a block of code, given as HTML, with a button that copies it."""
    named = f' aria-label="Copy {escape(label)}"' if label else ""
    return block(code).removesuffix("</div>") + f'<button type="button" class="copy"{named}>Copy</button></div>'
