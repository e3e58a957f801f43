"""What the doctor says of a model that is only on the hub: a stand-in on the loopback, which must send no weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_doctor import GOOD, Asked, report
from tests.support.hub import COMMIT, HubServer, files_of
from tests.support.tiny import make_tiny
from treadle.cli import doctor
from treadle.cli.device_probe import ProbeResult
from treadle.config import Settings
from treadle.models import fetch, hub, remote

MODEL = "owner/tiny"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub that everything here asks, and an empty cache."""
    content = files_of(make_tiny(tmp_path / "source", vocabulary_extra=4000))
    with HubServer(MODEL, content) as server:
        real = remote.list_files
        monkeypatch.setattr(
            remote, "list_files", lambda model, revision=None, endpoint=None: real(model, revision, server.url)
        )
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(fetch, "SHORT_RETRY_DELAYS_S", (0.0, 0.0))
        yield server


def model_section(capsys: pytest.CaptureFixture[str], **settings: Any) -> tuple[int, Any]:
    parts = {name: part for name, part in GOOD.items() if name != "text"}  # a sketch has no tokenizer to ask
    code, plain = report(capsys, Asked(ProbeResult(parts)), MODEL, **settings)
    return code, plain["sections"]["Model"]


def reconfigure(server: HubServer, **changed: object) -> None:
    server.files["config.json"] = json.dumps({**json.loads(server.files["config.json"]), **changed}).encode()


def test_a_model_is_judged_by_the_real_probe_without_its_weights(
    server: HubServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert doctor.run(Settings(model=MODEL), check=False, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)["sections"]["Model"]
    assert found["model"]["fix"] == "treadle pull owner/tiny"
    assert found["model"]["facts"] == {"name": MODEL, "source": "hub", "cached": False, "commit": COMMIT}
    weights = len(server.files["model.safetensors"])
    assert found["download"]["facts"]["total_bytes"] == sum(len(data) for data in server.files.values())
    assert found["would run"]["facts"]["architecture"] == "llama"
    assert abs(found["would run"]["facts"]["weight_bytes"] - weights) < 10_000  # the header
    assert found["would run"]["facts"]["path"] == "batched, KV cache in buffers a row"
    assert found["capacity"]["facts"]["token_bytes"] == 512
    assert found["tokenizer"]["mark"] == "ok"
    assert server.ranges("model.safetensors") == ["bytes=0-131071"]
    assert not (tmp_path / "hub").exists()


def test_no_such_model(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    code, plain = report(capsys, Asked(), "owner/other")
    assert code == 1
    assert "no such model on the hub" in plain["sections"]["Model"]["model"]["value"]


def test_no_such_revision(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = model_section(capsys, revision="v9")
    assert (code, found["model"]["value"]) == (1, "owner/tiny has no revision v9")


def test_a_gated_model_says_how_to_get_it(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.token = "hf_other"
    code, found = model_section(capsys)
    assert code == 1
    assert "owner/tiny is gated: accept its terms" in found["model"]["value"]


def test_a_hub_that_is_down(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = 503
    code, found = model_section(capsys)
    assert (code, found["model"]["value"]) == (1, "the hub answers 503 for owner/tiny")


@pytest.mark.parametrize(
    ("name", "says"),
    [("m.gguf", "has its weights as GGUF only (m.gguf)"), ("pytorch_model.bin", "has its weights as a pickle")],
)
def test_weights_in_another_format(server: HubServer, capsys: pytest.CaptureFixture[str], name: str, says: str) -> None:
    del server.files["model.safetensors"]
    server.files[name] = b"x"
    code, found = model_section(capsys)
    assert code == 1
    assert says in found["model"]["value"]


def test_a_model_that_asks_to_run_code(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    reconfigure(server, auto_map={"AutoModel": "evil.Model"})
    code, found = model_section(capsys)
    assert code == 1
    assert found["model"]["value"].startswith("owner/tiny/config.json asks to run code")


def test_an_architecture_that_mlx_lm_does_not_know(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    reconfigure(server, model_type="no_such_model")
    code, found = model_section(capsys)
    assert code == 1
    assert 'mlx-lm has no model "no_such_model"' in found["model"]["value"]


def test_a_missing_template_only_warns(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.files["tokenizer_config.json"] = b"{}"
    code, found = model_section(capsys)
    assert (code, found["tokenizer"]["mark"]) == (0, "warn")


def test_too_little_disk(
    server: HubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "free_bytes", lambda folder: 1000)
    code, found = model_section(capsys)
    assert (code, found["download"]["mark"]) == (1, "fail")
    assert "HF_HOME" in found["download"]["fix"]


def test_what_is_here_already_is_counted(server: HubServer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = hub.download(MODEL, lambda line: None, cache_dir=tmp_path / "hub", endpoint=server.url)
    blob = (folder / "model.safetensors").resolve()
    (folder / "model.safetensors").unlink()
    blob.rename(blob.with_name(f"{blob.name}.incomplete"))
    code, found = model_section(capsys)
    facts = found["download"]["facts"]
    assert (code, facts["here_bytes"]) == (0, facts["total_bytes"])


def test_a_server_without_ranges_is_not_read_to_the_end(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.ignore_ranges = True
    assert model_section(capsys)[0] == 0
    assert server.sent["model.safetensors"] <= len(server.files["model.safetensors"])


def test_a_header_longer_than_the_first_piece_is_read_whole(
    server: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    data = server.files["model.safetensors"]
    length = int.from_bytes(data[:8], "little")
    longer = data[8 : 8 + length] + b" " * 200_000
    server.files["model.safetensors"] = len(longer).to_bytes(8, "little") + longer + data[8 + length :]
    assert model_section(capsys)[0] == 0
    assert server.ranges("model.safetensors")[1] == f"bytes=131072-{8 + len(longer) - 1}"


def test_weights_without_a_header_are_refused(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.files["model.safetensors"] = b"\xff" * 100
    code, found = model_section(capsys)
    assert (code, found["model"]["value"]) == (1, "owner/tiny: model.safetensors is not a safetensors file")
