"""Origin of this installation, from the `direct_url.json` of its installer (PEP 610)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

NAME = "treadle"
UNKNOWN_VERSION = "0+unknown"
_VARIABLES = re.compile(r"\$\{[A-Za-z0-9_-]+\}(?::\$\{[A-Za-z0-9_-]+\})?")


class Kind(Enum):
    """Kind of an installation's origin."""

    EDITABLE = "editable"
    PATH = "path"
    URL = "url"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Origin:
    """Origin of an installation. `where`: a folder (EDITABLE), a folder, wheel or sdist (PATH), a URL in pip's syntax
    (URL), or "" (UNKNOWN)."""

    kind: Kind
    where: str = ""


def distribution() -> metadata.Distribution | None:
    """Return Treadle's installed metadata; None if it is run from sources without installation."""
    try:
        return metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        return None


def version() -> str:
    """Return Treadle's version from its metadata; `0+unknown` if it is not installed."""
    found = distribution()
    return UNKNOWN_VERSION if found is None else found.version


def origin() -> Origin:
    """Return the origin of this copy. UNKNOWN for a package index, a folder of wheels, or a file that is gone."""
    found = distribution()
    if found is None:
        return _source_checkout()
    try:
        return _parse(json.loads(found.read_text("direct_url.json") or "{}"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Origin(Kind.UNKNOWN)


def _source_checkout() -> Origin:
    """Return the checkout that contains this file; UNKNOWN if there is none."""
    root = Path(__file__).parents[3]
    return Origin(Kind.EDITABLE, str(root)) if (root / "pyproject.toml").is_file() else Origin(Kind.UNKNOWN)


def _without_password(url: str) -> str:
    """Return `url` without passwords and tokens, for commands shown to users. Names of environment variables, which pip
    expands, are kept; so is the user name of a URL that is not HTTP."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    given, at, name = host.rpartition("@")
    if not at or _VARIABLES.fullmatch(given):
        return url
    user = "" if scheme.rpartition("+")[2] in ("http", "https") else given.partition(":")[0]
    return f"{scheme}{separator}{f'{user}@' if user else ''}{name}{slash}{path}"


def _parse(direct: Mapping[str, Any]) -> Origin:
    url = str(direct.get("url", ""))
    if url.startswith("file:") and "vcs_info" not in direct:
        path = Path(url2pathname(urlsplit(url).path))
        if not path.exists():
            return Origin(Kind.UNKNOWN)
        return Origin(Kind.EDITABLE if direct.get("dir_info", {}).get("editable") else Kind.PATH, str(path))
    if "://" not in url:
        return Origin(Kind.UNKNOWN)
    if "vcs_info" in direct:
        url = f"{direct['vcs_info']['vcs']}+{url}@{direct['vcs_info']['commit_id']}"
    url = _without_password(url)
    if "subdirectory" in direct:
        url += f"#subdirectory={direct['subdirectory']}"
    return Origin(Kind.URL, url)
