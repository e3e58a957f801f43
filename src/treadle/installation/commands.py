"""Shell commands that install Treadle's extras from the origin of this copy. All arguments are quoted."""

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
    """Return the extra with MLX's build for this machine; "" where MLX is an unconditional requirement."""
    if sys.platform != "linux":
        return ""
    return "cuda" if shutil.which("nvidia-smi") is not None else "cpu"


def install_command(*extras: str) -> str:
    """Return the shell command that adds `extras` to this copy of Treadle."""
    place = origin()
    if place.kind is Kind.EDITABLE and _is_checkout_environment(Path(place.where)):
        return _make_command(Path(place.where), extras)
    if place.kind is Kind.UNKNOWN:
        return pip_install(*requirements(*extras))
    return pip_install(*_pip_target(place, ",".join(extras)))


def pip_install(*words: str) -> str:
    """Return the shell command that installs `words` (requirements, options) into this interpreter's environment."""
    return _pip("install", words)


def pip_uninstall(*packages: str) -> str:
    """Return the shell command that removes `packages` from this interpreter's environment without confirmation."""
    return _pip("uninstall", packages)


def requirements(*extras: str) -> list[str]:
    """Return the requirements that `extras` add on this machine, in pip's syntax."""
    found = distribution()
    parsed = [Requirement(line) for line in (found.requires if found else None) or ()]
    return sorted({_without_marker(one) for one in parsed if _is_added(one, extras)}) or [f"{NAME}[{','.join(extras)}]"]


def requirement(package: str) -> str:
    """Return `package` with the version specifier of Treadle's requirements; its bare name if they have none."""
    found = distribution()
    for one in map(Requirement, (found.requires if found else None) or ()):
        if one.name == package and one.specifier:
            return f"{package}{one.specifier}"
    return package


def _pip(action: str, words: Sequence[str]) -> str:
    """Return a command of pip, pipx or uv (if the environment has no pip) for this interpreter's environment."""
    python, given = quote_path(Path(sys.executable)), " ".join(map(shlex.quote, words))
    if importlib.util.find_spec("pip") is None and shutil.which("uv") is not None:
        return f"uv pip {action} --python {python} {given}"
    asked = f"{action} -y" if action == "uninstall" else action
    if (Path(sys.prefix) / "pipx_metadata.json").is_file():
        return f"pipx runpip {shlex.quote(Path(sys.prefix).name)} {asked} {given}"
    if importlib.util.find_spec("pip") is None:
        return f"{python} -m ensurepip && {python} -m pip {asked} {given}"
    return f"{'pip' if _is_pip_on_path() else f'{python} -m pip'} {asked} {given}"


def _is_pip_on_path() -> bool:
    """Whether `pip` on the PATH belongs to this interpreter."""
    found = shutil.which("pip")
    return found is not None and Path(found).parent == Path(sys.executable).parent


def quote_path(path: Path) -> str:
    """Quote `path` for a shell, relative to the current folder if it is inside."""
    try:
        return shlex.quote(str(path.relative_to(Path.cwd())))
    except (ValueError, OSError):
        return shlex.quote(str(path))


def _is_checkout_environment(checkout: Path) -> bool:
    """Whether this interpreter runs in the environment made by the checkout's Makefile."""
    return (checkout / "Makefile").is_file() and _is_same_file(Path(sys.prefix), checkout / ".venv")


def _make_command(checkout: Path, extras: Sequence[str]) -> str:
    """Return `make install`, which installs the demo and this machine's backend by default."""
    words = ["make", "install"] if _is_same_file(checkout, Path.cwd()) else ["make", "-C", str(checkout), "install"]
    words += [f"BACKEND={extra}" for extra in extras if extra in BACKENDS and extra != backend_extra()]
    more = ",".join(extra for extra in extras if extra not in (*BACKENDS, "demo"))
    return shlex.join(words + ([f"EXTRAS={more}"] if more else []))


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _pip_target(place: Origin, extras: str) -> tuple[str, ...]:
    if place.kind is Kind.URL:
        return (f"{NAME}[{extras}] @ {place.where}",)
    target = f"{place.where}[{extras}]"
    return ("--editable", target) if place.kind is Kind.EDITABLE else (target,)


def _without_marker(one: Requirement) -> str:
    one.marker = None
    return str(one)


def _is_added(one: Requirement, extras: Sequence[str]) -> bool:
    """Whether one of `extras` adds this requirement here, and Treadle does not always have it."""
    if one.marker is None or one.marker.evaluate({"extra": ""}):
        return False
    return any(one.marker.evaluate({"extra": extra}) for extra in extras)
