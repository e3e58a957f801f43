"""What a kernel is made of: its program, or its files, included where MLX's compiler can open them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zipfile import Path as ZipPath
from zipfile import ZipFile

import mlx.core as mx
import pytest

from tests.support.nvrtc import TextCompiler
from treadle.runner.device.cuda import CudaKernel, included, keep_mlx_kernels, prepare_graphs, text
from treadle.runner.device.programs import Programs

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


def call(kernel: CudaKernel, *inputs: mx.array, template: Sequence[tuple[str, Any]] = ()) -> list[Any]:
    return kernel(inputs, template, blocks=(2, 1), threads=32, shapes=[(4,)], dtypes=[mx.float16])


class Mlx:
    """MLX's functions for custom kernels, which record what is launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, programs: Programs) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.launched: list[dict[str, Any]] = []
        self.by_text: list[dict[str, Any]] = []
        monkeypatch.setattr(mx.fast, "cuda_kernel", self._kernel)
        monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **given: self.launched.append(given) or [1])
        monkeypatch.setattr("treadle.runner.device.cuda.kernel_programs", lambda: programs)

    def _kernel(self, **given: Any) -> Any:
        self.compiled.append(given)
        return lambda **launch: self.by_text.append(launch) or [2]


def test_a_kernel_is_launched_with_its_program_and_the_sizes_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(TextCompiler(), "sm_90")
    mlx = Mlx(monkeypatch, programs)
    kernel = CudaKernel("some", ["x"], ["out"], "  out[0] = x_shape[1]; // a size", files=FILES, shared_memory=5)
    for rows in (1, 2):
        assert call(kernel, mx.zeros((rows, 7), mx.float16), template=[("ROWS", 8)]) == [1]
    first, second = mlx.launched
    assert first["compiled_source"] is second["compiled_source"]
    assert (first["scalars"], first["grid"], first["shared_memory"]) == ([7], (64, 1, 1), 5)
    code = first["compiled_source"].decode()
    assert f"void {first['name']}(const __half* x, __half* out, int x_size_1)" in code
    assert "constexpr int ROWS = 8;" in code
    assert "namespace treadle" in code
    assert "a size" not in code
    assert programs.report().compiled == 1
    assert not mlx.compiled


def test_other_types_or_constants_are_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    mlx = Mlx(monkeypatch, Programs(TextCompiler(), "sm_90"))
    kernel = CudaKernel("some", ["x"], ["out"], "out[0] = 1;")
    for dtype, rows in ((mx.float16, 8), (mx.bfloat16, 8), (mx.float16, 16), (mx.float16, 8)):
        call(kernel, mx.zeros(7, dtype), template=[("ROWS", rows)])
    names = [launch["name"] for launch in mlx.launched]
    assert len(set(names)) == 3
    assert names[0] == names[3]


@pytest.mark.parametrize(
    ("programs", "body", "strided"),
    [
        (Programs(None, "sm_90", reason="no compiler"), "out[0] = 1;", False),
        (Programs(TextCompiler(), "sm_90"), "out[0] = nothing;", False),
        (Programs(TextCompiler(), "sm_90"), "out[0] = x_strides[0];", True),
    ],
    ids=["without a compiler", "refused", "strided"],
)
def test_mlx_compiles_what_can_not_be_compiled_here(
    programs: Programs, body: str, strided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlx = Mlx(monkeypatch, programs)
    kernel = CudaKernel("some", ["x"], ["out"], body, files=FILES, shared_memory=5, strided=strided)
    for _ in range(2):
        assert call(kernel, mx.zeros(7, mx.float16), template=[("ROWS", 8)]) == [2]
    (made,) = mlx.compiled
    assert (made["source"], made["header"], made["shared_memory"]) == (body, included(*FILES), 5)
    assert made["ensure_row_contiguous"] is not strided
    assert [launch["grid"] for launch in mlx.by_text] == [(64, 1, 1)] * 2
    assert (programs.report().compiled, programs.report().by_mlx) == (0, 1)


def test_a_kernel_of_another_text_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX keeps what it compiled by the kernel's name."""
    mlx = Mlx(monkeypatch, Programs(None, "sm_90", reason="no compiler"))
    for body, files in (("a", FILES), ("b", FILES), ("a", FILES[:1]), ("a", FILES)):
        call(CudaKernel("some", ["x"], ["out"], body, files=files), mx.zeros(7))
    names = [made["name"] for made in mlx.compiled]
    assert names[0] == names[3]
    assert len(set(names)) == 3
    assert all(name.startswith("treadle_some_") for name in names)


def test_graphs_end_at_no_number_of_bytes_and_many_are_kept_unless_somebody_said_so() -> None:
    large, small, theirs = (
        {"A": "1"},
        dict[str, str](),
        {"MLX_MAX_MB_PER_BUFFER": "25", "MLX_CUDA_GRAPH_CACHE_SIZE": "7"},
    )
    for environment, gigabytes in ((large, 80), (small, 8), (theirs, 80)):
        prepare_graphs(environment, gigabytes * 10**9, only_decoding=False)
    unchecked = {"MLX_ENABLE_CACHE_THRASHING_CHECK": "0"}
    assert large == {"A": "1", "MLX_MAX_MB_PER_BUFFER": "1000000000", "MLX_CUDA_GRAPH_CACHE_SIZE": "2237"} | unchecked
    assert small["MLX_CUDA_GRAPH_CACHE_SIZE"] == "400", "MLX's own number"
    assert theirs == {"MLX_MAX_MB_PER_BUFFER": "25", "MLX_CUDA_GRAPH_CACHE_SIZE": "7"} | unchecked
    for gigabytes, kept in ((80, "1600"), (24, "671"), (8, "400")):
        decoding = dict[str, str]()
        prepare_graphs(decoding, gigabytes * 10**9, only_decoding=True)
        assert decoding["MLX_CUDA_GRAPH_CACHE_SIZE"] == kept, "decode steps have fewer shapes"


def test_mlx_keeps_its_kernels_in_the_cache_folder(tmp_path: Path) -> None:
    theirs = {"MLX_PTX_CACHE_DIR": "/there", "XDG_CACHE_HOME": str(tmp_path / "a")}
    (tmp_path / "file").touch()
    unusable = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    mine = {"XDG_CACHE_HOME": str(tmp_path / "b")}
    for environment in (theirs, unusable, mine):
        keep_mlx_kernels(environment)
    assert theirs["MLX_PTX_CACHE_DIR"] == "/there"
    assert "MLX_PTX_CACHE_DIR" not in unusable
    folder = Path(mine["MLX_PTX_CACHE_DIR"])
    assert folder == tmp_path / "b" / "treadle" / "mlx" / version("mlx")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "a").exists()
