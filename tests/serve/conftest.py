from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.serve.server import Serve
from tests.support.tiny import Architecture, make_tiny

CONTEXT = 200_000
Tiny = Callable[..., Path]
Start = Callable[..., Serve]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The folder of a tiny model with a long context and no end token: only limits end its sequences."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(architecture: Architecture = "gemma3") -> Path:
        path = root / architecture
        return path if path.exists() else make_tiny(path, architecture=architecture, context=CONTEXT, eos=False)

    return folder


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts servers that the tests of a module share."""
    yield from _starter(tmp_path_factory.mktemp("servers"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers that end with the test: `start(model, *options)`."""
    yield from _starter(tmp_path)


def _starter(folder: Path) -> Iterator[Start]:
    with ExitStack() as stack:
        count = 0

        def begin(model: Path | str, *options: str, **more: Any) -> Serve:
            nonlocal count
            count += 1
            return stack.enter_context(Serve(model, *options, log=folder / f"{count}.log", **more))

        yield begin
