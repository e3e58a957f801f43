"""`treadle connect` in home folders of its own: what it prints, writes, keeps and refuses."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.connect.conftest import ListsModels
from treadle.cli import app, connect
from treadle.cli.connect import command, files, jsonc
from treadle.cli.connect.clients import CLIENTS
from treadle.cli.connect.errors import ConnectError
from treadle.cli.connect.server import Server
from treadle.errors import ConfigError

KEY = "sk-very-secret"
WITH_FILES = [name for name, client in CLIENTS.items() if client.setup(Server("http://h", "m")).files]


def run(*arguments: str) -> int:
    code = app.app(["connect", *arguments], standalone_mode=False)
    return int(code or 0)


def of(home: Path) -> dict[str, bytes]:
    """The files below a home folder, without backups."""
    found = (path for path in home.rglob("*") if path.is_file() and ".bak-" not in path.name)
    return {str(path.relative_to(home)): path.read_bytes() for path in found}


def backups(home: Path) -> list[Path]:
    return sorted(home.rglob("*.bak-*"))


def write(name: str, server: ListsModels, *more: str) -> int:
    return run(name, "--url", server.url, "--write", "--yes", *more)


# What each client gets


def test_claude_reads_a_file_of_its_own(home: Path, server: ListsModels, capsys: pytest.CaptureFixture[str]) -> None:
    (home / ".claude").mkdir()
    (home / ".claude/settings.json").write_text('{"model": "opus"}')
    assert write("claude", server) == 0
    env = json.loads((home / ".claude/treadle.json").read_text())["env"]
    assert env["ANTHROPIC_BASE_URL"] == server.url
    assert env["ANTHROPIC_MODEL"] == "org/model"
    assert env["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert (env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"], env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == ("65536", "16384")
    assert (home / ".claude/settings.json").read_text() == '{"model": "opus"}'
    assert "claude --settings ~/.claude/treadle.json" in capsys.readouterr().out


def test_codex_gets_a_profile(home: Path, server: ListsModels) -> None:
    server.cards = [{"id": 'odd "näme"\\', "max_model_len": 9}]
    assert write("codex", server) == 0
    assert tomllib.loads((home / ".codex/treadle.config.toml").read_text()) == {
        "model": 'odd "näme"\\',
        "model_provider": "treadle",
        "model_context_window": 9,
        "model_providers": {"treadle": {"name": "Treadle", "base_url": f"{server.url}/v1", "wire_api": "responses"}},
    }


def test_opencode_keeps_its_comments_and_other_providers(home: Path, server: ListsModels) -> None:
    path = home / ".config/opencode/opencode.jsonc"
    path.parent.mkdir(parents=True)
    path.write_text('{\n  // mine\n  "model": "x/y",\n  "provider": {"x": {"npm": "n"}},\n}\n')
    assert write("opencode", server) == 0
    text = path.read_text()
    assert "// mine" in text
    data: Any = jsonc.parse(text).value
    assert data["model"] == "x/y"
    assert data["provider"]["x"] == {"npm": "n"}
    assert data["provider"]["treadle"]["options"] == {"baseURL": f"{server.url}/v1", "apiKey": "none"}
    assert data["provider"]["treadle"]["models"]["org/model"]["limit"] == {"context": 65536, "output": 16384}


def test_zed_gets_a_provider_whose_key_is_in_the_environment(home: Path, server: ListsModels) -> None:
    server.key = KEY
    assert write("zed", server, "--api-key", KEY) == 0
    data = json.loads((home / ".config/zed/settings.json").read_text())
    provider = data["language_models"]["openai_compatible"]["treadle"]
    assert provider["api_url"] == f"{server.url}/v1"
    assert provider["available_models"][0]["max_tokens"] == 65536
    assert KEY not in str(of(home))


def test_continue_and_llm_get_an_entry_in_their_lists(home: Path, server: ListsModels) -> None:
    path = home / ".continue/config.yaml"
    path.parent.mkdir()
    path.write_text("name: Mine # yes\nmodels:\n- name: Other\n  provider: ollama\n")
    assert write("continue", server) == 0
    assert "# yes" in path.read_text()
    models = yaml.safe_load(path.read_text())["models"]
    assert [model["name"] for model in models] == ["Other", "Treadle"]
    assert models[1]["defaultCompletionOptions"] == {"contextLength": 65536, "maxTokens": 16384}
    assert write("llm", server) == 0
    (entry,) = yaml.safe_load((home / ".config/io.datasette.llm/extra-openai-models.yaml").read_text())
    assert (entry["model_id"], entry["model_name"], entry["api_base"]) == ("treadle", "org/model", f"{server.url}/v1")


def test_qwen_has_one_entry_however_often_the_model_changes(home: Path, server: ListsModels) -> None:
    for name in ("one", "two"):
        server.cards = [{"id": name, "max_model_len": 100}]
        assert write("qwen", server) == 0
    data = json.loads((home / ".qwen/settings.json").read_text())
    (entry,) = data["modelProviders"]["openai"]
    assert (entry["id"], entry["name"], entry["envKey"]) == ("two", "Treadle", "TREADLE_API_KEY")


def test_aiders_files_are_valid_yaml_and_json(home: Path, server: ListsModels) -> None:
    assert write("aider", server) == 0
    settings = yaml.safe_load((home / ".aider.treadle.conf.yml").read_text())
    assert settings["model"] == "openai/org/model"
    card = json.loads(Path(settings["model-metadata-file"]).read_text())["openai/org/model"]
    assert (card["max_input_tokens"], card["max_output_tokens"]) == (65536, 16384)


# Rules for all of them


@pytest.mark.parametrize("name", WITH_FILES)
def test_a_second_write_changes_nothing_and_a_removal_restores_the_home(
    name: str, home: Path, server: ListsModels, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(name, server) == 0
    once = of(home)
    assert once
    assert not backups(home)
    capsys.readouterr()
    assert write(name, server) == 0
    assert of(home) == once
    assert "is connected" in capsys.readouterr().err
    assert run(name, "--remove", "--yes") == 0
    assert not any(b"127.0.0.1" in text or b"org/model" in text for text in of(home).values())
    assert backups(home)
    assert run(name, "--remove", "--yes") == 0
    assert "nothing was removed" in capsys.readouterr().err


@pytest.mark.parametrize("name", WITH_FILES)
@pytest.mark.parametrize("written", [False, True])
def test_the_key_is_written_only_on_demand(name: str, written: bool, home: Path, server: ListsModels) -> None:
    server.key = KEY
    assert write(name, server, "--api-key", KEY, *(["--write-key"] if written else [])) == 0
    holders = [home / path for path, text in of(home).items() if KEY.encode() in text]
    if not written or name in ("zed", "llm"):  # which read no key from these files
        assert not holders
    else:
        assert holders
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in holders)


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("needs_key", [False, True])
def test_nothing_is_written_without_write(
    name: str, needs_key: bool, home: Path, server: ListsModels, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = KEY if needs_key else ""
    assert run(name, "--url", f"{server.url}/v1/", *(["--api-key", KEY] if needs_key else [])) == 0
    shown = capsys.readouterr().out
    assert str(server.server_port) in shown
    assert KEY not in shown
    assert not of(home)


@pytest.mark.parametrize("name", ["copilot", "openwebui"])
def test_a_client_without_a_file_has_nothing_to_write(name: str, home: Path, server: ListsModels) -> None:
    with pytest.raises(ConfigError, match="has no settings file to write"):
        write(name, server)


def test_all_clients_are_listed_with_their_state(
    home: Path, server: ListsModels, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert write("zed", server) == 0
    (home / ".codex").mkdir()
    capsys.readouterr()
    assert run() == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows.keys() >= CLIENTS.keys()
    assert rows["zed"].split()[1:4] == ["Zed", "yes", "yes"]
    assert rows["codex"].split()[1:4] == ["Codex", "yes", "-"]
    assert rows["llm"].split()[1:4] == ["llm", "-", "-"]
    assert str(home / ".config/zed/settings.json") in rows["zed"]


# The server


def test_without_a_server_the_model_can_be_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConnectError, match=r"no server answers at http://127.0.0.1:9 .*serve MODEL.*--url.*--model"):
        run("claude", "--url", "127.0.0.1:9")
    assert run("claude", "--url", "127.0.0.1:9", "--model", "m") == 0
    assert "MAX_OUTPUT" not in capsys.readouterr().out


def test_a_server_with_a_key_says_how_to_give_it(home: Path, server: ListsModels) -> None:
    server.key = KEY
    with pytest.raises(ConnectError, match="needs an API key: set TREADLE_API_KEY"):
        run("claude", "--url", server.url)
    with pytest.raises(ConnectError, match="refuses this API key"):
        run("claude", "--url", server.url, "--api-key", "wrong")
    assert run("opencode", "--url", server.url, "--model", "m", "--write", "--yes") == 0
    assert "{env:TREADLE_API_KEY}" in (home / ".config/opencode/opencode.json").read_text()


@pytest.mark.parametrize(
    ("cards", "status", "arguments", "says"),
    [
        ([], 200, (), "lists no model"),
        ([{"id": "a"}, {"id": "b"}], 200, ("--model", "c"), "does not serve 'c': it serves a, b"),
        ([1, {"no": 1}], 200, (), "lists no model"),
        ([], 404, (), "answered with status 404"),
    ],
)
def test_an_odd_server_is_named(
    cards: Any, status: int, arguments: tuple[str, ...], says: str, home: Path, server: ListsModels
) -> None:
    server.cards, server.status = cards, status
    with pytest.raises(ConnectError, match=says):
        run("codex", "--url", server.url, *arguments)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"\0\0\x12\x04\0\0\0\0\0\0\x03\x7f", "answers, but not as an HTTP server .* its gRPC port"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000, "answers, but not as an HTTP server"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "/v1/models answers with no list of models"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"data": 5}', "/v1/models answers with no list of models"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 200_000, "/v1/models answers with no list of models"),
    ],
)
def test_what_is_no_server_of_models_is_named(raw: bytes, says: str, home: Path, server: ListsModels) -> None:
    server.raw = raw
    with pytest.raises(ConnectError, match=f"{server.url}.*{says}"):
        run("codex", "--url", server.url)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h/?a=1", "h:99999", "h:x", "http://[::1", "a b"])
def test_a_url_that_is_none_is_refused(url: str, home: Path) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        run("codex", "--url", url)


@pytest.mark.parametrize(
    ("context", "warned"), [(8192, "will be refused"), (30_000, "little is left"), (131_072, ""), (None, "")]
)
def test_a_small_context_is_warned_of(
    context: int | None, warned: str, home: Path, server: ListsModels, capsys: pytest.CaptureFixture[str]
) -> None:
    server.cards = [{"id": "m", "max_model_len": context}]
    assert write("claude", server) == 0
    shown = capsys.readouterr().err
    assert ("Warning" in shown) == bool(warned)
    assert warned in shown


@pytest.mark.parametrize(
    ("state", "warned"),
    [
        ({"capabilities": {"embedding": {"only": True, "dimensions": 8}}}, True),
        ({"capabilities": {"embedding": {"dimensions": 8}}}, False),
        ({"capabilities": None}, False),
        ({}, False),
        ([], False),
    ],
)
@pytest.mark.parametrize("name", ["claude", "zed", "copilot"])
def test_a_model_of_embeddings_alone_is_warned_of(
    name: str, state: Any, warned: bool, home: Path, server: ListsModels, capsys: pytest.CaptureFixture[str]
) -> None:
    server.state = state
    assert run(name, "--url", server.url) == 0
    shown = [capsys.readouterr().err]
    if name in WITH_FILES:
        assert write(name, server) == 0
        shown.append(capsys.readouterr().err)
    assert [("org/model makes embeddings" in text) for text in shown] == [warned] * len(shown)


# Files as people have them


ZED = ".config/zed/settings.json"


def existing(home: Path, text: str, path: str = ZED) -> Path:
    file = home / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("path", "name", "text", "says"),
    [
        (ZED, "zed", '{"a": ', "line 1 has the end of the file"),
        (ZED, "zed", "[]", "it is no object"),
        (ZED, "zed", '{"language_models": []}', "language_models is no object"),
        (
            ZED,
            "zed",
            '{"language_models": {"openai_compatible": {"treadle": {"available_models": {}}}}}',
            "available_models is no list",
        ),
        (".qwen/settings.json", "qwen", '{"modelProviders": {"openai": {}}}', "modelProviders.openai is no list"),
        (".continue/config.yaml", "continue", "models: [{name: a}]\n", "its list is in brackets"),
        (".continue/config.yaml", "continue", "a: [\n", "line 2"),
    ],
)
def test_a_file_that_can_not_be_changed_stays_and_what_to_add_is_printed(
    path: str, name: str, text: str, says: str, home: Path, server: ListsModels, capsys: pytest.CaptureFixture[str]
) -> None:
    file = existing(home, text, path)
    with pytest.raises(ConnectError) as error:
        write(name, server)
    assert str(file) in error.value.message
    assert says in error.value.message
    assert f"{server.url}/v1" in capsys.readouterr().out
    assert file.read_text() == text
    assert not backups(home)


def test_a_file_of_another_encoding_or_of_many_megabytes_is_refused(home: Path, server: ListsModels) -> None:
    file = existing(home, "")
    file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConnectError, match="not UTF-8"):
        write("zed", server)
    file.write_bytes(b" " * (5 << 20))
    with pytest.raises(ConnectError, match="larger than any settings file"):
        write("zed", server)


@pytest.mark.parametrize(("mode", "told"), [(0o644, True), (0o640, True), (0o600, False)])
def test_a_key_in_a_file_that_others_can_read_is_told(
    mode: int, told: bool, home: Path, server: ListsModels, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = KEY
    file = existing(home, "", ".codex/treadle.config.toml")
    file.chmod(mode)
    assert write("codex", server, "--api-key", KEY, "--write-key") == 0
    assert KEY in file.read_text()
    assert (f"Warning: {file} holds the key" in capsys.readouterr().err) is told


def test_mode_and_symlink_stay_and_the_backup_has_the_old_text(home: Path, server: ListsModels) -> None:
    real = existing(home, '{"theme": "x"}\n', "dotfiles/zed.json")
    real.chmod(0o640)
    link = home / ZED
    link.parent.mkdir(parents=True)
    link.symlink_to(real)
    assert write("zed", server) == 0
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert json.loads(real.read_text())["theme"] == "x"
    (backup,) = backups(home)
    assert backup.parent == real.parent
    assert backup.read_text() == '{"theme": "x"}\n'
    assert stat.S_IMODE(backup.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("modalities", "told"), [(["text", "image"], True), (["text"], False), (None, False), (5, False)]
)
def test_a_client_is_told_whether_the_model_reads_images(
    home: Path, server: ListsModels, modalities: Any, told: bool
) -> None:
    existing(home, "{}")
    server.cards = [{"id": "m", "max_model_len": 9, "modalities": modalities}]
    assert write("zed", server) == 0
    (model,) = json.loads((home / ZED).read_text())["language_models"]["openai_compatible"]["treadle"][
        "available_models"
    ]
    assert model["capabilities"]["images"] is told


def test_two_backups_of_one_second_have_two_names(home: Path, server: ListsModels) -> None:
    existing(home, "{}")
    for context in (1, 2, 3):
        server.cards = [{"id": "m", "max_model_len": context}]
        assert write("zed", server) == 0
    assert len(backups(home)) == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_can_not_be_written_is_named(home: Path, server: ListsModels) -> None:
    file = existing(home, "{}")
    file.parent.chmod(0o500)
    with pytest.raises(ConnectError, match=r"can't write .*Permission denied"):
        write("zed", server)
    assert file.read_text() == "{}"


def test_a_failed_write_leaves_the_old_text_and_no_temporary_file(
    home: Path, server: ListsModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = existing(home, "{}")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConnectError, match=r"can't write .*No space left"):
        write("zed", server)
    assert file.read_text() == "{}"
    assert [path for path in file.parent.iterdir() if ".bak-" not in path.name] == [file]


def test_a_file_that_changed_meanwhile_is_not_overwritten(home: Path) -> None:
    file = existing(home, "new")
    with pytest.raises(ConnectError, match="changed by another program"):
        files.write(files.Change(file, "old", "mine"))
    assert file.read_text() == "new"


def test_a_folder_in_the_files_place_is_named(home: Path, server: ListsModels) -> None:
    (home / ZED).mkdir(parents=True)
    with pytest.raises(ConnectError, match=r"can't read .*Is a directory"):
        write("zed", server)


# Asking


def test_without_a_terminal_it_does_not_write(
    home: Path, server: ListsModels, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="give --yes"):
        run("codex", "--url", server.url, "--write")
    assert '+model = "org/model"' in capsys.readouterr().out
    assert not of(home)


def test_no_is_an_answer(home: Path, server: ListsModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_confirmed", lambda question: False)
    assert command.connect(CLIENTS["codex"], Server(server.url, "m"), yes=False) == 1
    assert not of(home)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nothing",), "no client is called 'nothing': choose from claude"),
        (("codex", "--write", "--remove"), "exclude each other"),
        (("--write",), "which client?"),
        (("codex", "--write-key"), "--write-key needs the key"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: tuple[str, ...], says: str, home: Path) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        run(*arguments)


def test_the_shell_completes_clients(home: Path) -> None:
    code = "import sys; sys.argv[0] = 'treadle'; from treadle.cli import main; main()"
    env = {**os.environ, "_TREADLE_COMPLETE": "complete_bash", "COMP_WORDS": "treadle connect co", "COMP_CWORD": "2"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert ran.stdout.split() == ["codex", "copilot", "continue"]
    assert connect._names("z") == ["zed"]
