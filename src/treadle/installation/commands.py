"""The shell commands that install more of Treadle from where this copy came from. Everything in them is quoted."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

from .origin import NAME, Kind, Origin, distribution, origin

BACKENDS = ("cpu", "cuda")


def backend_extra() -> str:
    """The extra that brings MLX's build for this machine; empty where MLX is a plain requirement."""
    if sys.platform != "linux":
        return ""
    return "cuda" if shutil.which("nvidia-smi") is not None else "cpu"


def install_command(*extras: str) -> str:
    """The shell command that adds `extras` to this copy of Treadle."""
    place = origin()
    if place.kind is Kind.EDITABLE and _is_checkouts_own(Path(place.where)):
        return _make(Path(place.where), extras)
    if place.kind is Kind.UNKNOWN:
        return pip_install(*requirements(*extras))
    return pip_install(*_target(place, ",".join(extras)))


def pip_install(*words: str) -> str:
    """The shell command that installs `words`, requirements or options, where this interpreter finds its packages."""
    return _pip("install", words)


def pip_uninstall(*packages: str) -> str:
    """The shell command that removes `packages` from where this interpreter finds its packages, and does not ask."""
    return _pip("uninstall", packages)


def requirements(*extras: str) -> list[str]:
    """What `extras` add to Treadle's own requirements on this machine, as pip takes it."""
    found = distribution()
    parsed = [Requirement(line) for line in (found.requires if found else None) or ()]
    return sorted({_plain(one) for one in parsed if _is_added(one, extras)}) or [f"{NAME}[{','.join(extras)}]"]


def requirement(package: str) -> str:
    """`package` with the versions that Treadle needs, by any of its requirements; its bare name where none has it."""
    found = distribution()
    for one in map(Requirement, (found.requires if found else None) or ()):
        if one.name == package and one.specifier:
            return f"{package}{one.specifier}"
    return package


def _pip(action: str, words: Sequence[str]) -> str:
    """pip, or uv where the environment has no pip, for the environment of this interpreter."""
    python, given = shown(Path(sys.executable)), " ".join(map(shlex.quote, words))
    if importlib.util.find_spec("pip") is None and shutil.which("uv") is not None:
        return f"uv pip {action} --python {python} {given}"
    asked = f"{action} -y" if action == "uninstall" else action
    if (Path(sys.prefix) / "pipx_metadata.json").is_file():
        return f"pipx runpip {shlex.quote(Path(sys.prefix).name)} {asked} {given}"
    if importlib.util.find_spec("pip") is None:
        return f"{python} -m ensurepip && {python} -m pip {asked} {given}"
    return f"{'pip' if _is_own_pip() else f'{python} -m pip'} {asked} {given}"


def _is_own_pip() -> bool:
    """Whether `pip` alone, as a shell finds it, is that of this interpreter."""
    found = shutil.which("pip")
    return found is not None and Path(found).parent == Path(sys.executable).parent


def shown(path: Path) -> str:
    """`path` for a shell: relative to the current folder where it is below it, and quoted."""
    try:
        return shlex.quote(str(path.relative_to(Path.cwd())))
    except (ValueError, OSError):
        return shlex.quote(str(path))


def _is_checkouts_own(checkout: Path) -> bool:
    """Whether this interpreter runs in the environment that the checkout's Makefile makes."""
    return (checkout / "Makefile").is_file() and _same(Path(sys.prefix), checkout / ".venv")


def _make(checkout: Path, extras: Sequence[str]) -> str:
    """`make install`, which installs the demo and the backend for this machine by itself."""
    words = ["make", "install"] if _same(checkout, Path.cwd()) else ["make", "-C", str(checkout), "install"]
    words += [f"BACKEND={extra}" for extra in extras if extra in BACKENDS and extra != backend_extra()]
    more = ",".join(extra for extra in extras if extra not in (*BACKENDS, "demo"))
    return shlex.join(words + ([f"EXTRAS={more}"] if more else []))


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _target(place: Origin, extras: str) -> tuple[str, ...]:
    if place.kind is Kind.URL:
        return (f"{NAME}[{extras}] @ {place.where}",)
    target = f"{place.where}[{extras}]"
    return ("--editable", target) if place.kind is Kind.EDITABLE else (target,)


def _plain(one: Requirement) -> str:
    one.marker = None
    return str(one)


def _is_added(one: Requirement, extras: Sequence[str]) -> bool:
    """Whether one of `extras` adds this requirement here, and it is not among those that Treadle always has."""
    if one.marker is None or one.marker.evaluate({"extra": ""}):
        return False
    return any(one.marker.evaluate({"extra": extra}) for extra in extras)
