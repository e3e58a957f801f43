"""What is read of the machine without MLX."""

from __future__ import annotations

import resource

import pytest

from treadle import installation
from treadle.cli import machine
from treadle.cli.findings import Finding, Mark
from treadle.installation import Problem
from treadle.runner.device.cgroups import Group


def test_every_finding_names_itself_and_nothing_fails_here() -> None:
    for finding in [*machine.system(), *machine.software()]:
        assert finding.name
        assert finding.value
        assert finding.mark is not Mark.FAIL


@pytest.mark.parametrize(
    ("groups", "shown"), [([], "GiB"), ([Group(1 << 20, 0, 0)], "limited to 1.0 MiB by its control group")]
)
def test_the_limit_of_a_control_group_is_shown(
    groups: list[Group], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "limited_groups", lambda: groups)
    (memory,) = [finding for finding in machine.system() if finding.name == "memory"]
    assert memory.value.endswith(shown)
    assert memory.facts["limit_bytes"] == (groups[0].limit if groups else None)


def mlx(monkeypatch: pytest.MonkeyPatch, problem: Problem | None) -> Finding:
    monkeypatch.setattr(installation, "package_problem", lambda: problem)
    return next(finding for finding in machine.software() if finding.name == "mlx")


def test_what_keeps_mlx_from_working_fails_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = mlx(monkeypatch, Problem("MLX is too old", "pip install mlx"))
    assert (found.mark, found.fix) == (Mark.FAIL, "pip install mlx")
    assert found.value.endswith(": MLX is too old")


def test_what_may_keep_mlx_from_working_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    found = mlx(monkeypatch, Problem("two builds", "remove one", certain=False))
    assert (found.mark, found.fix) == (Mark.WARN, "remove one")


def test_mlx_that_is_not_installed_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version_of", lambda name: None)
    monkeypatch.setattr(installation, "builds", dict)
    found = mlx(monkeypatch, Problem("MLX is not installed", "pip install mlx"))
    assert (found.value, found.mark) == ("MLX is not installed", Mark.FAIL)


def test_mlx_lm_that_is_not_installed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version_of", lambda name: None)
    found = next(finding for finding in machine.software() if finding.name == "mlx-lm")
    assert (found.value, found.mark) == ("not installed", Mark.FAIL)
    assert "install 'mlx-lm" in found.fix


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
    ("platform", "architecture", "mlx", "mark"),
    [
        ("darwin", "arm64", None, Mark.OK),
        ("darwin", "x86_64", None, Mark.FAIL),
        ("win32", "AMD64", None, Mark.FAIL),
        ("win32", "AMD64", "0.32.4", Mark.WARN),
    ],
)
def test_platforms_that_mlx_has_no_build_for_fail_unless_it_was_built_there(
    monkeypatch: pytest.MonkeyPatch, platform: str, architecture: str, mlx: str | None, mark: Mark
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("platform.machine", lambda: architecture)
    monkeypatch.setattr(machine, "version_of", lambda name: mlx)
    assert machine._platform().mark is mark
