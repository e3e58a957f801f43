"""Run clients, SDKs and conformance suites against Treadle, or against another server.

    make clients
    python -m benchmarks.clients sdks suites --sdk-python .venv-clients/bin/python \\
        --node-modules .venv-clients/node_modules

runs what `make test` runs, and schemathesis for longer. The whole matrix:

    python -m venv sdks && sdks/bin/pip install openai anthropic ollama litellm langchain-openai langchain-anthropic \\
        langchain-ollama llm 'pydantic-ai-slim[openai]' instructor llm-comply schemathesis
    python -m venv aider && aider/bin/pip install aider-chat
    npm install @anthropic-ai/claude-code @openai/codex opencode-ai @qwen-code/qwen-code @continuedev/cli \\
        @github/copilot openai @anthropic-ai/sdk ollama ai @ai-sdk/openai-compatible @ai-sdk/anthropic @ai-sdk/openai
    python -m benchmarks.clients --sdk-python sdks/bin/python --node-modules node_modules --bin aider/bin --save
    python -m benchmarks.clients --sdk-python sdks/bin/python --node-modules node_modules --peer mlx-lm --save

Agent programs run unmodified, each in a home and a project of its own, against a server whose model is scripted to play
an agent's turns (`agent`, `programs`, `recorded`). SDKs and suites run against a tiny random model on the real engine
(`sdks`, `suites`). Whatever is not installed is named. `--save` writes docs/figures/compatibility/TARGET.json, of which
`python benchmarks/compatibility.py` makes docs/compatibility.md. `--peer` starts a server of `benchmarks/peers.py` with
the same tiny model, for SDKs and suites. Exit code 1 if a case of Treadle failed.

Needs the Python that Treadle and its tests are installed in. Nothing reaches beyond loopback.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.clients import programs, recorded, sdks, servers, suites
from benchmarks.clients.results import ROOT, Results, Row, now
from tests.support.tiny import make_tiny

from treadle.installation import version
from treadle.processes import free_port

FOLDER = ROOT / "docs" / "figures" / "compatibility"
PARTS = ("clients", "sdks", "suites")


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as work:
        results = _of_peer(options, Path(work)) if options.peer else _of_treadle(options, Path(work))
    if results.missing:
        print(f"Not installed: {', '.join(sorted(results.missing))}")
    if options.save:
        _save(results, options.parts)
    passed = sum(row.passed for row in results.rows)
    print(f"{passed} of {len(results.rows)} passed")
    sys.exit(not options.peer and (not results.rows or passed < len(results.rows)))


def _save(results: Results, parts: list[str]) -> None:
    """Write the result file; rows of parts that were not run stay as they were."""
    path = FOLDER / f"{results.target}.json"
    if path.exists():
        before = Results.load(path)
        results.rows = [row for row in before.rows if f"{row.kind}s" not in parts] + results.rows
        results.missing = sorted({*results.missing, *(before.missing if set(parts) != set(PARTS) else [])})
    results.save(path)


def _of_treadle(options: Any, work: Path) -> Results:
    rows: list[Row] = []
    missing: list[str] = []
    if "clients" in options.parts:
        _run_clients(options, work, rows, missing)
    if {"sdks", "suites"} & set(options.parts):
        with (
            servers.tiny_server(work / "tiny", work / "tiny.log") as url,
            servers.vision_server(work / "vision", work / "vision.log") as vision,
        ):
            _run_libraries(options, url, "tiny", rows, missing, (vision, "vision"))
    if "suites" in options.parts:
        _keep(rows, suites.schemathesis(options.sdk_python, options.seconds))
    return now("treadle", version(), rows, missing)


def _of_peer(options: Any, work: Path) -> Results:
    rows: list[Row] = []
    missing: list[str] = []
    peer = peers.PEERS_BY_NAME[options.peer]
    model = make_tiny(work / "tiny", context=servers.TINY_CONTEXT)
    port = free_port()
    command = f"exec env {peers.command(peer, model, ()).format(port=port)}"
    url, log = f"http://127.0.0.1:{port}", work / "peer.log"
    with log.open("wb") as file, servers.started(command, os.environ, file) as server:
        servers.wait_until(f"{url}/v1/models", server, log)
        _run_libraries(options, url, str(model.resolve()), rows, missing)
    for row in rows:  # these servers name the model by its folder
        row.detail = row.detail.replace(str(model.resolve()), model.name)
    return now(options.peer, peer.requirement.partition("==")[2], rows, missing)


def _run_clients(options: Any, work: Path, rows: list[Row], missing: list[str]) -> None:
    path = programs.search_path([options.node_modules / ".bin", *options.bin])
    with servers.agent_server(work, path) as place:
        for program in programs.PROGRAMS:
            if options.only not in program.title:
                continue
            if programs.installed(program, path):
                _keep(rows, [programs.run(program, place)])
            else:
                missing.append(program.title)
        for recording in recorded.recordings():
            if options.only in recording["title"]:
                _keep(rows, [recorded.run(recording, place)])


def _run_libraries(
    options: Any, url: str, model: str, rows: list[Row], missing: list[str], vision: tuple[str, str] | None = None
) -> None:
    if "sdks" in options.parts:
        found = sdks.run(options.sdk_python, options.node_modules, url, model, options.only)
        rows += [Row(**row) for row in found["rows"]]
        missing += found["missing"]
    if "suites" in options.parts:
        for format_ in suites.FORMATS:
            _keep(rows, suites.comply(options.sdk_python, url, model, format_, vision))


def _keep(rows: list[Row], found: Iterator[Row] | list[Row]) -> None:
    for row in found:
        print(row.line(), flush=True)
        rows.append(row)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which parts to run: all of them by default")
    parser.add_argument("--only", default="", metavar="WORD", help="clients and SDKs with this in their name")
    parser.add_argument("--sdk-python", type=Path, default=Path(sys.executable), metavar="FILE")
    parser.add_argument("--node-modules", type=Path, default=Path("node_modules"), metavar="FOLDER")
    parser.add_argument("--bin", type=Path, action="append", default=[], metavar="FOLDER", help="for PATH")
    parser.add_argument("--seconds", type=int, default=120, help="for schemathesis; 0 leaves it out")
    parser.add_argument("--peer", choices=[name for name in peers.PEERS_BY_NAME if name != "smg-servicer"])
    parser.add_argument("--save", action="store_true", help="write the result file")
    options = parser.parse_args()
    if options.save and options.only:
        parser.error("--only leaves rows out, so its results can't be saved: leave --save out")
    options.parts = options.parts or ["sdks", "suites"] if options.peer else options.parts or list(PARTS)
    return options


if __name__ == "__main__":
    main()
