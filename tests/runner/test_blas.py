"""OpenBLAS before MLX: who really answers, what is kept, and that nothing here ever raises.

What is loaded with global symbols stays for the life of a process, so each case has its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from treadle.installation import install_command
from treadle.runner.device import blas

on_linux_cpu = pytest.mark.skipif(
    sys.platform != "linux" or blas._has_mlx_cuda(), reason="MLX brings its own BLAS everywhere else"
)

REPORT = """
import json, sys
from pathlib import Path
from treadle.runner.device import blas
report = blas.prepare({threads}, Path(sys.argv[1]))
{then}
print(json.dumps({{"name": report.name, "threads": report.threads, "warning": report.warning, "who": blas.which_blas(),
    "can_set": report.set_threads is not None}}))
"""
PRODUCTS = """
import mlx.core as mx
for m in (1, 8, 33):
    a, w = mx.random.normal((m, 64)), mx.random.normal((48, 64))
    assert mx.allclose(a @ w.T, mx.sum(a[:, None, :] * w[None], axis=-1), atol=1e-4).item()
"""


def run(code: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code, str(cache)], capture_output=True, text=True, timeout=100, env=env
    )


def report(cache: Path, *, threads: int | None = 1, then: str = "", before: str = "", **env: str) -> dict[str, Any]:
    done = run(before + REPORT.format(threads=threads, then=then), cache, **env)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@on_linux_cpu
class TestOnLinux:
    def test_openblas_answers_for_mlx(self, tmp_path: Path) -> None:
        """The dynamic linker itself says which library MLX's calls go to."""
        log = tmp_path / "bindings"
        found = report(
            tmp_path / "cache", threads=2, then=PRODUCTS, LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(log), LD_BIND_NOW="1"
        )
        assert found["name"].startswith("OpenBLAS 0.3.")
        assert (found["threads"], found["warning"], found["can_set"]) == (2, "", True)
        lines = [line for path in tmp_path.glob("bindings.*") for line in path.read_text(errors="replace").splitlines()]
        if not lines:
            pytest.skip("this C library does not log its bindings")
        for function in blas.FUNCTIONS:
            bound = [line for line in lines if "libmlx.so" in line and line.endswith(f"symbol `{function}'")]
            assert bound
            assert all(str(tmp_path / "cache" / "libopenblas-") in line for line in bound)

    def test_the_renamed_copy_is_made_once(self, tmp_path: Path) -> None:
        report(tmp_path)
        (copy,) = tmp_path.iterdir()
        made = copy.stat()
        report(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [copy.name]
        assert copy.stat().st_mtime_ns == made.st_mtime_ns

    def test_two_at_once_leave_one_whole_copy(self, tmp_path: Path) -> None:
        code = REPORT.format(threads=1, then=PRODUCTS)
        both = [
            subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        for process in both:
            said, _ = process.communicate(timeout=100)
            assert process.returncode == 0
            assert json.loads(said)["name"].startswith("OpenBLAS")
        assert len(list(tmp_path.iterdir())) == 1

    def test_a_torn_copy_is_made_again(self, tmp_path: Path) -> None:
        report(tmp_path)
        (copy,) = tmp_path.iterdir()
        whole = copy.stat().st_size
        copy.write_bytes(copy.read_bytes()[:1000])
        assert report(tmp_path)["warning"] == ""
        assert copy.stat().st_size == whole

    def test_a_copy_that_cannot_be_loaded_does_not_stop_it(self, tmp_path: Path) -> None:
        report(tmp_path)
        (copy,) = tmp_path.iterdir()
        copy.write_bytes(bytes(copy.stat().st_size))
        assert report(tmp_path, then=PRODUCTS)["name"].startswith("OpenBLAS")

    def test_without_a_writable_cache_the_copy_is_private(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        (tmp_path / "tmp").mkdir()
        found = report(tmp_path / "file" / "cache", then=PRODUCTS, TMPDIR=str(tmp_path / "tmp"))
        assert (found["name"][:8], found["warning"]) == ("OpenBLAS", "")
        assert not any((tmp_path / "tmp").iterdir())

    def test_without_the_package_it_falls_back_with_one_line(self, tmp_path: Path) -> None:
        found = report(tmp_path, before="import sys; sys.modules['scipy_openblas32'] = None\n", then=PRODUCTS)
        assert found["name"] == found["who"] == blas.REFERENCE
        assert found["warning"].endswith(install_command("cpu"))
        assert "\n" not in found["warning"]
        assert not found["can_set"]

    def test_without_the_tool_it_falls_back_with_one_line(self, tmp_path: Path) -> None:
        before = "import shutil, sys; sys.executable = '/nowhere/python'; shutil.which = lambda name: None\n"
        found = report(tmp_path, before=before)
        assert "patchelf is not installed" in found["warning"]
        assert found["name"] == blas.REFERENCE

    def test_a_tool_that_fails_is_one_line(self, tmp_path: Path) -> None:
        broken = tmp_path / "patchelf"
        shutil.copy("/bin/false", broken)
        before = f"import sys; sys.executable = {str(tmp_path / 'python')!r}\n"
        found = report(tmp_path / "cache", before=before)
        assert "could not be loaded" in found["warning"]
        assert not any((tmp_path / "cache").iterdir())

    def test_too_late_is_said(self, tmp_path: Path) -> None:
        found = report(tmp_path, before="import mlx.core\n")
        assert "MLX was imported before" in found["warning"]
        assert found["name"] == blas.REFERENCE

    def test_the_number_of_threads_can_be_changed_between_products(self, tmp_path: Path) -> None:
        then = (
            f"{PRODUCTS}\nimport ctypes, os\n"
            "library = ctypes.CDLL(str(next(Path(sys.argv[1]).glob('*.so'))), mode=os.RTLD_NOLOAD)\n"
            "count = library['scipy_openblas_get_num_threads']\n"
            "assert count() == 1, count()\n"
            "report.set_threads(2)\n"
            "assert count() == 2, count()\n" + PRODUCTS
        )
        report(tmp_path, threads=1, then=then)


def test_elsewhere_the_device_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.prepare(4, tmp_path) == blas.BlasReport(blas.DEVICE)
    assert blas.which_blas() == blas.DEVICE
    assert not any(tmp_path.iterdir())


def test_a_report_reads_as_a_phrase() -> None:
    assert str(blas.BlasReport("OpenBLAS 0.3", 4)) == "OpenBLAS 0.3, up to 4 threads"
    assert str(blas.BlasReport(blas.REFERENCE)) == "reference BLAS"


# How many threads ---------------------------------------------------------------------------------------------------


def group(root: Path, name: str, limit: str) -> None:
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / name / "cpu.max").write_text(limit)


@pytest.mark.parametrize(
    ("limit", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("50000 100000", 0.5), ("", None), ("1 0", None)]
)
def test_a_containers_quota(tmp_path: Path, limit: str, cores: float | None) -> None:
    group(tmp_path, ".", limit)
    assert blas.cpu_quota(tmp_path, tmp_path / "none") == cores


def test_the_tightest_group_on_the_way_counts(tmp_path: Path) -> None:
    group(tmp_path, "system.slice", "400000 100000")
    group(tmp_path, "system.slice/treadle.service", "max 100000")
    group(tmp_path, "user.slice", "100000 100000")
    membership = tmp_path / "membership"
    membership.write_text("1:name=x:/user.slice\n0::/system.slice/treadle.service\n")
    assert blas.cpu_quota(tmp_path, membership) == 4.0


def test_a_group_outside_the_namespace_is_not_followed(tmp_path: Path) -> None:
    group(tmp_path / "root", ".", "max 100000")
    group(tmp_path, ".", "100000 100000")
    membership = tmp_path / "membership"
    membership.write_text("0::/../\n")
    assert blas.cpu_quota(tmp_path / "root", membership) is None


def test_the_older_kind_of_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("250000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert blas.cpu_quota(tmp_path, tmp_path / "none") == 2.5
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert blas.cpu_quota(tmp_path, tmp_path / "none") is None


def test_two_hardware_threads_are_one_core(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,4", "1,5", "2,6", "3,7"] * 2):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(siblings)
    assert blas.physical_cores(range(8), tmp_path) == 4
    assert blas.physical_cores({0, 4, 5}, tmp_path) == 2
    assert blas.physical_cores(range(3), tmp_path / "none") == 3


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (2.0, 2), (2.9, 2), (0.5, 1), (64.0, 8)])
def test_default_threads_stay_within_cores_and_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(blas, "physical_cores", lambda cpus: len(cpus) // 2)
    monkeypatch.setattr(blas, "cpu_quota", lambda: quota)
    assert blas.default_threads() == threads
