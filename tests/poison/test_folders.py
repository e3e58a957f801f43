"""Hostile model folders: each is refused in one line that names the cause, or served where it is harmless.

`benchmarks/folders.py` serves every one. Here one of each kind is served, and all that are found before anything is
loaded go through the check alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.poison.hostile import cases, spoil
from tests.poison.starts import start
from tests.support.tiny import make_tiny
from treadle.errors import ModelError
from treadle.models import folder_checks

CASES = cases()
CHECKED = [name for name, case in CASES.items() if case.get("by") == "check"]
SERVED = (
    "config-a-pipe",
    "auto-map",
    "tokenizer-model-unknown",
    "template-deep",
    "template-string-of-8-gb",
    "template-globals",
    "generation-config-nan",
    "hidden-size-minus-64",
    "rope-theta-nan",
    "pickle-beside",
)


@pytest.mark.parametrize("name", SERVED)
def test_served_as_a_user_does(name: str) -> None:
    assert not start(CASES[name]).wrong(CASES[name]), CASES[name]["why"]


@pytest.mark.parametrize("name", CHECKED)
def test_refused_before_anything_is_loaded(tmp_path: Path, name: str) -> None:
    folder = make_tiny(tmp_path / "model")
    spoil(folder, CASES[name])
    with pytest.raises(ModelError) as caught:
        folder_checks.check(folder)
    said = caught.value.message
    assert "\n" not in said
    assert not [word for word in CASES[name]["says"] if word not in said], said


def test_every_folder_says_what_is_wanted_of_it() -> None:
    assert len(CASES) >= 120
    for name, case in CASES.items():
        assert case["why"], name
        assert case.get("serves") or case["says"], name
    assert {"serves", "refused"} == {"serves" if CASES[name].get("serves") else "refused" for name in SERVED}
