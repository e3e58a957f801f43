"""The scripts in `benchmarks/` that make servers comparable: what they write, and the lines they print."""

from __future__ import annotations

import json
import shlex
import struct
import sys
from pathlib import Path

import pytest
from benchmarks import comparable, peers, tiny_model

from tests.support.tiny import EOS, IM_END, make_tiny
from treadle.bench.servers import split_environment, with_port
from treadle.models import folder_checks, safetensors_file


def run(monkeypatch: pytest.MonkeyPatch, main: object, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    assert callable(main)
    main()


# tiny_model.py


def test_the_tiny_model_says_printable_ascii_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from treadle.runner.loading.loader import load
    from treadle.runner.model_runner import ModelRunner

    from ..runner.drive import Drive
    from ..runner.test_model_runner import submit

    run(monkeypatch, tiny_model.main, str(tmp_path / "tiny"))
    runner = ModelRunner(load(tmp_path / "tiny"))
    said = Drive(runner, [submit(str(i), (i, 7, 9), 60) for i in range(4)]).run()
    tokens = {token for row in said.values() for token in row}
    assert tokens <= set(tiny_model.PRINTABLE)
    assert len(tokens) > 20


def test_a_folder_that_is_there_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(SystemExit, match="is there already"):
        run(monkeypatch, tiny_model.main, str(tmp_path))
    with pytest.raises(SystemExit, match="is there already"):
        run(monkeypatch, comparable.main, str(make_tiny(tmp_path / "tiny")), str(tmp_path / "tiny"))


# comparable.py


def test_bfloat16_weights_become_the_same_numbers_in_float32(tmp_path: Path) -> None:
    kinds = {"a": ("BF16", (2, 3)), "b": ("I32", (1,)), "c": ("BF16", (1,))}
    halves = [0x3F80, 0xC000, 0x0000, 0x7F80, 0x3DCC, 0x0001]  # 1, -2, 0, infinity, about 0.1, the smallest
    data = {"a": struct.pack("<6H", *halves), "b": struct.pack("<i", 7), "c": struct.pack("<H", 0x4040)}
    safetensors_file.write(tmp_path / "in", kinds, {name: [value] for name, value in data.items()})
    comparable.as_float32(tmp_path / "in", tmp_path / "out")
    header = safetensors_file.read_header(tmp_path / "out")
    assert {name: (t.dtype, t.shape) for name, t in header.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("I32", (1,)),
        "c": ("F32", (1,)),
    }
    whole = (tmp_path / "out").read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    assert whole[start:] == struct.pack("<6I", *(half << 16 for half in halves)) + data["b"] + struct.pack("<f", 3.0)


def test_an_endless_copy_ends_at_a_token_without_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny", added=("<think>", "<unused7>"))
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 2], "stop_strings": ["User:"], "top_k": 3}')
    run(monkeypatch, comparable.main, str(model), str(tmp_path / "endless"), "--endless")
    config = folder_checks.check(tmp_path / "endless")
    assert config["eos_token_id"] not in (EOS, IM_END)
    assert json.loads((tmp_path / "endless" / "generation_config.json").read_text()) == {
        "eos_token_id": config["eos_token_id"],
        "top_k": 3,
    }
    tokenizer = json.loads((tmp_path / "endless" / "tokenizer_config.json").read_text())
    assert tokenizer["eos_token"] == "<unused7>"
    assert (tmp_path / "endless" / "model.safetensors").resolve() == model / "model.safetensors"
    assert folder_checks.check(model)["eos_token_id"] == [EOS, IM_END]  # the model itself is left as it was


# peers.py


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As if the peers were installed."""
    monkeypatch.setattr(peers, "PEERS", tmp_path / "peers")
    for peer in peers.PEERS_BY_NAME.values():
        program = tmp_path / "peers" / peer.folder / "bin" / peer.program
        program.parent.mkdir(parents=True, exist_ok=True)
        program.touch()
        program.with_name("python").touch()
    return make_tiny(tmp_path / "a model")


@pytest.mark.parametrize("name", peers.PEERS_BY_NAME)
def test_a_command_is_one_that_bench_run_can_start(installed: Path, name: str) -> None:
    line, port = with_port(peers.command(peers.PEERS_BY_NAME[name], installed, ["LD_PRELOAD=lib.so"]))
    variables, words = split_environment(shlex.split(line))
    assert variables["LD_PRELOAD"] == "lib.so"
    assert Path(words[0]).is_file()
    assert str(installed) in words
    assert words[-2:] == ["--port", str(port)]
    assert ("--continuous-batching" in words) == (name == "vllm-mlx-batched")


def test_what_is_missing_is_named_with_its_fix(installed: Path, tmp_path: Path) -> None:
    peer = peers.PEERS_BY_NAME["mlx-lm"]
    with pytest.raises(SystemExit, match="is not a model folder"):
        peers.command(peer, tmp_path, ())
    (peers.PEERS / "mlx-lm" / "bin" / "mlx_lm.server").unlink()
    with pytest.raises(SystemExit, match=r"peers\.py install mlx-lm"):
        peers.command(peer, installed, ())
