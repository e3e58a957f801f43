"""Agent programs that run headless, unmodified, against the scripted agent of `benchmarks.clients.agent`.

Each gets a home and a project folder of its own, and the settings that `treadle connect` writes. The task is to edit a
file, run a command, and report: the model's turns are scripted, so what is shown is that the client and the server
understand each other. A program passes if the file has the edit, the command saw it, its output came back in a tool
result, the last words are on standard output, and no request failed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.clients import agent
from benchmarks.clients.agent import Script
from benchmarks.clients.results import Row

LIMIT_S = 180
VERSION_LIMIT_S = 60
MODEL = "agent"
BEFORE, AFTER = "colour = red\n", "colour = teal\n"
CHECK = "tee checked < colour.txt\necho ran-$((40+2))\n"
LAST = "The check says teal, and ran-42."
TASK = "Change red to teal in colour.txt, then run sh check.sh and tell me the result."

Command = Callable[[str, Path], list[str]]
"""Gives the command line for a prompt and a home folder."""


@dataclass(frozen=True)
class Program:
    """An agent program: its name for people, its executable, the client that `treadle connect` calls it, its API, its
    command line, and the calls that the model makes, by a project folder."""

    title: str
    executable: str
    client: str
    api: str
    command: Command
    calls: Callable[[Path], list[tuple[str, dict[str, Any]]]]
    last: str = LAST

    @property
    def marker(self) -> str:
        return f"[task of {self.executable}]"

    def script(self, project: Path) -> Script:
        """Return the model's turns."""
        return Script(self.calls(project), self.last)


def _claude(project: Path) -> list[tuple[str, dict[str, Any]]]:
    path = str(project / "colour.txt")
    return [
        ("Read", {"file_path": path}),
        ("Edit", {"file_path": path, "old_string": "red", "new_string": "teal"}),
        ("Bash", {"command": "sh check.sh", "description": "Run the check"}),
    ]


def _codex(project: Path) -> list[tuple[str, dict[str, Any]]]:
    patch = "*** Begin Patch\n*** Update File: colour.txt\n@@\n-colour = red\n+colour = teal\n*** End Patch"
    return [
        ("exec_command", {"cmd": f"apply_patch <<'EOF'\n{patch}\nEOF\n"}),
        ("exec_command", {"cmd": "sh check.sh"}),
    ]


def _opencode(project: Path) -> list[tuple[str, dict[str, Any]]]:
    path = str(project / "colour.txt")
    return [
        ("read", {"filePath": path}),
        ("edit", {"filePath": path, "oldString": "red", "newString": "teal"}),
        ("bash", {"command": "sh check.sh"}),
    ]


def _qwen(project: Path) -> list[tuple[str, dict[str, Any]]]:
    path = str(project / "colour.txt")
    return [
        ("read_file", {"file_path": path}),
        ("edit", {"file_path": path, "old_string": "red", "new_string": "teal"}),
        ("run_shell_command", {"command": "sh check.sh", "is_background": False}),
    ]


def _continue(project: Path) -> list[tuple[str, dict[str, Any]]]:
    path = str(project / "colour.txt")
    return [
        ("Read", {"filepath": path}),
        ("Edit", {"file_path": path, "old_string": "red", "new_string": "teal"}),
        ("Bash", {"command": "sh check.sh"}),
    ]


def _copilot(project: Path) -> list[tuple[str, dict[str, Any]]]:
    path = str(project / "colour.txt")
    return [
        ("view", {"path": path}),
        ("edit", {"path": path, "old_str": "red", "new_str": "teal"}),
        ("bash", {"command": "sh check.sh", "description": "Run the check"}),
    ]


def _claude_command(prompt: str, home: Path) -> list[str]:
    rights = ["--permission-mode", "acceptEdits", "--allowedTools", "Bash", "Read", "Edit"]
    return ["claude", "--settings", str(home / ".claude/treadle.json"), *rights, "-p", prompt]


def _codex_command(prompt: str, home: Path) -> list[str]:
    rights = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["codex", "exec", "--profile", "treadle", *rights, prompt]


def _aider_command(prompt: str, home: Path) -> list[str]:
    quiet = ["--no-check-update", "--analytics-disable", "--no-show-release-notes", "--no-pretty", "--no-auto-commits"]
    tests = ["--auto-test", "--test-cmd", "sh check.sh"]
    settings = ["--config", str(home / ".aider.treadle.conf.yml")]
    return ["aider", *settings, "--yes-always", *quiet, *tests, "--message", prompt, "colour.txt"]


PROGRAMS = (
    Program("Claude Code", "claude", "claude", "Anthropic", _claude_command, _claude),
    Program("Codex", "codex", "codex", "Responses", _codex_command, _codex),
    Program(
        "OpenCode",
        "opencode",
        "opencode",
        "chat",
        lambda prompt, home: ["opencode", "run", "--model", f"treadle/{MODEL}", "--auto", prompt],
        _opencode,
    ),
    Program(
        "Qwen Code",
        "qwen",
        "qwen",
        "chat",
        lambda prompt, home: ["qwen", "--auth-type", "openai", "--model", MODEL, "--yolo", "-p", prompt],
        _qwen,
    ),
    Program(
        "Continue CLI",
        "cn",
        "continue",
        "chat",
        lambda prompt, home: ["cn", "--config", str(home / ".continue/config.yaml"), "--auto", "-p", prompt],
        _continue,
    ),
    Program(
        "GitHub Copilot CLI",
        "copilot",
        "copilot",
        "chat",
        lambda prompt, home: ["copilot", "--allow-all-tools", "-p", prompt],
        _copilot,
    ),
    Program(
        "aider",
        "aider",
        "aider",
        "chat",
        _aider_command,
        lambda project: [],
        last=f"{LAST}\n\ncolour.txt\n```\n{AFTER}```",
    ),
)


@dataclass(frozen=True)
class Place:
    """Folders of one run, and the server's address and log."""

    folder: Path
    url: str
    log: Path
    scripts: Path
    path: str

    def home(self, program: Program) -> Path:
        return self.folder / program.executable

    def project(self, program: Program) -> Path:
        return self.home(program) / "project"

    def variables(self, program: Program) -> dict[str, str]:
        """Return the environment of a program: a home of its own, and nothing of the user's settings or keys."""
        home = str(self.home(program))
        kept = {name: os.environ[name] for name in ("LANG", "TERM", "TMPDIR") if name in os.environ}
        folders = {"XDG_CONFIG_HOME": ".config", "XDG_DATA_HOME": ".local/share", "XDG_CACHE_HOME": ".cache"}
        return {**kept, "HOME": home, "PATH": self.path, **{name: f"{home}/{at}" for name, at in folders.items()}}


def search_path(folders: Sequence[Path]) -> str:
    """Return PATH with these folders first."""
    return os.pathsep.join([*(str(folder.resolve()) for folder in folders), os.environ["PATH"]])


def installed(program: Program, path: str) -> bool:
    """Whether a program is in PATH."""
    return shutil.which(program.executable, path=path) is not None


def run(program: Program, place: Place) -> Row:
    """Run a program on the task, and judge what it did."""
    _prepare(program, place)
    began, seen, logged = time.perf_counter(), len(agent.requests(place.scripts)), place.log.stat().st_size
    variables = place.variables(program)
    output, error = "", _connect(program, place, variables)
    if not error:
        command = program.command(f"{program.marker} {TASK}", place.home(program))
        output, error = limited(command, place.project(program), variables, LIMIT_S)
    notes = [note for note in agent.requests(place.scripts)[seen:] if note["step"] is not None]
    statuses = _statuses(place.log, logged)
    faults = [*([error] if error else []), *_faults(program, place, output, notes, statuses)]
    detail = "; ".join(faults)[:300] if faults else _summary(notes, statuses)
    seconds = round(time.perf_counter() - began, 1)
    case = "edit a file, run a command, answer"
    return Row("client", program.title, _version(program, place), program.api, case, not faults, detail, seconds)


def _prepare(program: Program, place: Place) -> None:
    project = place.project(program)
    project.mkdir(parents=True)
    (project / "colour.txt").write_text(BEFORE)
    (project / "check.sh").write_text(CHECK)
    subprocess.run(["git", "init", "--quiet"], cwd=project, check=True)


def _connect(program: Program, place: Place, variables: dict[str, str]) -> str:
    """Write or read the program's settings with `treadle connect`; return its error."""
    command = [sys.executable, "-m", "treadle", "connect", program.client, "--url", place.url]
    environment = {**variables, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    writes = program.client != "copilot"
    done = subprocess.run(
        [*command, *(["--write", "--yes"] if writes else [])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return _end(done.stderr)
    if not writes:
        variables |= dict(re.findall(r"^export (\w+)=(.*)$", done.stdout, re.MULTILINE))
    return ""


def limited(command: list[str], folder: Path, variables: dict[str, str], limit_s: float) -> tuple[str, str]:
    """Run a command with its children for at most `limit_s`; return its standard output and the error that it ended
    with, if any."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        return output, f"no end within {limit_s:.0f} s: {_end(output + errors)}"
    return output, f"exit code {process.returncode}: {_end(output + errors)}" if process.returncode else ""


def _end(text: str) -> str:
    return " ".join(text.split())[-200:]


def _faults(
    program: Program, place: Place, output: str, notes: list[dict[str, Any]], statuses: dict[str, int]
) -> list[str]:
    """Return what is not as it should be after a run."""
    project = place.project(program)
    checked = project / "checked"
    calls = len(program.script(project).calls)
    good = {
        "the file has no edit": (project / "colour.txt").read_text() == AFTER,
        "the command did not see the edit": checked.exists() and checked.read_text() == AFTER,
        "the last words were not shown": LAST in " ".join(output.split()),
        "the command's output did not come back": not calls or any(note["checked"] for note in notes),
        f"not all of {calls + 1} turns took place": {note["step"] for note in notes} >= set(range(calls + 1)),
    }
    failed = [f"{line} x {count}" for line, count in statuses.items() if not re.search(r" [23]\d\d$", line)]
    return [*(fault for fault, is_good in good.items() if not is_good), *failed]


def _statuses(log: Path, start: int) -> dict[str, int]:
    """Return how often each method, path and status stands in the access log behind `start`."""
    counts: dict[str, int] = {}
    with log.open("rb") as file:
        file.seek(start)
        for line in file.read().decode(errors="replace").splitlines():
            entry = json.loads(line) if line.startswith("{") else {}
            if "status" in entry and "path" in entry:
                name = f"{entry.get('method')} {entry['path']} {entry['status']}"
                counts[name] = counts.get(name, 0) + 1
    return counts


def _summary(notes: list[dict[str, Any]], statuses: dict[str, int]) -> str:
    characters = max((note["characters"] for note in notes if note["step"] == 0), default=0)
    return f"{', '.join(f'{name} x {n}' for name, n in statuses.items())}; first prompt {characters:,} characters"


def _version(program: Program, place: Place) -> str:
    output, _ = limited([program.executable, "--version"], place.folder, place.variables(program), VERSION_LIMIT_S)
    found = re.search(r"\d+\.\d+[\w.-]*", output)
    return found[0].rstrip(".") if found else "?"
