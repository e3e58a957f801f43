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
- A 503 is no failure: a `timeout` may be too short for an answer to begin.
- Tools have names of their own, and are chosen by "none" or "auto".
- At most one field asks for a format of the answer, and grammars, patterns and JSON Schemas are from a list of valid
  ones (any other may be a documented 400).
- Requests for responses continue no stored one, and so have an input. No response is cancelled or streamed again, as
  only those in the background can be, nor is a conversation summarized in the few tokens that the server allows.
- A refusal may be for a body that is too large (413), where a schema was broken by a very long list.

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
from itertools import combinations
from pathlib import Path
from typing import Any

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
FORMATS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "format"),
)
VALID_SCHEMAS: list[Any] = [{"type": "object"}, {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}}]
VALID_FUNCTION = {"name": "find", "description": "x", "parameters": VALID_SCHEMAS[1]}
VALID_FIELDS: dict[str, list[Any]] = {
    "guided_regex": ["[a-z]{1,9}", None],
    "guided_grammar": ['start: "a" | "b"', None],
    "tools": [[], [{"type": "function", "function": VALID_FUNCTION}], None],
    "functions": [[], None],
    "continue_final_message": [False, None],
    "tool_choice": ["none", "auto", None],
    "function_call": ["none", "auto", None],
}
VALID_FORMAT = {"type": "json_schema", "schema": VALID_SCHEMAS[1]}
VALID_TOOL = {"name": "find", "input_schema": VALID_SCHEMAS[1]}
VALID_ANTHROPIC: dict[str, list[Any]] = {
    "tools": [[], [VALID_TOOL], [VALID_TOOL, {"type": "bash_20250124"}], None],
    "tool_choice": [{"type": "auto"}, {"type": "none"}, None],
    "output_config": [{"effort": "low"}, {"format": VALID_FORMAT}, None],
    "output_format": [None],
}
"""The same in Anthropic's dialect, whose fields have the same names."""
RESPONSE_FIELDS: dict[str, list[Any]] = {
    "tools": [[], [{"type": "function", **VALID_FUNCTION}], [{"type": "custom", "name": "patch"}], None],
    "tool_choice": ["none", "auto", None],
    "text": [None, {"format": {"type": "json_schema", "name": "a", "schema": VALID_SCHEMAS[1]}, "verbosity": "low"}],
    "previous_response_id": [None],
    "store": [True, None],
}
MOST_ITEMS = 256  # more are, as texts, longer than the context
UNCHECKED = ("/v1/responses/compact", "/v1/responses/{response_id}/cancel")
VALID_TAG = {"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}], "triggers": ["<a>"]}
VALID_TEXTS = {
    "regex": ["[a-z]{1,9}"],
    "grammar": ['start: "a" | "b"'],
    "structural_tag": [json.dumps({"type": "structural_tag", **VALID_TAG})],
}
ABSENT = {"enum": [None, False]}
NOT_NULL = {"not": {"type": "null"}}
STATUSES = ["400", "401", "403", "404", "406", "413", "415", "422", "428", "5xx"]
SCHEMATHESIS = f"""[checks]
negative_data_rejection.expected-statuses = {json.dumps(STATUSES)}
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "503"]
"""


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
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
        else:
            return
    sys.exit("the server did not start: its log is above")


def checkable(url: str, key: str | None, folder: Path) -> Path:
    """Write the server's OpenAPI document to a file of `folder`, without values that may be a documented refusal."""
    with urllib.request.urlopen(urllib.request.Request(f"{url}/openapi.json", headers=headers(key))) as answer:
        document = json.load(answer)
    for schema in document["components"]["schemas"].values():
        _restrict(schema, _valid_fields(schema.get("properties", {})))
    response = document["components"]["schemas"]["ResponseRequest"]
    response["required"] = ["model", "input"]
    items = response["properties"]["input"]["anyOf"][1]
    items["maxItems"] = MOST_ITEMS
    kinds = items["items"]["anyOf"]
    kinds[:] = [kind for kind in kinds if kind["properties"]["type"] != {"const": "reasoning"}]  # alone it is no input
    for unchecked in UNCHECKED:
        del document["paths"][unchecked]
    for query in document["paths"]["/v1/responses/{response_id}"]["get"]["parameters"]:
        if query["name"] == "stream":
            query["schema"] = {"const": "false"}
    path = folder / "openapi.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def _valid_fields(fields: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the valid values of the dialect that a request with `fields` belongs to."""
    if "output_config" in fields:
        return VALID_ANTHROPIC
    return RESPONSE_FIELDS if "previous_response_id" in fields and "tools" in fields else VALID_FIELDS


def _restrict(schema: dict[str, Any], valid: dict[str, list[Any]]) -> None:
    fields = schema.get("properties", {})
    formats = [name for name in FORMATS if name in fields]
    for name in formats:
        fields[name] = _with_valid_grammars(fields[name])
    for name in fields.keys() & valid.keys() if "model" in fields else ():
        fields[name] = {"enum": valid[name]}
    pairs = [{"required": pair, "properties": dict.fromkeys(pair, NOT_NULL)} for pair in combinations(formats, 2)]
    if pairs:  # in place of what "not" is about: schemathesis can't generate from both
        schema["not"] = {"anyOf": pairs}


def _with_valid_grammars(value: Any) -> Any:
    """Return the schema of a field, in which the texts and schemas that describe an answer are valid ones."""
    if isinstance(value, list):
        return [_with_valid_grammars(one) for one in value]
    if not isinstance(value, dict):
        return value
    if str(value.get("description", "")).startswith("A JSON Schema"):
        return {"enum": VALID_SCHEMAS}
    found = {key: _with_valid_grammars(one) for key, one in value.items()}
    if {"enum": VALID_SCHEMAS} in found.get("anyOf", ()):  # a schema may also be a text, if it is JSON
        found["anyOf"] = [kind for kind in found["anyOf"] if kind != {"type": "string"}]
    for key, texts in VALID_TEXTS.items():
        if found.get("properties", {}).get(key, ABSENT) != ABSENT:
            found["properties"][key] = {"enum": texts}
    return found


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
            document = checkable(url, options.key, Path(work))
            Path(work, "schemathesis.toml").write_text(SCHEMATHESIS, encoding="utf-8")
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
