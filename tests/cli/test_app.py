"""The command line: options as settings have them, errors of one line, help without anything heavy."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.forked import ForkedCommand
from treadle.cli import app
from treadle.cli.foreign_options import CURES
from treadle.config import SIZES, Settings
from treadle.units import size

NOT_SETTINGS = {"config", "check", "brief", "as_json"}


def treadle(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a fresh interpreter, under the name it is installed as."""
    code = "import sys; sys.argv[0] = 'treadle'; from treadle.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **env})


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommand]:
    command = ForkedCommand(tmp_path_factory.mktemp("forked"))
    yield command
    command.close()


def _parameters(command: object) -> set[str]:
    return set(inspect.signature(command).parameters)  # type: ignore[arg-type]


def test_serve_has_an_option_for_every_setting_and_no_other() -> None:
    assert _parameters(app.serve) - NOT_SETTINGS == set(Settings.names())


def test_doctors_options_are_settings_too() -> None:
    assert _parameters(app.doctor) - NOT_SETTINGS <= set(Settings.names())


def test_every_option_is_spelled_like_its_setting() -> None:
    shown = treadle("serve", "--help", COLUMNS="200", TERM="dumb").stdout
    for name in Settings.names():
        assert name == "model" or f"--{name.replace('_', '-')} " in shown


def test_help_shows_the_defaults_that_settings_have() -> None:
    shown = " ".join(treadle("serve", "--help", COLUMNS="300", TERM="dumb").stdout.split())
    for field in Settings.fields().values():
        if field.default is not None and field.default is not False and field.default != ():
            value = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
            if field.name in SIZES and isinstance(field.default, int):
                value = size(field.default)
            assert f"Default: {value}." in shown, field.name


def test_options_that_nobody_gave_leave_the_files_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "treadle.toml"
    file.write_text('model = "here"\nport = 9\nmax-running = 3\n')
    seen: list[Settings] = []
    monkeypatch.setattr("treadle.cli.serve.run", lambda settings: seen.append(settings) or 0)
    app.app(["serve", "--config", str(file), "--port", "7"], standalone_mode=False)
    assert (seen[0].model, seen[0].port, seen[0].max_running, seen[0].host) == ("here", 7, 3, "127.0.0.1")


@pytest.mark.parametrize(
    ("arguments", "env", "hosts"),
    [
        ([], None, ("file.lan",)),
        ([], "", ("file.lan",)),
        ([], "a.lan,b.lan", ("a.lan", "b.lan")),
        ([], "a.lan b.lan", ("a.lan", "b.lan")),
        (["--allowed-host", "a.lan", "--allowed-host", "b.lan"], "c.lan", ("a.lan", "b.lan")),
    ],
)
def test_an_option_that_may_be_repeated_wins_over_the_environment_and_that_over_the_file(
    arguments: list[str], env: str | None, hosts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "treadle.toml"
    file.write_text('allowed-host = ["file.lan"]\n')
    if env is not None:
        monkeypatch.setenv("TREADLE_ALLOWED_HOST", env)
    monkeypatch.setenv("TREADLE_CORS_ORIGIN", "http://a.lan, app://b")
    seen: list[Settings] = []
    monkeypatch.setattr("treadle.cli.serve.run", lambda settings: seen.append(settings) or 0)
    app.app(["serve", "--config", str(file), *arguments], standalone_mode=False)
    assert (seen[0].allowed_host, seen[0].cors_origin) == (hosts, ("http://a.lan", "app://b"))


def test_the_caches_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr("treadle.cli.serve.run", lambda settings: seen.append(settings) or 0)
    for options in ([], ["--no-prefix-cache", "--kv-bits", "8", "--memory", "2GiB"]):
        app.app(["serve", *options], standalone_mode=False)
    assert [(s.prefix_cache, s.kv_bits, s.memory) for s in seen] == [(True, None, None), (False, 8, 2 * 2**30)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--prot", "3"], "--port"),
        (["serve", "--port", "x"], "'--port'"),
        (["serve", "--port", "99999"], ": --port must be 0 to 65535, not 99999"),
        (["serve", "--max-running", "0"], ": --max-running must be above 0, not 0"),
        (["serve", "--config", "/no/such.toml"], "can't read the settings file"),
        (["serve", "a", "b"], "unexpected extra argument"),
        (["srve"], "Did you mean 'serve'?"),
        (["serve", "--allowed-host", "http://mybox:8000"], "is no host name: give mybox"),
        (
            ["serve", "--cors-origin", "http://a.lan/"],
            ": --cors-origin 'http://a.lan/' is no origin: give http://a.lan",
        ),
        (["serve", "--host", "0.0.0.0"], "set TREADLE_API_KEY (or --api-key, or --api-keys), or give --no-auth"),
        (["serve", "--grpc-host", "::", "--grpc-port", "0"], "--grpc-no-auth"),
        (["serve", "--no-auth"], "--no-auth does nothing on 127.0.0.1"),
        (["serve", "--memory", "much"], ": --memory is not a size: 'much'"),
        (["serve", "--memory", "8"], ": --memory is 8 bytes: did you mean 8GiB?"),
        (["serve", "--memory", "99k"], ": --memory is 101376 bytes: give 1MiB or more, such as 8GiB"),
        (["serve", "--chat-template", "/no/t.jinja"], ": --chat-template /no/t.jinja can't be read: No such file or"),
        (["serve", "--kv-bits", "5"], ": --kv-bits is 5: give 8"),
        (["doctor", "--threads", "0"], ": --threads must be above 0, not 0"),
        (["serve", "--max-wait", "-1"], ": --max-wait must not be negative: -1"),
        (["serve", "--log-level", "loud"], ": --log-level must be one of debug, info, "),
        (["serve", "--grpc-port", "0", "--grpc-cert", "c.pem"], ": --grpc-cert and --grpc-key belong together"),
        (["serve", "--api-key", " "], ": --api-key (or TREADLE_API_KEY) is empty"),
        (["serve", "--api-key", "schlüssel"], ": --api-key (or TREADLE_API_KEY) must be 1 to 512 visible ASCII"),
        (["serve", "--api-keys", "/no/keys.toml"], ": --api-keys (or TREADLE_API_KEYS) /no/keys.toml does not exist"),
        (["serve", ""], ": MODEL is empty: give a folder"),
        (["fleet", "--host", "0.0.0.0"], "set TREADLE_API_KEY (or --api-key), or give --no-auth"),
        (["fleet", "--port", "99999"], ": --port 99999: give 1 to 65535"),
        (["fleet", "--drain", "-1"], ": --drain -1: give 0 or more seconds"),
        (["doctor", "--threads"], "requires an argument"),
        (["keys", "add", "x", "--scope", "root"], "Invalid value for '--scope': 'root' is not one of 'use', 'admin'"),
    ],
)
def test_a_wrong_command_line_is_one_line_on_stderr(forked: ForkedCommand, arguments: list[str], said: str) -> None:
    ran = forked.run(*arguments)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith("treadle: error: ")
    assert ran.stderr.count("\n") == 1
    assert said in ran.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--max-model-len 4096", "--max-model-len is an option of other servers: use --context;"),
        ("--max-model-len=4096", "--max-model-len is an option of other servers: use --context;"),
        ("--ctx-size 4096", ": use --context;"),
        ("-c 4096", "-c is an option of other servers: use --context;"),
        ("--n-ctx 4096", ": use --context;"),
        ("--max-num-seqs 8", ": use --max-running;"),
        ("--max-seqs 8", ": use --max-running;"),
        ("--parallel 8", ": use --max-running;"),
        ("-np 8", "-np is an option of other servers: use --max-running;"),
        ("--gpu-memory-utilization 0.9", ": use --memory with the size of the KV cache, such as 8GiB;"),
        ("--max-num-batched-tokens 512", ": use --prefill-tokens;"),
        ("--enable-prefix-caching", ": prefixes are cached by default, leave it out;"),
        (
            "--model org/demo",
            "--model is an option of other servers: the model is an argument: treadle serve org/demo;",
        ),
        ("--model=org/demo", ": treadle serve org/demo;"),
        ("--model --port 1", ": treadle serve MODEL;"),
        ("--nope --max-model-len 1", "No such option: --nope;"),
    ],
)
def test_an_option_of_another_server_names_its_counterpart(forked: ForkedCommand, words: str, said: str) -> None:
    ran = forked.run("serve", *words.split())
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert said in ran.stderr


def test_the_counterparts_are_options_here() -> None:
    named = {word.rstrip(",") for cure in CURES.values() for word in cure.split() if word.startswith("--")}
    assert named <= {f"--{name.replace('_', '-')}" for name in Settings.names()} | {"--no-prefix-cache"}
    assert CURES.keys().isdisjoint(f"--{name.replace('_', '-')}" for name in Settings.names() if name != "model")


@pytest.mark.parametrize(
    ("arguments", "ends"), [(["serve", "--port", "x"], "; see ./treadle serve --help"), (["srve"], "./treadle --help")]
)
def test_a_hint_names_the_command_as_it_was_run(arguments: list[str], ends: str, tmp_path: Path) -> None:
    ran = treadle(*arguments, TREADLE_COMMAND="./treadle", PATH="")
    assert ran.stderr.endswith(f"{ends}\n")


def test_the_doctor_looks_at_the_template_that_would_be_used(forked: ForkedCommand) -> None:
    ran = forked.run("doctor", "demo", "--chat-template", "/no/t.jinja")
    assert (ran.returncode, "/no/t.jinja can't be read" in " ".join(ran.stdout.split())) == (1, True)


def test_an_unknown_name_in_the_settings_file_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "treadle.toml"
    file.write_text("max-runing = 4\n")
    ran = treadle("serve", "--config", str(file))
    assert ran.returncode == 2
    assert ran.stderr == f"treadle: error: unknown setting 'max-runing' in {file}; did you mean 'max-running'?\n"


def test_a_torn_settings_file_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "treadle.toml"
    file.write_text("port = = 4\n")
    ran = treadle("serve", "--config", str(file))
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "is not valid TOML" in ran.stderr


def test_a_missing_model_is_one_line_and_a_non_zero_exit(tmp_path: Path) -> None:
    ran = treadle("doctor", str(tmp_path / "nowhere"), "--json")
    assert ran.returncode == 1
    assert "there is no folder" in json.loads(ran.stdout)["sections"]["Model"]["model"]["value"]
    assert ran.stderr == ""


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("demoo", "'demoo' is no folder here and not a hub id (owner/name): did you mean 'demo'?"),
        ("gemma-3-270m", "did you mean 'demo'?"),
        ("./nothing", "there is no folder './nothing'"),
        ("llama", "give one of them, or 'demo'"),
    ],
)
def test_a_model_that_can_not_be_is_refused_before_the_server_listens(model: str, said: str) -> None:
    ran = treadle("serve", model, "--port", "0")
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert said in ran.stderr


def test_without_arguments_the_help_is_shown() -> None:
    ran = treadle()
    assert ran.returncode == 2
    assert "serve" in ran.stdout + ran.stderr
    assert "error" not in ran.stderr


def test_help_imports_nothing_heavy() -> None:
    heavy = ("mlx", "mlx_lm", "fastapi", "starlette", "uvicorn", "transformers", "tokenizers", "numpy")
    code = (
        "import os, sys; sys.argv = ['treadle', 'serve', '--help']; os._exit = sys.exit\n"
        "from treadle.cli import main\n"
        "try: main()\n"
        f"finally: print('LOADED', sorted(set({heavy!r}) & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0
    assert ran.stdout.splitlines()[-1] == "LOADED []"


def test_the_doctor_never_imports_mlx_itself(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from treadle.cli import doctor\n"
        "from treadle.config import Settings\n"
        f"doctor.run(Settings(model={str(tmp_path)!r}), check=False, as_json=True)\n"
        "print('LOADED', sorted({'mlx', 'mlx_lm', 'mlx.core', 'transformers'} & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines()[-1] == "LOADED []"


@pytest.mark.parametrize(("typed", "offered"), [("treadle ser", "serve"), ("treadle doctor --che", "--check")])
def test_the_shell_completes_commands_and_options(typed: str, offered: str) -> None:
    words = len(typed.split())
    ran = treadle(_TREADLE_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(words - 1))
    assert offered in ran.stdout.split()


def test_completion_installs_itself_for_the_shell(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("# mine\n")
    ran = treadle("--install-completion", "bash", HOME=str(tmp_path), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert ran.returncode == 0
    assert "# mine" in (tmp_path / ".bashrc").read_text()
    assert any("_TREADLE_COMPLETE" in path.read_text() for path in (tmp_path / ".bash_completions").iterdir())
