"""Snippets of first calls to copy: curl, the official SDKs, environment variables. Model names are quoted for each
language."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

QUESTION = "What is the capital of France?"
BEGINNING = "The capital of France is"
ROOT = "\0"
"""Placeholder of the server's address until the text is escaped: the page replaces it with the browser's view."""


@dataclass(frozen=True)
class Snippets:
    """Snippets for one server: the model's name, whether an API key is needed, whether the model can chat, and the
    server's `root` address, without a slash at its end. JSON is broken into lines of `width` characters."""

    model: str
    key_needed: bool
    chats: bool
    root: str
    width: int = 80

    def html(self, code: str) -> str:
        """Return `code` as HTML, in which the page's script can set the address."""
        return escape(code).replace(ROOT, f"<span data-root>{escape(self.root)}</span>")

    def all(self) -> dict[str, str]:
        """Return each snippet as HTML, by the name of its tab."""
        code = {
            "curl": self._curl(),
            "Python": self._python(),
            "JavaScript": self._javascript(),
            "env": self._env(),
        }
        return {name: self.html(text) for name, text in code.items()}

    def post(self, path: str, body: Mapping[str, Any]) -> str:
        """Return a curl command that sends `body` to `path`."""
        lines = [f"curl {ROOT}{path}", "-H 'Content-Type: application/json'", *self._auth()]
        data = shlex.quote(pretty(body, "  ", self.width))
        return " \\\n  ".join([*lines, f"-d {data}"])

    def without_body(self, path: str, method: str = "GET") -> str:
        """Return a curl command that sends no body to `path`."""
        options = [] if method == "GET" else [f"-X {method}"]
        return " \\\n  ".join([f"curl {ROOT}{path}", *options, *self._auth()])

    def _auth(self) -> list[str]:
        return ['-H "Authorization: Bearer $TREADLE_API_KEY"'] if self.key_needed else []

    def _curl(self) -> str:
        if self.chats:
            body = {
                "model": self.model,
                "messages": [{"role": "user", "content": QUESTION}],
                "temperature": 0,
                "max_tokens": 100,
            }
            return self.post("/v1/chat/completions", body)
        return self.post(
            "/v1/completions", {"model": self.model, "prompt": BEGINNING, "temperature": 0, "max_tokens": 100}
        )

    def _python(self) -> str:
        key = 'os.environ["TREADLE_API_KEY"]' if self.key_needed else '"none"'
        head = ("import os\n\n" if self.key_needed else "") + "from openai import OpenAI\n\n"
        head += f'client = OpenAI(base_url="{ROOT}/v1", api_key={key})\n'
        if self.chats:
            return head + (
                "stream = client.chat.completions.create(\n"
                f"    model={literal(self.model)},\n"
                f'    messages=[{{"role": "user", "content": {literal(QUESTION)}}}],\n'
                "    temperature=0,\n    max_tokens=100,\n    stream=True,\n)\n"
                "for chunk in stream:\n"
                '    print(chunk.choices[0].delta.content or "", end="", flush=True)'
            )
        return head + (
            "answer = client.completions.create(\n"
            f"    model={literal(self.model)}, prompt={literal(BEGINNING)}, temperature=0, max_tokens=100\n)\n"
            "print(answer.choices[0].text)"
        )

    def _javascript(self) -> str:
        key = "process.env.TREADLE_API_KEY" if self.key_needed else '"none"'
        head = (
            f'import OpenAI from "openai";\n\nconst client = new OpenAI({{ baseURL: "{ROOT}/v1", apiKey: {key} }});\n'
        )
        if self.chats:
            return head + (
                "const stream = await client.chat.completions.create({\n"
                f"  model: {literal(self.model)},\n"
                f'  messages: [{{ role: "user", content: {literal(QUESTION)} }}],\n'
                "  temperature: 0,\n  max_tokens: 100,\n  stream: true,\n});\n"
                "for await (const chunk of stream) {\n"
                '  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");\n}'
            )
        return head + (
            "const answer = await client.completions.create({\n"
            f"  model: {literal(self.model)},\n"
            f"  prompt: {literal(BEGINNING)},\n"
            "  temperature: 0,\n  max_tokens: 100,\n});\n"
            "console.log(answer.choices[0].text);"
        )

    def _env(self) -> str:
        key = '"$TREADLE_API_KEY"' if self.key_needed else "none"
        return f"# the official SDKs read both\nexport OPENAI_BASE_URL={ROOT}/v1\nexport OPENAI_API_KEY={key}"


def literal(text: str) -> str:
    """Return `text` as a string literal of both Python and JavaScript."""
    return json.dumps(text, ensure_ascii=False)


def pretty(value: Any, indent: str = "", width: int = 80) -> str:
    """Format JSON for people: values wider than `width` characters are broken over more lines, which begin with
    `indent`."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or len(flat) + len(indent) <= width:
        return flat
    inner = indent + "  "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {pretty(item, inner, width)}" for key, item in value.items()]
        return "{\n" + ",\n".join(inner + part for part in parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + pretty(item, inner, width) for item in value) + f"\n{indent}]"
