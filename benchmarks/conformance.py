"""Hold a server to its own OpenAPI document with schemathesis: valid requests answered, invalid ones refused, every
answer as documented.

    python -m venv st && st/bin/pip install schemathesis
    python benchmarks/conformance.py --schemathesis st/bin/schemathesis [--seconds 300] [--seed N] [--key KEY]

Makes a tiny random model, serves it, runs all checks in all phases, and stops the server. Exit code 1 when schemathesis
found a failure of any kind. Some choices avoid conditions that a schema can't express:

- The model's chat template writes the last turns only, so that a list of 8,192 messages is a test of the list and not
  of the context (a prompt longer than the context is a documented 400).
- The queue is long enough for `n` times the prompts of one request (a request for more is a documented 400), and waits
  there are long enough (a full queue is a documented 503).
- A `timeout` is long enough for an answer to begin (a shorter one is a documented 503).

Needs the Python that Treadle is installed in.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.tiny import make_tiny

from treadle.processes import free_port

CONTEXT = 32_768
TEMPLATE = """{%- for message in messages[-8:] -%}
{%- set text = message.content if message.content is string else 'parts' -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ text[-256:] ~ '<|im_end|>' ~ '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant' ~ '\\n' -}}{%- endif -%}"""
SETTINGS = {
    "--max-running": 32,
    "--max-waiting": 300_000,
    "--max-wait": 600,
    "--max-tokens": 4,
    "--log-level": "warning",
}
START_S = 120
LEAST_TIMEOUT_S = 60


@contextmanager
def serving(folder: Path, port: int, key: str | None) -> Iterator[str]:
    """Context manager of a server of `folder`; yields its base URL."""
    options = [str(word) for pair in SETTINGS.items() for word in pair]
    command = [sys.executable, "-m", "treadle", "serve", str(folder), "--port", str(port), *options]
    environment = os.environ | ({"TREADLE_API_KEY": key} if key else {})
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(command, env=environment)
    try:
        wait_until_ready(url, server, key)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def wait_until_ready(url: str, server: subprocess.Popen[bytes], key: str | None) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(
                urllib.request.Request(f"{url}/health/ready", headers=headers(key)), timeout=5
            ).close()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
        else:
            return
    sys.exit("the server did not start: its log is above")


def with_long_timeouts(url: str, key: str | None, folder: Path) -> Path:
    """Write the server's OpenAPI document, in which each `timeout` is long enough, to a file of `folder`."""
    with urllib.request.urlopen(urllib.request.Request(f"{url}/openapi.json", headers=headers(key))) as answer:
        document = json.load(answer)
    for schema in document["components"]["schemas"].values():
        for kind in schema.get("properties", {}).get("timeout", {}).get("anyOf", ()):
            if kind.pop("exclusiveMinimum", None) is not None:
                kind["minimum"] = LEAST_TIMEOUT_S
    path = folder / "openapi.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemathesis", default="schemathesis", metavar="PROGRAM")
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key", help="give the server this API key, so that the checks of authentication run too")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = make_tiny(Path(work) / "tiny", context=CONTEXT, eos=False, chat_template=TEMPLATE)
        with serving(folder, options.port or free_port(), options.key) as url:
            document = with_long_timeouts(url, options.key, Path(work))
            command = [
                options.schemathesis,
                "run",
                str(document),
                "--url",
                url,
                "--checks",
                "all",
                "--continue-on-failure",
            ]
            command += ["--max-time", str(options.seconds), "--seed", str(options.seed), "--request-timeout", "60"]
            command += [f"--header={name}:{value}" for name, value in headers(options.key).items()]
            done = subprocess.run(command, cwd=work, check=False)
    sys.exit(done.returncode != 0)


if __name__ == "__main__":
    main()
