"""The origin of this installation, by the `direct_url.json` that installers write (PEP 610)."""

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
    """How the copy got here."""

    EDITABLE = "editable"
    PATH = "path"
    URL = "url"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Origin:
    """`where` is a folder (EDITABLE), a folder, wheel or sdist (PATH) or a URL as pip takes it (URL); else empty."""

    kind: Kind
    where: str = ""


def distribution() -> metadata.Distribution | None:
    """Treadle's installed metadata; None where the sources are run without being installed."""
    try:
        return metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        return None


def version() -> str:
    """Treadle's version, as its metadata has it; `0+unknown` where it is not installed."""
    found = distribution()
    return UNKNOWN_VERSION if found is None else found.version


def origin() -> Origin:
    """Where this copy came from. UNKNOWN for a package index or a folder of wheels, and where the file is gone."""
    found = distribution()
    if found is None:
        return _sources()
    try:
        return _of(json.loads(found.read_text("direct_url.json") or "{}"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Origin(Kind.UNKNOWN)


def _sources() -> Origin:
    """The checkout that this file is in, if it is in one."""
    root = Path(__file__).parents[3]
    return Origin(Kind.EDITABLE, str(root)) if (root / "pyproject.toml").is_file() else Origin(Kind.UNKNOWN)


def _without_password(url: str) -> str:
    """`url` without a password or a token, as it is shown in commands to copy. Names of environment variables, which
    pip fills in, stay; so does the user of a URL that is not HTTP's."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    given, at, name = host.rpartition("@")
    if not at or _VARIABLES.fullmatch(given):
        return url
    user = "" if scheme.rpartition("+")[2] in ("http", "https") else given.partition(":")[0]
    return f"{scheme}{separator}{f'{user}@' if user else ''}{name}{slash}{path}"


def _of(direct: Mapping[str, Any]) -> Origin:
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
