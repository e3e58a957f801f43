"""NVRTC through ctypes: where it and its headers are found, what it is asked, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.nvrtc import NvrtcLibrary
from treadle.runner.device.nvrtc import CompilationFailed, Nvrtc, NvrtcMissing, find_nvrtc


@pytest.fixture
def mlx(tmp_path: Path) -> Path:
    """MLX's folder beside NVIDIA's packages, with the headers that kernels need."""
    folder = tmp_path / "site" / "mlx"
    for path in ("mlx/include/cccl/nv/target", "nvidia/cu13/include/cuda_fp16.h", "nvidia/cu13/include/cuda_bf16.h"):
        (folder.parent / path).parent.mkdir(parents=True, exist_ok=True)
        (folder.parent / path).write_text(path)
    return folder


def found(monkeypatch: pytest.MonkeyPatch, mlx: Path, library: NvrtcLibrary, **environment: str) -> Nvrtc:
    monkeypatch.setattr("treadle.runner.device.nvrtc._SYSTEM", str(mlx / "nowhere"))
    monkeypatch.setattr("ctypes.CDLL", lambda name, mode: library)
    return find_nvrtc(mlx, environment)


def test_a_text_is_compiled_with_the_headers_that_mlx_uses(monkeypatch: pytest.MonkeyPatch, mlx: Path) -> None:
    library = NvrtcLibrary()
    nvrtc = found(monkeypatch, mlx, library)
    assert nvrtc.compile("a text", "some.cu", ["--gpu-architecture=sm_90"]) == b"some.cu\na text"
    folders = (mlx / "include" / "cccl", mlx.parent / "nvidia" / "cu13" / "include")
    assert [option.decode() for option in library.options] == [
        "--gpu-architecture=sm_90",
        *(f"--include-path={folder}" for folder in folders),
    ]
    assert nvrtc.version == "13.5"
    assert library.alive == 0


def test_a_refused_text_raises_what_the_compiler_said(monkeypatch: pytest.MonkeyPatch, mlx: Path) -> None:
    library = NvrtcLibrary()
    with pytest.raises(CompilationFailed, match='identifier "nothing" is undefined'):
        found(monkeypatch, mlx, library).compile("nothing", "some.cu", [])
    assert library.alive == 0


@pytest.mark.parametrize("function", ["nvrtcCreateProgram", "nvrtcGetCUBIN", "nvrtcGetCUBINSize"])
def test_an_error_of_another_call_names_it(function: str, monkeypatch: pytest.MonkeyPatch, mlx: Path) -> None:
    library = NvrtcLibrary(failing=function)
    with pytest.raises(CompilationFailed, match=f"{function} failed with error 1"):
        found(monkeypatch, mlx, library).compile("a text", "some.cu", [])
    assert library.alive == 0


def test_a_library_that_mlx_has_not_loaded_is_not_used(mlx: Path) -> None:
    with pytest.raises(NvrtcMissing, match=r"MLX has not loaded libnvrtc\.so\.13"):
        find_nvrtc(mlx, {})


def test_a_library_without_its_functions_is_missing(monkeypatch: pytest.MonkeyPatch, mlx: Path) -> None:
    with pytest.raises(NvrtcMissing, match="can't be called"):
        found(monkeypatch, mlx, NvrtcLibrary(failing="nvrtcVersion"))


def test_headers_of_a_toolkit_are_found_by_its_variable(monkeypatch: pytest.MonkeyPatch, mlx: Path) -> None:
    toolkit = mlx.parent / "toolkit"
    (mlx.parent / "nvidia" / "cu13").rename(toolkit)
    library = NvrtcLibrary()
    found(monkeypatch, mlx, library, CUDA_HOME=str(toolkit)).compile("a text", "some.cu", [])
    assert f"--include-path={toolkit / 'include'}".encode() in library.options
    with pytest.raises(NvrtcMissing, match=r"cuda_fp16\.h is in none of .*install nvidia-cuda-runtime"):
        found(monkeypatch, mlx, library)


def test_other_headers_have_another_digest(monkeypatch: pytest.MonkeyPatch, mlx: Path) -> None:
    digests = [found(monkeypatch, mlx, NvrtcLibrary()).headers for _ in range(2)]
    (mlx.parent / "nvidia" / "cu13" / "include" / "cuda_bf16.h").write_text("of another version")
    assert digests[0] == digests[1] != found(monkeypatch, mlx, NvrtcLibrary()).headers
