"""What the composition root hands on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLTokenizer

from tests.support.aio import in_loop
from tests.support.eagle_models import make_eagle
from tests.support.tiny import make_tiny
from treadle import installation
from treadle.compose.checks import require_grpc, require_installed
from treadle.compose.owner import owner_of, owner_spec, runner_factory
from treadle.compose.waiting import in_background
from treadle.config import Settings
from treadle.errors import ModelError, StartFailed
from treadle.grammar.vocabulary import VocabularyThread
from treadle.installation import Problem
from treadle.models.folder import ModelFolder, Source
from treadle.runner.loading.draft import DraftModel

GIVEN: dict[str, Any] = {
    "context": 77,
    "memory": 2**30,
    "prefix_cache": False,
    "kv_bits": 4,
    "max_running": 3,
    "structured": "off",
    "speculate": "lookup",
}
TOKENS = {"<eos>": 0, "a": 1, "b": 2}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": 0,
            "content": "<eos>",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    ],
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": TOKENS, "merges": []},
}


@in_loop
async def test_a_background_task_that_fails_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise ArithmeticError("gone")

    left = in_background(asyncio.sleep(100), "treadle-left", "what is left")
    await asyncio.wait([in_background(fails(), "treadle-made-up", "following the made-up file")])
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    (line,) = caplog.records
    assert line.getMessage().startswith("following the made-up file has failed, and stays away until")
    assert line.exc_info is not None


def test_what_settings_say_of_the_cache_reaches_the_runner_in_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: dict[str, Any] = {}
    monkeypatch.setattr("treadle.runner.device.blas.prepare", lambda threads: None)
    monkeypatch.setattr("treadle.runner.build.build", lambda folder, **given: built.update(given))
    monkeypatch.setattr("treadle.telemetry.logs.configure", lambda *given: None)
    spec = owner_spec(Settings(**GIVEN), ModelFolder(tmp_path, "m", Source.FOLDER, {}))
    crossed = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(spec)))
    factory, limits = owner_of(crossed)
    factory(lambda stage: None)
    assert {name: built[name] for name in GIVEN if name != "structured"} == {
        k: v for k, v in GIVEN.items() if k != "structured"
    }
    assert limits.max_running == 3
    assert (built["vocabulary"], built["draft"]) == (None, None), "structured is off"


def test_a_draft_model_is_checked_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: dict[str, Any] = {}
    monkeypatch.setattr("treadle.runner.device.blas.prepare", lambda threads: None)
    monkeypatch.setattr("treadle.runner.build.build", lambda folder, **given: built.update(given))
    target, draft = make_tiny(tmp_path / "target"), make_tiny(tmp_path / "draft", seed=1)

    def build(folder: Path) -> None:
        drafting = ModelFolder(folder, "owner/draft", Source.HUB, {})
        spec = owner_spec(Settings(structured="off"), ModelFolder(target, "m", Source.FOLDER, {}, drafting))
        runner_factory(msgspec.json.decode(msgspec.json.encode(spec), type=type(spec)))(lambda stage: None)

    build(draft)
    assert built["draft"] == DraftModel(draft, "owner/draft")
    with pytest.raises(ModelError, match="draft other has other tokens than target: id 261") as caught:
        build(make_tiny(tmp_path / "other", added=("<think>",)))
    assert caught.value.param == "draft"
    (draft / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match=r"draft can't be used: .*torn"):
        build(draft)
    build(head := make_eagle(tmp_path / "head"))
    assert built["draft"] == DraftModel(head, "owner/draft", is_head=True)
    (head / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match=r"draft can't be used: .*torn"):
        build(head)


def test_a_start_that_fails_leaves_no_thread_that_reads_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, ended = threading.Event(), threading.Event()

    def read() -> LLTokenizer:
        assert goes_on.wait(60)
        time.sleep(0.01)
        ended.set()
        raise ModelError("not needed any more")

    def refuse(threads: int | None) -> None:
        goes_on.set()
        raise StartFailed("no BLAS")

    monkeypatch.setattr("treadle.compose.owner.begin_vocabulary", lambda folder: VocabularyThread(read))
    monkeypatch.setattr("treadle.runner.device.blas.prepare", refuse)
    settings = Settings(**{**GIVEN, "structured": "auto"})
    with pytest.raises(StartFailed, match="no BLAS"):
        runner_factory(owner_spec(settings, ModelFolder(tmp_path, "m", Source.FOLDER, {})))(lambda stage: None)
    assert ended.is_set()


def test_the_vocabulary_is_read_beside_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the logits' size, the stop tokens and the tokens of tokenizer_config.json."""
    built: dict[str, Any] = {}
    monkeypatch.setattr("treadle.runner.device.blas.prepare", lambda threads: None)
    monkeypatch.setattr("treadle.runner.build.build", lambda folder, **given: built.update(given))
    declared = {"added_tokens_decoder": {"3": {"content": "<call>", "special": True}}}
    files = {"config": {"vocab_size": 9, "eos_token_id": [0, 2]}, "tokenizer_config": declared, "tokenizer": TOKENIZER}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(content))
    runner_factory(owner_spec(Settings(), ModelFolder(tmp_path, "m", Source.FOLDER, {})))(lambda stage: None)
    tokenizer = built["vocabulary"].result()
    assert tokenizer.vocab_size == 9
    assert tokenizer.eos_tokens == [0, 2]
    assert tokenizer.is_special_token(3)


def test_an_engine_process_imports_neither_transformers_nor_pytorch(tmp_path: Path) -> None:
    """mlx-lm imports the first for its tokenizers, and that the second. What is not loaded can't be used."""
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')")
    information = tmp_path / "torch-2.9.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")
    spec = owner_spec(Settings(**GIVEN), ModelFolder(tmp_path, "m", Source.FOLDER, {}))
    program = (
        "import json, sys; from treadle.compose.owner import owner_of; owner_of(json.loads(sys.argv[1]));"
        "from treadle.runner.mlxlm import connect; connect();"
        "from mlx_lm.tokenizer_utils import load\n"
        "try: load(__import__('pathlib').Path('.'))\n"
        "except AttributeError as error: assert 'from_pretrained' in str(error), error\n"
        "else: raise SystemExit('a tokenizer was made of nothing')"
    )
    command = [sys.executable, "-c", program, msgspec.json.encode(spec).decode()]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_everything_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is fetched: MLX, the demo and the gateway, with one command for all three."""
    told = "{} is missing"
    monkeypatch.setattr(installation, "blocking_problem", lambda: Problem(told.format("MLX"), "a", extra="cpu"))
    monkeypatch.setattr(
        "treadle.models.demo.missing_packages", lambda: Problem(told.format("the demo"), "b", extra="demo")
    )
    monkeypatch.setattr("treadle.fleet.plan.missing_gateway", lambda: Problem(told.format("smg"), "c", extra="fleet"))
    monkeypatch.setattr("treadle.installation.backend.install_command", lambda *extras: f"get {extras}")
    with pytest.raises(StartFailed) as caught:
        require_installed("demo", gateway=True)
    said = "MLX is missing, the demo is missing, smg is missing: get ('cpu', 'demo', 'fleet')"
    assert caught.value.message == said
    with pytest.raises(StartFailed, match=r"^MLX is missing: get \('cpu',\)$"):
        require_installed("owner/name")


def test_grpc_that_is_too_old_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    require_grpc()
    monkeypatch.setitem(sys.modules, "grpc_health.v1", None)  # an import raises
    monkeypatch.setattr("treadle.installation.grpc_packages.version_of", lambda name: "1.60.0")
    with pytest.raises(StartFailed, match=r"^grpcio 1\.60\.0 is installed and Treadle needs >=1\.81\.1: .*install"):
        require_grpc()


def test_what_is_installed_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.models.demo.missing_packages", lambda: None)
    require_installed("demo")
