"""Programs of custom kernels: their text, the cache before the compiler, and what happens where one of them fails."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.nvrtc import NvrtcLibrary, TextCompiler
from treadle.core.compute_path import KernelPrograms
from treadle.runner.device import programs as module
from treadle.runner.device.cubin_cache import CubinCache
from treadle.runner.device.image_names import library_hash, short_name
from treadle.runner.device.nvrtc import Nvrtc, NvrtcMissing
from treadle.runner.device.program_text import NAME, KernelText
from treadle.runner.device.programs import Program, Programs, programs_so_far, tried

Launch = dict[str, Any]
NAME_OF_FUNCTION = b"__global__ void"
TEXT = f'extern "C" __global__ void {NAME}() {{}}'


@pytest.fixture
def kept(tmp_path: Path) -> CubinCache:
    return CubinCache(tmp_path / "kernels")


def made(kept: CubinCache | None = None, architecture: str = "sm_90", compiler: Any = None) -> Programs:
    return Programs(compiler or TextCompiler(), architecture, kept)


def test_a_program_has_the_arguments_that_its_body_reads() -> None:
    text = KernelText(("x", "w", "max"), ("out",), "// header", "out[0] = x[x_shape[2]] + x_shape[0] + max_shape[1];")
    assert text.sizes == ((0, 0), (0, 2), (2, 1))
    template = [("T", mx.bfloat16), ("ROWS", 8), ("BIASED", True)]
    program = text.program([mx.bfloat16, mx.uint8, mx.int32], template, [mx.float16])
    assert program.splitlines() == [
        "#include <cuda_bf16.h>",
        "#include <cuda_fp16.h>",
        "// header",
        'extern "C" __global__ void KERNEL_NAME(const __nv_bfloat16* x, const unsigned char* w, const int* max, '
        "__half* out, int x_size_0, int x_size_2, int max_size_1) {",
        "",
        "if (gridDim.z > 1) return;",
        "using T = __nv_bfloat16;",
        "constexpr int ROWS = 8;",
        "constexpr bool BIASED = true;",
        "const int x_shape[] = {x_size_0, 0, x_size_2};",
        "const int max_shape[] = {0, max_size_1};",
        "out[0] = x[x_shape[2]] + x_shape[0] + max_shape[1];",
        "}",
    ]


@pytest.mark.parametrize("body", ["f(x_shape);", "f(x_strides[0]);", "f(x_ndim);", "f(x_shape[i]);"])
def test_what_only_mlx_knows_of_an_array_is_no_argument(body: str) -> None:
    with pytest.raises(ValueError, match=r"only NAME_shape\[NUMBER\]"):
        _ = KernelText(("x",), ("out",), "", body).sizes


def test_a_second_process_compiles_nothing(kept: CubinCache) -> None:
    first, second = made(kept), made(kept)
    program = first.get("some", TEXT, ((0, 1),), 100)
    assert program is not None
    assert program == first.get("some", TEXT, ((0, 1),), 100) == second.get("some", TEXT, ((0, 1),), 100)
    assert f"void {program.name}()" in program.cubin.decode()
    assert "sm_90" in program.cubin.decode()
    assert (program.sizes, program.shared_memory) == (((0, 1),), 100)
    assert [one.report() for one in (first, second)] == [
        KernelPrograms(compiled=1, compile_s=first.report().compile_s),
        KernelPrograms(cached=1),
    ]


def other_compiler(**facts: str) -> TextCompiler:
    compiler = TextCompiler()
    vars(compiler).update(facts)
    return compiler


@pytest.mark.parametrize(
    "get",
    [
        lambda kept: made(kept, "sm_100").get("some", TEXT, (), 0),
        lambda kept: made(kept).get("some", f"{TEXT} // changed", (), 0),
        lambda kept: made(kept).get("some", TEXT, (), 1),
        lambda kept: made(kept, compiler=other_compiler(version="13.6")).get("some", TEXT, (), 0),
        lambda kept: made(kept, compiler=other_compiler(headers="others")).get("some", TEXT, (), 0),
    ],
    ids=["device", "text", "shared memory", "compiler", "headers"],
)
def test_all_that_decides_the_code_is_in_its_name(
    get: Callable[[CubinCache], Program | None], kept: CubinCache
) -> None:
    """MLX keeps what it loaded by its name, and the cache by the same digest."""
    program, other = made(kept).get("some", TEXT, (), 0), get(kept)
    assert program is not None
    assert other is not None
    assert program.name != other.name


def test_a_damaged_file_is_compiled_again(kept: CubinCache) -> None:
    program = made(kept).get("some", TEXT, (), 0)
    (file,) = kept.folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    again = made(kept)
    assert again.get("some", TEXT, (), 0) == program
    assert again.report().compiled == 1
    assert made(kept).get("some", TEXT, (), 0) == program


def test_without_a_folder_programs_are_compiled_and_one_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    programs = made(CubinCache(tmp_path / "file"))
    for text in (TEXT, f"{TEXT} // other"):
        assert programs.get("some", text, (), 0) is not None
    (reason,) = programs.report().reasons
    assert reason == f"not kept on disk: {tmp_path / 'file'}: File exists"
    assert programs.report().summary().endswith(f"; {reason}")
    (record,) = caplog.records
    assert "set XDG_CACHE_HOME" in record.message


def test_a_disk_that_fails_after_the_look_up_costs_the_cache_alone(
    kept: CubinCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    programs = made(kept)
    monkeypatch.setattr("os.rename", full)
    assert programs.get("some", TEXT, (), 0) is not None
    assert "No space left on device" in programs.report().reasons[0]


def test_a_refused_text_is_left_to_mlx_and_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    programs = made()
    for _ in range(2):
        assert programs.get("some", "nothing", (), 0) is None
        assert programs.left_to_mlx("some", [mx.int32], [("ROWS", 8)]).cubin == b""
    report = programs.report()
    assert (report.compiled, report.by_mlx) == (0, 1)
    assert report.reasons == ('NVRTC refused some: some.cu(3): error: identifier "nothing" is undefined',)
    (record,) = caplog.records
    assert "MLX compiles it, at each start" in record.message


def test_the_same_refusal_of_several_texts_of_a_kernel_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    programs = made()
    for text in ("nothing", "nothing  // else"):
        assert programs.get("some", text, (), 0) is None
    assert len(programs.report().reasons) == len(caplog.records) == 1


def test_a_launch_names_the_program_and_passes_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Launch] = []
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **given: launches.append(given) or ["made"])
    x = mx.zeros((3, 5))
    program = Program("treadle_some", b"code", ((0, 1), (1, 0)), 5000)
    assert program.launch([x, mx.zeros(7)], (4, 2), 128, [(3,)], [mx.float32]) == ["made"]
    (launch,) = launches
    assert (launch["name"], launch["compiled_source"], launch["scalars"]) == ("treadle_some", b"code", [5, 7])
    assert (launch["grid"], launch["threadgroup"], launch["shared_memory"]) == ((512, 2, 1), (128, 1, 1), 5000)
    assert launch["ensure_row_contiguous"] is True


class Device:
    """MLX's launches of the trial, and NVRTC. `answer` computes what a launch returns, once its program was loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: NvrtcLibrary) -> None:
        self.environment = {"XDG_CACHE_HOME": str(tmp_path)}
        self.answer: Callable[[Launch], Any] = lambda given: given["inputs"][0] * 2 + given["scalars"][0]
        self.launches: list[Launch] = []
        self._hash = library_hash()
        self._loaded: set[tuple[str, int]] = set()
        monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", self._launch)
        monkeypatch.setattr(module, "find_nvrtc", lambda mlx, environment: Nvrtc(library, []))

    def _launch(self, **given: Any) -> Any:
        """MLX's way to find a program: by its name and the hash of its code, which it loads where it has none."""
        self.launches.append(given)
        key = (given["name"], self._hash(given["compiled_source"]))
        if key not in self._loaded and NAME_OF_FUNCTION not in given["compiled_source"]:
            raise RuntimeError("Failed to load compiled kernel")
        self._loaded.add(key)
        return [self.answer(given)]

    def tried(self) -> Programs:
        return tried("sm_90", Path("mlx"), self.environment)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Device:
    return Device(monkeypatch, tmp_path, NvrtcLibrary())


def test_a_start_tries_one_program(device: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    programs = device.tried()
    assert programs.report().reasons == ()
    assert programs.get("some", TEXT, (), 0) is not None
    assert len(list((tmp_path / "treadle" / "kernels").iterdir())) == 2
    assert not caplog.records


def test_launches_of_a_loaded_program_pass_eight_bytes(device: Device) -> None:
    """MLX hashes what is passed at each launch."""
    programs = device.tried()
    whole = programs.get("some", TEXT, ((0, 0),), 0)
    assert whole is not None
    device.launches.clear()
    program = programs.loaded(whole, [mx.int32, mx.uint8], [mx.float16])
    (load,) = device.launches
    assert load["compiled_source"] == whole.cubin
    assert (load["grid"], load["threadgroup"], load["scalars"]) == ((1, 1, 2), (1, 1, 1), [0])
    assert [given.dtype for given in load["inputs"]] == [mx.int32, mx.uint8]
    assert load["output_dtypes"] == [mx.float16]
    program.launch([mx.zeros(3), mx.zeros(3)], (1, 1), 1, [(1,)], [mx.float16])
    assert len(device.launches[-1]["compiled_source"]) == 8
    assert device.launches[-1]["name"] == whole.name


def test_a_short_name_has_the_hash_of_the_whole() -> None:
    hashed = library_hash()
    for size in (0, 1, 8, 9, 16, 40_001):
        image = os.urandom(size)
        name = short_name(image, hashed)
        assert len(name) <= 8
        assert hashed(name) == hashed(image)
    with pytest.raises(ValueError, match="not MurmurHash64A"):
        short_name(b"more than eight bytes", lambda text: len(text))


def no_library(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


def wrong_by_a_short_text(given: Launch) -> Any:
    right = len(given["compiled_source"]) > 8
    return given["inputs"][0] * 2 + given["scalars"][0] * right


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda device, patch: setattr(device, "answer", wrong_by_a_short_text), "wrong numbers"),
        (lambda device, patch: patch.setattr(module, "library_hash", lambda: lambda text: 0), "Failed to load"),
        (lambda device, patch: patch.setattr(ctypes, "CDLL", no_library), "cannot open shared object file"),
    ],
    ids=["wrong numbers", "another hash", "another library"],
)
def test_without_short_texts_launches_pass_whole_programs(
    break_it: Callable[[Device, pytest.MonkeyPatch], None],
    reason: str,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    break_it(device, monkeypatch)
    programs = device.tried()
    (told,) = programs.report().reasons
    assert "launches take the host longer" in told
    assert reason in told
    assert reason in caplog.records[0].message
    whole = programs.get("some", TEXT, (), 0)
    assert whole is not None
    assert programs.loaded(whole, [], []) is whole


def unloadable(given: Launch) -> Any:
    raise RuntimeError("Failed to load compiled treadle_trial kernel")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(lambda given: given["inputs"][0], "a launched one returned wrong numbers"), (unloadable, "Failed to load")],
)
def test_where_the_trial_fails_mlx_compiles_everything(
    answer: Callable[[Launch], Any], reason: str, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    device.answer = answer
    programs = device.tried()
    assert programs.get("some", TEXT, (), 0) is None
    assert reason in programs.report().reasons[0]
    (record,) = caplog.records
    assert reason in record.message


def test_an_mlx_without_such_launches_compiles_everything(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mx.fast, "precompiled_cuda_kernel")
    assert "MLX can't launch them" in device.tried().report().reasons[0]


def test_a_compiler_that_refuses_the_trial_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(monkeypatch, tmp_path, NvrtcLibrary(failing="nvrtcGetCUBIN"))
    with caplog.at_level(logging.WARNING):
        (reason,) = device.tried().report().reasons
    assert "NVRTC refused trial: nvrtcGetCUBIN failed with error 1" in reason


def test_without_nvrtc_mlx_compiles_everything(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Nvrtc:
        raise NvrtcMissing("MLX has not loaded libnvrtc.so.13")

    monkeypatch.setattr(module, "find_nvrtc", missing)
    assert device.tried().report().reasons == ("compiled by MLX: MLX has not loaded libnvrtc.so.13",)


def test_a_process_counts_programs_once_it_has_launched_one(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = made()
    monkeypatch.setattr(module, "tried", lambda *_: programs)
    module.kernel_programs.cache_clear()
    assert programs_so_far() == KernelPrograms()
    assert module.kernel_programs() is programs
    programs.get("some", TEXT, (), 0)
    assert programs_so_far() == programs.report()
    module.kernel_programs.cache_clear()
