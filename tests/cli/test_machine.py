"""What is read of the machine without MLX."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from treadle.cli import machine
from treadle.cli.findings import Finding, Mark, count, size


def test_every_finding_names_itself_and_nothing_fails_here() -> None:
    for finding in [*machine.system(), *machine.software()]:
        assert finding.name
        assert finding.value
        assert finding.mark is not Mark.FAIL


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "max\n", None),
        ("memory.max", "1048576\n", 1048576),
        ("memory/memory.limit_in_bytes", "4096\n", 4096),
    ],
)
def test_the_containers_memory_limit(tmp_path: Path, name: str, text: str, limit: int | None) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert machine.memory_limit(tmp_path) == limit


def test_without_a_container_there_is_no_limit(tmp_path: Path) -> None:
    assert machine.memory_limit(tmp_path) is None


def mlx(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> Finding:
    monkeypatch.setattr(machine, "version_of", versions.get)
    monkeypatch.setattr(machine, "_mlx_builds", lambda: sorted(versions.keys() - {"treadle", "mlx", "mlx-lm"}))
    return next(finding for finding in machine.software() if finding.name == "mlx")


def test_two_builds_of_mlx_beside_each_other_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    found = mlx(monkeypatch, {"treadle": "1", "mlx": "2", "mlx-lm": "3", "mlx-cpu": "2", "mlx-cuda-13": "2"})
    assert found.mark is Mark.WARN
    assert "pip uninstall mlx-cpu mlx-cuda-13" in found.fix


def test_mlx_without_a_build_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = mlx(monkeypatch, {"treadle": "1", "mlx": "2", "mlx-lm": "3"})
    assert found.mark is Mark.FAIL
    assert "treadle[cpu]" in found.fix


def test_a_build_of_another_version_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    found = mlx(monkeypatch, {"treadle": "1", "mlx": "2", "mlx-lm": "3", "mlx-metal": "1"})
    assert found.mark is Mark.WARN
    assert "mlx==2" in found.fix


def test_mlx_that_is_not_installed_fails_with_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    found = mlx(monkeypatch, {"treadle": "1", "mlx-lm": "3"})
    assert found.mark is Mark.FAIL
    assert "treadle[cuda]" in found.fix


def test_few_open_files_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 512))
    found = next(finding for finding in machine.system() if finding.name == "open files")
    assert found.mark is Mark.WARN
    assert "ulimit" in found.fix


def test_few_open_files_that_serve_may_raise_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, resource.RLIM_INFINITY))
    found = next(finding for finding in machine.system() if finding.name == "open files")
    assert found.mark is Mark.OK


@pytest.mark.parametrize(
    ("platform", "architecture", "mark"),
    [("darwin", "arm64", Mark.OK), ("darwin", "x86_64", Mark.FAIL), ("win32", "AMD64", Mark.FAIL)],
)
def test_platforms_that_mlx_has_no_build_for_fail(
    monkeypatch: pytest.MonkeyPatch, platform: str, architecture: str, mark: Mark
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("platform.machine", lambda: architecture)
    assert machine._platform().mark is mark


@pytest.mark.parametrize(("bytes_", "text"), [(0, "0 B"), (2048, "2 KiB"), (5 << 20, "5 MiB"), (3 << 29, "1.5 GiB")])
def test_sizes_for_people(bytes_: int, text: str) -> None:
    assert size(bytes_) == text


@pytest.mark.parametrize(("number", "text"), [(12, "12"), (95_000, "95 K"), (268e6, "268 M"), (8.03e9, "8.03 B")])
def test_counts_for_people(number: float, text: str) -> None:
    assert count(number) == text
