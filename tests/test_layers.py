"""Who may import whom (docs/structure.md), read from the source: every import counts, also those inside functions and
those for types alone. And what a front's process must never load: MLX, and transformers."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import treadle
from treadle.compose.texts import FOLDER_CHECK, TEXT_JOBS

ROOT = Path(treadle.__file__).parent

EVERYTHING = ("",)
FOR_ALL = ("errors", "config", "installation", "units", "gc_pause", "weight_names", "context_length")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "host_names": (),
    "config": ("errors", "host_names", "regular_files"),
    "network_exposure": ("host_names",),
    "keys": (),
    "installation": (),
    "units": (),
    "weight_names": (),
    "context_length": (),
    "gc_pause": (),
    "file_descriptors": (),
    "file_locks": (),
    "environment": (),
    "outage": (),
    "regular_files": (),
    "schema_pointers": (),
    "output_streams": (),
    "shared_memory": ("file_locks",),
    "core": (),
    "engine": ("core", "runner.base", "file_descriptors", "environment", "processes", "output_streams", "outage"),
    "runner.base": ("core",),
    "runner": ("core", "cache", "grammar", "environment", "shared_memory"),
    "cache": ("core",),
    "grammar": ("core", "schema_pointers"),
    "text": ("core", "environment", "processes", "outage", "regular_files", "schema_pointers"),
    "media": ("text.images", "text.work", "environment", "processes", "shared_memory"),
    "fronts": (
        *("core", "text", "telemetry", "host_names", "keys", "grammar", "shared_memory", "media.pixels_memory"),
        *("engine.client", "engine.reservation", "engine.generation", "engine.status", "engine.observer"),
        *("engine.block_event_feeds", "regular_files"),
    ),
    "telemetry": ("core", "output_streams"),
    "models": ("environment", "file_locks"),
    "fleet": ("processes", "host_names", "environment"),
    "processes": (),
    "bench": ("core", "engine", "processes", "host_names"),
    "bench.inprocess": ("core", "engine", "runner"),
    "compose": EVERYTHING,
    "library": EVERYTHING,
    "cli": EVERYTHING,
    "__init__": EVERYTHING,
    "__main__": EVERYTHING,
}
MLX = ("mlx", "mlx_lm", "mlx_vlm")
MAY_IMPORT_MLX = ("runner", "cache.block_store", "bench.inprocess")
CORE_LIBRARIES = ("msgspec",)
WITHOUT_MLX = (
    *("core", "cache.prefix_index", "engine", "text", "media", "grammar", "fronts", "telemetry"),
    *("fleet", "installation", "compose", "library", "cli"),
)


@dataclass(frozen=True)
class Import:
    """`module`, a dotted name below treadle, imports `target`: the same for our own, a full name for others."""

    module: str
    target: str
    ours: bool
    line: int

    def __str__(self) -> str:
        return f"{self.module} imports {self.target} (line {self.line})"


def modules() -> dict[str, Path]:
    """Every module by its dotted name below treadle; a package by its own name, treadle itself as __init__."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = path
    return found


def imports_of(module: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    package = [] if module == "__init__" else module.split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.stmt | ast.expr):
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = _from(node, package, known)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        for name in names:
            ours = name == "treadle" or name.startswith("treadle.")
            yield Import(module, name.removeprefix("treadle").lstrip(".") if ours else name, ours, node.lineno)


def _from(node: ast.ImportFrom, package: list[str], known: dict[str, Path]) -> list[str]:
    """`from x import y` imports the module x.y where there is one, else x."""
    if node.level:
        above = package[: len(package) - (node.level - 1)]
        base = ".".join(["treadle", *above, *(node.module or "").split(".")]).rstrip(".")
    else:
        base = node.module or ""
    if not (base == "treadle" or base.startswith("treadle.")):
        return [base]
    below = [f"{base}.{alias.name}" for alias in node.names]
    return [name if name.removeprefix("treadle.") in known else base for name in below]


def _called(node: ast.Call) -> str:
    match node.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def within(module: str, folder: str) -> bool:
    return folder == "" or module == folder or module.startswith(f"{folder}.")


def layer(module: str) -> str | None:
    """The most particular line of the table for a module."""
    return max((name for name in MAY_IMPORT if within(module, name)), key=len, default=None)


KNOWN = modules()


@cache
def imports() -> list[Import]:
    """The imports of all modules. Each worker collects the tests, and one runs them."""
    return [found for module, path in KNOWN.items() for found in imports_of(module, path, KNOWN)]


def test_every_module_has_its_line_in_the_table() -> None:
    assert [module for module in KNOWN if layer(module) is None] == []


def test_no_arrow_but_those_of_the_table() -> None:
    wrong = []
    for found in imports():
        own = layer(found.module)
        assert own is not None
        allowed = (*MAY_IMPORT[own], *FOR_ALL, own, own.split(".")[0])
        if own in ("errors", "config", "runner.base"):
            allowed = (*MAY_IMPORT[own], *FOR_ALL[: 0 if own == "errors" else 2])
        if found.ours and not any(within(found.target, name) for name in allowed):
            wrong.append(str(found))
    assert wrong == []


DIALECTS = ("openai", "anthropic", "responses", "ollama")
READ_AS_ANOTHER = (("ollama", "openai"),)
"""Dialects whose requests are read as those of another one."""


def dialect(module: str) -> str | None:
    return next((name for name in DIALECTS if within(module, f"fronts.web.{name}")), None)


def test_dialects_share_what_is_beside_them() -> None:
    pairs = [(dialect(found.module), dialect(found.target), str(found)) for found in imports() if found.ours]
    crossing = [(of, to, where) for of, to, where in pairs if of and to and of != to]
    assert [where for of, to, where in crossing if (of, to) not in READ_AS_ANOTHER] == []
    assert {(of, to) for of, to, _ in crossing} == {*READ_AS_ANOTHER}


def test_only_the_owners_modules_import_mlx() -> None:
    wrong = [
        str(found)
        for found in imports()
        if not found.ours
        and found.target.split(".")[0] in MLX
        and not any(within(found.module, name) for name in MAY_IMPORT_MLX)
    ]
    assert wrong == []


def test_the_contract_with_the_runner_needs_no_mlx() -> None:
    """`engine/` imports runner.base, so neither it nor its package may."""
    base = [found for found in imports() if found.module in ("runner", "runner.base")]
    assert not [str(found) for found in base if found.target.split(".")[0] in MLX]


@pytest.mark.parametrize("folder", ["core", "errors", "config"])
def test_the_core_stands_on_the_standard_library_and_msgspec(folder: str) -> None:
    wrong = [
        str(found)
        for found in imports()
        if within(found.module, folder)
        and not found.ours
        and found.target.split(".")[0] not in {*sys.stdlib_module_names, *CORE_LIBRARIES}
    ]
    assert wrong == []


def test_the_core_knows_no_clock_thread_loop_or_log() -> None:
    impure = {"time", "datetime", "threading", "asyncio", "logging", "random", "os", "io", "socket", "subprocess"}
    wrong = [str(found) for found in imports() if within(found.module, "core") and found.target.split(".")[0] in impure]
    assert wrong == []


def test_a_front_loads_neither_mlx_nor_transformers() -> None:
    """In a fresh interpreter, all modules of each folder; what composes them loads the runner in the owner alone."""
    names = {folder: [f"treadle.{name}" for name in KNOWN if within(name, folder)] for folder in WITHOUT_MLX}
    assert all(names.values())
    code = (
        "import importlib, sys\n"
        f"for folder, names in {names!r}.items():\n"
        "    for name in names: importlib.import_module(name)\n"
        "    print(folder, sorted(n for n in sys.modules if n.split('.')[0] in ('mlx', 'mlx_lm', 'transformers')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == [f"{folder} []" for folder in WITHOUT_MLX]


def test_the_fork_server_loads_nothing_of_the_servers_process() -> None:
    """Each start of a server waits for its imports, and each text worker holds their memory."""
    names = ("asyncio", "starlette", "prometheus_client", "treadle.engine", "treadle.telemetry", "treadle.media")
    code = (
        "import sys, treadle.text.work.fork_server, treadle.text.tokenizer, treadle.text.work.worker\n"
        f"import {TEXT_JOBS.partition(':')[0]}, {FOLDER_CHECK.partition(':')[0]}\n"
        f"print([name for name in {names!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"


def test_a_server_loads_nothing_for_images_before_the_first() -> None:
    """What decodes images is an image process's; the client that fetches them waits for the first URL."""
    names = ("numpy", "PIL", "httpcore", "treadle.media.workers", "treadle.media.decode", "treadle.fronts.media.fetch")
    code = (
        "import sys, treadle.compose.server, treadle.compose.images\n"
        "import treadle.fronts.web.app, treadle.fronts.rpc.server\n"
        f"print([name for name in {names!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"


# Circles of imports


def circles(arrows: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups of names that reach one another, each sorted."""
    targets: dict[str, set[str]] = {}
    for name, target in arrows:
        targets.setdefault(name, set()).add(target)
    reached = {name: _reached(name, targets) for name in targets}
    found = {tuple(sorted(b for b in reached[a] if a in reached.get(b, ()))) for a in targets if a in reached[a]}
    return sorted([*group] for group in found)


def _reached(name: str, targets: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    rest = [name]
    while rest:
        new = targets.get(rest.pop(), set()) - seen
        seen |= new
        rest.extend(new)
    return seen


def room(module: str) -> str:
    """The folder of `runner/` that holds a module; a module beside the folders is a room of its own."""
    parts = module.split(".")
    return ".".join(parts[:2])


def in_runner(found: Import) -> bool:
    return found.ours and within(found.module, "runner") and within(found.target, "runner")


def test_no_module_of_the_runner_imports_itself_round_about() -> None:
    assert circles((found.module, found.target) for found in imports() if in_runner(found)) == []


def test_no_folder_of_the_runner_imports_itself_round_about() -> None:
    arrows = {(room(found.module), room(found.target)) for found in imports() if in_runner(found)}
    assert circles((a, b) for a, b in arrows if a != b) == []


def test_circles_are_found() -> None:
    assert circles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "a")]) == [["a", "b", "c"]]
    assert circles([("a", "b"), ("b", "c")]) == []


# The reader of imports itself


@pytest.mark.parametrize(
    ("module", "source", "targets"),
    [
        ("core.sequence", "from .messages import Submit", {"core.messages"}),
        ("core.sequence", "from ..errors import Busy", {"errors"}),
        ("core.sequence", "from .. import config", {"config"}),
        ("core.sequence", "from . import messages, queue", {"core.messages", "core.queue"}),
        ("core.sequence", "import treadle.runner.model_runner", {"runner.model_runner"}),
        ("core.sequence", "from treadle.runner import model_runner", {"runner.model_runner"}),
        ("core.sequence", "def f():\n    import mlx.core as mx", {"mlx.core"}),
        ("core.sequence", "if TYPE_CHECKING:\n    from mlx_lm.models import cache", {"mlx_lm.models"}),
        ("core.sequence", "import importlib\nimportlib.import_module('mlx.core')", {"importlib", "mlx.core"}),
        ("core.sequence", "try:\n    import a\nexcept ImportError:\n    from b import c", {"a", "b"}),
        ("cli", "from .app import main", {"cli.app"}),
        ("__init__", "from .config import Settings", {"config"}),
    ],
)
def test_imports_are_found_wherever_they_stand(tmp_path: Path, module: str, source: str, targets: set[str]) -> None:
    path = tmp_path / ("__init__.py" if module in ("cli", "__init__") else "module.py")
    path.write_text(source, encoding="utf-8")
    assert {found.target for found in imports_of(module, path, KNOWN)} == targets


def test_modules_named_here_exist_or_are_still_to_come() -> None:
    later = {"cache.block_store", "bench", "bench.inprocess"}
    named = {name for names in MAY_IMPORT.values() for name in names if name} | MAY_IMPORT.keys() | {*MAY_IMPORT_MLX}
    assert {name for name in named if name not in KNOWN} <= later
    assert importlib.util.find_spec("treadle.bench") is None or "bench" in KNOWN
