"""Snippets of first calls to copy: curl, the official SDKs, environment variables. Model names are quoted for each
language."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from html import escape
from typing import Any

QUESTION = "What is the capital of France?"
BEGINNING = "The capital of France is"
TEXTS = ["The capital of France is Paris.", "A loom weaves cloth."]
ROOT = "\0"
"""Placeholder of the server's address until the text is escaped: the page replaces it with the browser's view."""


class FirstCall(Enum):
    """The call that a model is shown with: one that it answers."""

    CHAT = auto()
    COMPLETION = auto()
    EMBEDDING = auto()


@dataclass(frozen=True)
class Snippets:
    """Snippets for one server: the model's name, whether an API key is needed, the first call, and the server's `root`
    address, without a slash at its end. JSON is broken into lines of `width` characters."""

    model: str
    key_needed: bool
    first: FirstCall
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
        if self.first is FirstCall.EMBEDDING:
            return self.post("/v1/embeddings", {"model": self.model, "input": TEXTS})
        limits = {"temperature": 0, "max_tokens": 100}
        if self.first is FirstCall.COMPLETION:
            return self.post("/v1/completions", {"model": self.model, "prompt": BEGINNING, **limits})
        messages = [{"role": "user", "content": QUESTION}]
        return self.post("/v1/chat/completions", {"model": self.model, "messages": messages, **limits})

    def _python(self) -> str:
        key = 'os.environ["TREADLE_API_KEY"]' if self.key_needed else '"none"'
        head = ("import os\n\n" if self.key_needed else "") + "from openai import OpenAI\n\n"
        head += f'client = OpenAI(base_url="{ROOT}/v1", api_key={key})\n'
        if self.first is FirstCall.EMBEDDING:
            return head + (
                "answer = client.embeddings.create(\n"
                f"    model={literal(self.model)},\n    input={literal(TEXTS)},\n)\n"
                "print([one.embedding for one in answer.data])"
            )
        if self.first is FirstCall.CHAT:
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
        if self.first is FirstCall.EMBEDDING:
            return head + (
                "const answer = await client.embeddings.create({\n"
                f"  model: {literal(self.model)},\n  input: {literal(TEXTS)},\n}});\n"
                "console.log(answer.data.map((one) => one.embedding));"
            )
        if self.first is FirstCall.CHAT:
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


def literal(value: str | list[str]) -> str:
    """Return `value` as a literal of both Python and JavaScript."""
    return json.dumps(value, ensure_ascii=False)


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
