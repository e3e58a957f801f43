"""The first import of MLX, where it works and where it does not."""

from __future__ import annotations

import sys

import pytest

from treadle import installation
from treadle.errors import StartFailed
from treadle.installation import Problem
from treadle.runner.device import require_mlx

PROBLEM = Problem("MLX is broken", "mend it")


def test_mlx_that_works_is_used_and_nothing_said(caplog: pytest.LogCaptureFixture) -> None:
    require_mlx.require_mlx()
    assert caplog.text == ""


def test_mlx_that_works_all_the_same_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(installation, "package_problem", lambda: PROBLEM)
    assert require_mlx.try_mlx() is None
    assert caplog.messages == ["MLX works here, but MLX is broken; to mend that: mend it"]


def test_mlx_that_can_not_be_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.setattr(installation, "diagnose", lambda error: PROBLEM)
    with pytest.raises(StartFailed) as caught:
        require_mlx.require_mlx()
    assert caught.value.message == "MLX is broken: mend it"
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


@pytest.mark.parametrize("error", [RuntimeError("no device"), OSError("no library"), AttributeError("half of it")])
def test_mlx_that_can_not_compute_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def zeros(size: int) -> None:
        raise error

    import mlx.core as mx

    monkeypatch.setattr(mx, "zeros", zeros)
    with pytest.raises(StartFailed, match=f"^MLX can't be imported .{error}|^MLX can't compute on its device .{error}"):
        require_mlx.require_mlx()
