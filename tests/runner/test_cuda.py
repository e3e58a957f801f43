"""What a kernel is made of: its files, included where a compiler can open them."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any
from zipfile import Path as ZipPath
from zipfile import ZipFile

import pytest

from treadle.runner.device.cuda import CudaKernel, included, lift_graph_byte_limit, text

FILES = ("device/numbers.cuh", "sampling/draw.cuh")


def test_files_are_included_from_where_they_lie() -> None:
    found = re.findall(r'#include "([^"]+)"\n', included(*FILES))
    assert all(Path(path).as_posix().endswith(f"/runner/{name}") for path, name in zip(found, FILES, strict=True))
    assert "".join(Path(name).read_text() for name in found) == text(*FILES)
    assert included() == ""


def zipped(tmp_path: Path) -> Any:
    with ZipFile(tmp_path / "package.zip", "w") as archive:
        for name in FILES:
            archive.writestr(name, text(name))
    return ZipPath(tmp_path / "package.zip")


def odd(tmp_path: Path) -> Any:
    folder = tmp_path / 'a "b"'
    for name in FILES:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text(name))
    return folder


@pytest.mark.parametrize("place", [zipped, odd])
def test_files_that_can_not_be_included_are_part_of_the_kernel(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a packed release, or under a name that can't be quoted: their text without comments."""
    there = place(tmp_path)
    monkeypatch.setattr(resources, "files", lambda package: there)
    whole = included(*FILES)
    assert "#include" not in whole
    assert "namespace treadle" in whole
    assert "//" not in whole


def test_a_kernel_of_another_text_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX keeps what it compiled, on disk too, by the kernel's name."""
    names: list[str] = []

    def make(name: str, **_: Any) -> Any:
        names.append(name)

    monkeypatch.setattr("mlx.core.fast.cuda_kernel", make)
    for body, files in (("a", FILES), ("b", FILES), ("a", FILES[:1]), ("a", FILES)):
        CudaKernel("some", [], [], body, files=files)
    assert names[0] == names[3]
    assert len(set(names)) == 3
    assert all(name.startswith("treadle_some_") for name in names)


def test_graphs_end_at_no_number_of_bytes_unless_somebody_said_so() -> None:
    mine, theirs = {"A": "1"}, {"MLX_MAX_MB_PER_BUFFER": "25"}
    for environment in (mine, theirs):
        lift_graph_byte_limit(environment)
    assert mine == {"A": "1", "MLX_MAX_MB_PER_BUFFER": "1000000000"}
    assert theirs == {"MLX_MAX_MB_PER_BUFFER": "25"}
