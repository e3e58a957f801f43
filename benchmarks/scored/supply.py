"""S4: hostile model folders, and the packages of a release."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .figures import Figure

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 2
SHOWN = 5
PACKAGE = re.compile(r"^([\w.-]+)==", re.MULTILINE)


async def chain(model: Path, log: Path) -> list[Figure]:
    """Serve each hostile folder of the tests, and count the hashes of a release's packages."""
    return [*await served(), *locked(ROOT / "deploy")]


async def served() -> list[Figure]:
    """Serve each folder with a `treadle serve` of its own."""
    from tests.poison.hostile import cases

    free, found = asyncio.Semaphore(AT_ONCE), cases()

    async def start(name: str) -> tuple[str, Any, str]:
        from tests.poison.starts import start

        async with free:
            began = await asyncio.to_thread(start, found[name])
        return name, began, began.wrong(found[name])

    return judged(await asyncio.gather(*(start(name) for name in found)))


def judged(starts: list[tuple[str, Any, str]]) -> list[Figure]:
    wrong = [name for name, _, fault in starts if fault]
    ends = Counter("serve" if start.code is None else "are refused" for _, start, _ in starts)
    ran = sum(start.ran for _, start, _ in starts)
    silent = sum(start.silent for _, start, _ in starts)
    longest = max(start.took_s for _, start, _ in starts)
    tracebacks = sum("Traceback" in start.said for _, start, _ in starts)
    text = f"{ends['are refused']} are refused, {ends['serve']} serve; not as their files say: "
    return [
        Figure(f"{len(starts)} hostile folders", text + named(wrong), not wrong),
        Figure("folders whose code ran", str(ran), ran == 0),
        Figure("starts with a traceback", str(tracebacks), tracebacks == 0),
        Figure("probes of /health/live meanwhile without an answer", str(silent), silent == 0),
        Figure("longest until the refusal or the first answer", f"{longest:.1f} s"),
    ]


def named(names: list[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) + rest) if names else "none"


def locked(folder: Path) -> list[Figure]:
    """Return the packages of each file of requirements, and those that lack a hash."""
    return [figure(file.name, packages(file.read_text())) for file in sorted(folder.glob("requirements-*.txt"))]


def packages(text: str) -> Mapping[str, int]:
    """Return the number of hashes by package."""
    parts = PACKAGE.split(text)
    return {name: block.count("--hash=sha256:") for name, block in zip(parts[1::2], parts[2::2], strict=True)}


def figure(name: str, hashes: Mapping[str, int]) -> Figure:
    bare = sorted(package for package, count in hashes.items() if not count)
    value = f"{len(hashes)}, without a hash: {named(bare)}"
    return Figure(f"packages in `deploy/{name}`", value, bool(hashes) and not bare)
