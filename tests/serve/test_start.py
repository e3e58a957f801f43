"""C1: listening first, ready only once the model works, and a failed start is one line and a non-zero exit."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import pytest

from tests.serve.conftest import Start, Tiny
from tests.serve.server import Serve, until
from tests.support.tiny import make_tiny


def failed(server: Serve) -> str:
    """The one line that a failed start ends with."""
    assert server.stopped(60) not in (0, None)
    said = server.said
    assert "Traceback" not in said
    assert "Ready" not in said
    (line,) = re.findall(r"^treadle: error: .*$", said, re.M)
    assert said.rstrip().endswith(line)
    server.childless()
    return line


def test_it_listens_before_the_model_is_loaded_and_is_ready_after(start: Start, tiny: Tiny) -> None:
    """C1, C4: live from the first moment; while it loads, ready and new requests are 503."""
    server = start(tiny("gemma3"))
    assert server.get("/health/live").status_code == 200
    early = server.get("/health/ready")
    assert (early.status_code, early.json()["state"]) == (503, "starting")
    refused = server.complete()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_unavailable"
    assert int(refused.headers["retry-after"]) >= 1
    assert server.get("/v1/status").json()["ready"] is False
    assert "Ready" not in server.said
    server.ready()
    assert server.complete().status_code == 200
    until("a person to be told", lambda: "Ready after" in server.said)


def test_a_folder_that_is_missing(start: Start, tmp_path: Path) -> None:
    assert "nowhere" in failed(start(tmp_path / "nowhere"))


def test_hosts_of_images_for_a_model_that_takes_none(start: Start, tiny: Tiny) -> None:
    """A setting that would do nothing."""
    line = failed(start(tiny("llama"), "--image-hosts", "images.example.com"))
    assert "--image-hosts would do nothing: the model reads text only" in line
    assert "leave it out" in line


def test_torn_weights(start: Start, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "torn")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    assert "torn" in failed(start(folder))


def test_an_unknown_architecture(start: Start, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "strange")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "perceptron"}))
    assert "perceptron" in failed(start(folder))


def stub(folder: Path, core: str) -> dict[str, str]:
    """The environment in which `mlx.core` is `core` instead of MLX."""
    (folder / "mlx").mkdir(parents=True)
    (folder / "mlx" / "__init__.py").write_text("")
    (folder / "mlx" / "core.py").write_text(core)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


NO_DRIVER = "raise ImportError('libcuda.so.1: cannot open shared object file')"
NO_SYMBOL = "raise ImportError('undefined symbol: _ZN3mlx')"
NO_DEVICE = "zeros = abs\ndef eval(x): raise RuntimeError('No Metal device found')"


@pytest.mark.parametrize(
    ("options", "core", "says"),
    [
        ((), NO_DRIVER, "needs NVIDIA's driver"),
        (("--in-process",), NO_SYMBOL, "install --force-reinstall --no-deps mlx=="),
        ((), NO_DEVICE, "can't compute on its device"),
        (("--in-process",), NO_DEVICE, "can't compute on its device"),
    ],
)
def test_mlx_that_does_not_work(
    start: Start, tiny: Tiny, tmp_path: Path, options: tuple[str, ...], core: str, says: str
) -> None:
    """C1: the cause and the cure in one line, whichever process the engine is in."""
    assert says in failed(start(tiny("gemma3"), *options, env=stub(tmp_path / "stub", core)))


def test_those_who_debug_get_the_traceback(start: Start, tiny: Tiny, tmp_path: Path) -> None:
    env = stub(tmp_path / "stub", "raise ImportError('no such symbol')")
    server = start(tiny("gemma3"), "--log-level", "debug", env=env)
    assert server.stopped(60) == 1
    assert "ImportError: no such symbol" in server.said


def test_a_context_longer_than_the_models(start: Start, tiny: Tiny) -> None:
    assert "context" in failed(start(tiny("gemma3"), "--context", "10000000"))


def test_a_port_in_use(start: Start, tiny: Tiny) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = failed(start(tiny("gemma3"), "--port", str(port)))
    assert str(port) in line
    assert "--port" in line


@pytest.mark.parametrize(("toml", "named"), [("port = ", "TOML"), ("prot = 1", "did you mean 'port'")])
def test_a_settings_file_that_is_wrong(start: Start, tiny: Tiny, tmp_path: Path, toml: str, named: str) -> None:
    file = tmp_path / "treadle.toml"
    file.write_text(toml)
    assert named in failed(start(tiny("gemma3"), "--config", str(file)))


def test_a_draft_model_with_other_tokens(start: Start, tiny: Tiny, tmp_path: Path) -> None:
    """Found on the owner, and told in the words of the command line."""
    other = make_tiny(tmp_path / "other", added=("<think>",))
    line = failed(start(tiny("gemma3"), "--draft", str(other)))
    assert line.startswith("treadle: error: --draft other has other tokens than gemma3: id 261 is '<think>' there")


def test_weights_that_are_not_the_models_and_no_answer_that_says_ready(start: Start, tmp_path: Path) -> None:
    """What only the engine's own load can find; asked all the way from listening to the exit."""
    folder = make_tiny(tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    server = start(folder)
    assert server.never_ready()
    reason = failed(server)
    assert "other" in reason
    assert server.said.count(reason.removeprefix("treadle: error: ")) == 1
