"""Three-turn chats through popular clients, against one server: a table of their outcomes.

    python benchmarks/clients.py --url http://127.0.0.1:8000/v1 [--model NAME] [--key KEY] [--only WORD] [--json FILE]

Each client sends back the whole messages it received, with every key that its library put there, as agents do. A case
is one client with one way to call it; it passes when all turns were answered. Clients that are not installed are named
and count as skipped. Exit code 1 if a case failed. To install them, in an environment of their own:

    python -m venv clients && clients/bin/pip install openai litellm langchain-openai llm
    npm install openai ai @ai-sdk/openai-compatible     # node is looked for in PATH, packages in --node-modules
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

QUESTIONS = ("Name a colour.", "And another one?", "Which of them did you name first?")
LITELLM_PREFIXES = (
    "openai",
    "hosted_vllm",
    "lm_studio",
    "litellm_proxy",
    "custom_openai",
    "llamafile",
    "docker_model_runner",
)
NODE_SCRIPT = Path(__file__).with_name("clients.mjs")
TIMEOUT_S = 300


@dataclass(frozen=True)
class Server:
    """The server under test. `max_tokens` is the length of each answer."""

    url: str
    model: str
    key: str
    max_tokens: int


@dataclass
class Outcome:
    """One case: the turns that were answered, and the error that ended it."""

    client: str
    way: str
    turns: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def passed(self) -> bool:
        return self.turns == len(QUESTIONS) and not self.error


Chat = Callable[[Server], Iterator[str]]
"""Holds the conversation; yields each answer's text."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


# openai ---------------------------------------------------------------------------------------------------------


def openai_sync(server: Server) -> Iterator[str]:
    import openai

    client = openai.OpenAI(base_url=server.url, api_key=server.key)
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append(user(question))
        answer = client.chat.completions.create(model=server.model, messages=messages, max_tokens=server.max_tokens)
        messages.append(answer.choices[0].message.model_dump() | {"finish_reason": answer.choices[0].finish_reason})
        yield answer.choices[0].message.content or ""


def openai_stream(server: Server) -> Iterator[str]:
    import openai

    client = openai.OpenAI(base_url=server.url, api_key=server.key)
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append(user(question))
        with client.chat.completions.create(
            model=server.model,
            messages=messages,
            max_completion_tokens=server.max_tokens,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            chunks = list(stream)
        assert chunks[-1].usage is not None, "the usage was asked for"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        messages.append({**chunks[0].choices[0].delta.model_dump(), "content": text})
        yield text


def openai_async(server: Server) -> Iterator[str]:
    yield from asyncio.run(_openai_async(server, stream=False))


def openai_async_stream(server: Server) -> Iterator[str]:
    yield from asyncio.run(_openai_async(server, stream=True))


async def _openai_async(server: Server, *, stream: bool) -> list[str]:
    import openai

    messages: list[Any] = []
    async with openai.AsyncOpenAI(base_url=server.url, api_key=server.key) as client:
        for question in QUESTIONS:
            messages.append(user(question))
            common: Any = {"model": server.model, "messages": messages, "max_tokens": server.max_tokens}
            if stream:
                chunks = [c async for c in await client.chat.completions.create(**common, stream=True)]
                text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
                messages.append({**chunks[0].choices[0].delta.model_dump(), "content": text})
            else:
                answer = await client.chat.completions.create(**common)
                messages.append(answer.choices[0].message.model_dump())
    return [message["content"] for message in messages[1::2]]


# litellm --------------------------------------------------------------------------------------------------------


def litellm_chat(prefix: str, *, stream: bool) -> Chat:
    def chat(server: Server) -> Iterator[str]:
        import litellm

        litellm.suppress_debug_info = True
        messages: list[Any] = []
        for question in QUESTIONS:
            messages.append(user(question))
            answer = litellm.completion(
                model=f"{prefix}/{server.model}",
                api_base=server.url,
                api_key=server.key,
                messages=messages,
                max_tokens=server.max_tokens,
                stream=stream,
            )
            if stream:
                answer = litellm.stream_chunk_builder(list(answer), messages=messages)
            messages.append(answer.choices[0].message.model_dump())
            yield answer.choices[0].message.content or ""

    return chat


# langchain and llm ----------------------------------------------------------------------------------------------


def langchain_chat(*, stream: bool) -> Chat:
    def chat(server: Server) -> Iterator[str]:
        from langchain_core.messages import HumanMessage
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(
            base_url=server.url, api_key=server.key, model=server.model, max_tokens=server.max_tokens, stream_usage=True
        )
        messages: list[Any] = []
        for question in QUESTIONS:
            messages.append(HumanMessage(question))
            if stream:
                chunks = list(model.stream(messages))
                answer = chunks[0]
                for chunk in chunks[1:]:
                    answer += chunk
            else:
                answer = model.invoke(messages)
            messages.append(answer)
            yield str(answer.content)

    return chat


def llm_chat(*, stream: bool) -> Chat:
    """Run the chat in a process of its own, as `llm` reads its folder when it is imported."""

    def chat(server: Server) -> Iterator[str]:
        with tempfile.TemporaryDirectory() as folder:
            entry = {"model_id": "treadle", "model_name": server.model, "api_base": server.url, "can_stream": True}
            Path(folder, "extra-openai-models.yaml").write_text(json.dumps([entry]), encoding="utf-8")
            Path(folder, "keys.json").write_text(json.dumps({"openai": server.key}), encoding="utf-8")
            arguments = json.dumps([QUESTIONS, stream, server.max_tokens])
            yield from _lines([sys.executable, "-c", LLM_PROGRAM, arguments], {"LLM_USER_PATH": folder})

    return chat


LLM_PROGRAM = """
import json, sys, llm
questions, stream, max_tokens = json.loads(sys.argv[1])
talk = llm.get_model("treadle").conversation()
for question in questions:
    print(json.dumps(talk.prompt(question, stream=stream, max_tokens=max_tokens).text()), flush=True)
"""


# JavaScript -----------------------------------------------------------------------------------------------------


def node_chat(package: str, way: str, modules: Path) -> Chat:
    def chat(server: Server) -> Iterator[str]:
        arguments = json.dumps({**asdict(server), "questions": QUESTIONS, "package": package, "way": way})
        with tempfile.TemporaryDirectory() as folder:  # node finds packages only next to the script
            script = shutil.copy(NODE_SCRIPT, folder)
            Path(folder, "node_modules").symlink_to(modules.resolve())
            yield from _lines(["node", script, arguments], {})

    return chat


def _lines(command: list[str], environment: dict[str, str]) -> Iterator[str]:
    """Yield each line that the program writes, a JSON string. Raises RuntimeError with the end of its output if it
    fails."""
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    yield from (json.loads(line) for line in done.stdout.splitlines())
    if done.returncode:
        raise RuntimeError(" ".join(done.stderr.split())[-400:])


# The table ------------------------------------------------------------------------------------------------------


def cases(modules: Path) -> Iterator[tuple[str, str, str | Path, Chat]]:
    """Yield client, way to call it, requirement (a Python package, a folder of a JavaScript one), and the chat."""
    for way, chat in (
        ("create", openai_sync),
        ("stream", openai_stream),
        ("async create", openai_async),
        ("async stream", openai_async_stream),
    ):
        yield "openai (Python)", way, "openai", chat
    for prefix in LITELLM_PREFIXES:
        for stream in (False, True):
            yield f"litellm {prefix}/", _way(stream), "litellm", litellm_chat(prefix, stream=stream)
    for stream in (False, True):
        yield "langchain ChatOpenAI", _way(stream), "langchain_openai", langchain_chat(stream=stream)
        yield "llm", _way(stream), "llm", llm_chat(stream=stream)
    for way in ("create", "stream"):
        yield "openai (JavaScript)", way, modules / "openai", node_chat("openai", way, modules)
    for way in ("generateText", "streamText"):
        yield "Vercel AI SDK", way, modules / "ai", node_chat("ai", way, modules)


def _way(stream: bool) -> str:
    return "stream" if stream else "create"


def installed(need: str | Path) -> bool:
    if isinstance(need, Path):
        return need.is_dir() and shutil.which("node") is not None
    return importlib.util.find_spec(need) is not None


def version(need: str | Path) -> str:
    if isinstance(need, Path):
        return str(json.loads((need / "package.json").read_text(encoding="utf-8"))["version"])
    return importlib.metadata.version(need.replace("_", "-"))


def run(outcome: Outcome, chat: Chat, server: Server) -> None:
    """Hold the chat, and record its progress."""
    began = time.perf_counter()
    try:
        for _ in chat(server):
            outcome.turns += 1
    except Exception as error:  # any error of a client is its result
        outcome.error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    outcome.seconds = time.perf_counter() - began


def served_model(url: str, key: str) -> str:
    request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the first one that the server lists")
    parser.add_argument("--key", default="none", help="the API key, where the server has one")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose client has this in its name")
    parser.add_argument("--node-modules", type=Path, default=Path("node_modules"), metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the outcomes here")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    server = Server(
        options.url, options.model or served_model(options.url, options.key), options.key, options.max_tokens
    )
    outcomes, missing = [], set()
    print(f"| client | version | way | turns of {len(QUESTIONS)} | result |\n|---|---|---|---|---|")
    for client, way, need, chat in cases(options.node_modules):
        if options.only not in client:
            continue
        if not installed(need):
            missing.add(client)
            continue
        outcome = Outcome(client, way)
        run(outcome, chat, server)
        outcomes.append(outcome)
        result = "passed" if outcome.passed else f"**failed**: {outcome.error}"
        print(f"| {client} | {version(need)} | {way} | {outcome.turns} | {result} |", flush=True)
    if missing:
        print(f"\nNot installed: {', '.join(sorted(missing))}")
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2), encoding="utf-8")
    sys.exit(any(not outcome.passed for outcome in outcomes) or not outcomes)


if __name__ == "__main__":
    main()
