"""What the composition root hands on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from treadle.compose import owner_of, owner_spec
from treadle.config import Settings
from treadle.models.folder import ModelFolder, Source

GIVEN: dict[str, Any] = {
    "context": 77,
    "memory": 2**30,
    "prefix_cache": False,
    "kv_bits": 4,
    "max_running": 3,
}


def test_what_settings_say_of_the_cache_reaches_the_runner_in_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: dict[str, Any] = {}
    monkeypatch.setattr("treadle.runner.blas.prepare", lambda threads: None)
    monkeypatch.setattr("treadle.runner.build.build", lambda folder, **given: built.update(given))
    monkeypatch.setattr("treadle.telemetry.logs.configure", lambda level, stream: None)
    spec = owner_spec(Settings(**GIVEN), ModelFolder(tmp_path, "m", Source.FOLDER, {}))
    crossed = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(spec)))
    factory, limits = owner_of(crossed)
    factory(lambda stage: None)
    assert {name: built[name] for name in GIVEN} == GIVEN
    assert limits.max_running == 3
