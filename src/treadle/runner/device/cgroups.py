"""Memory limits of the control groups that this process is in: its own and all above it, of version 1 and 2.

`/proc/self/cgroup` names the groups and `/proc/self/mountinfo` where they are seen from here. In a container with the
host's cgroup namespace the group's path begins outside of what is mounted; the mount's root says where.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PROC = Path("/proc/self")
_UNLIMITED = 1 << 60  # version 1 writes the largest whole number of pages for no limit


@dataclass(frozen=True)
class Group:
    """A group with a limit: `limit` and `used` bytes, of which `idle` are files that the kernel drops on demand."""

    limit: int
    used: int
    idle: int

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used + self.idle)


@dataclass(frozen=True)
class _Version:
    """The files of a version; the smallest of `limits` counts."""

    kind: str
    limits: tuple[str, ...]
    used: str
    idle: str


_V1 = _Version("cgroup", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version("cgroup2", ("memory.max", "memory.high"), "memory.current", "inactive_file")


def limited_groups(proc: Path = PROC, root: Path = Path("/")) -> list[Group]:
    """The groups of this process that limit its memory, as `proc` names them and below `root`; none where none does."""
    try:
        own = (proc / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (proc / "mountinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    found = []
    for version, path in _paths(own):
        for folder in _folders(version, path, mounts):
            group = _group(version, root / folder.relative_to("/"))
            found += [] if group is None else [group]
    return found


def _paths(lines: list[str]) -> Iterator[tuple[_Version, PurePosixPath]]:
    """The group that has memory to account, by version: lines are `ID:CONTROLLERS:PATH`."""
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield _V2, PurePosixPath(path or "/")
        elif "memory" in controllers.split(","):
            yield _V1, PurePosixPath(path or "/")


def _folders(version: _Version, path: PurePosixPath, mounts: list[str]) -> Iterator[PurePosixPath]:
    """Folders of the group and those above it, the innermost first."""
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] != version.kind:
            continue
        if version is _V1 and "memory" not in kind[2].split(","):
            continue
        top, place = PurePosixPath(_plain(fields[3])), PurePosixPath(_plain(fields[4]))
        inside = path.relative_to(top) if path.is_relative_to(top) and ".." not in path.parts else PurePosixPath()
        yield from (place / part for part in (inside, *inside.parents))


def _plain(field: str) -> str:
    """A path of mountinfo, where blanks are octal."""
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _group(version: _Version, folder: Path) -> Group | None:
    limits = [limit for name in version.limits if (limit := _number(folder / name)) is not None]
    limit = min(limits, default=_UNLIMITED)
    if limit >= _UNLIMITED:
        return None
    return Group(limit, _number(folder / version.used) or 0, _idle(folder, version.idle))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None


def _idle(folder: Path, name: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)
