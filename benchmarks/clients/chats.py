"""Three-turn chats through SDKs and libraries.

Each sends back the whole messages it received, with every key that its library put there, as agents do. A case is one
client with one way to call it; it passes when all turns were answered.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
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
    "openrouter",
)
LITELLM_ROOTS = {"anthropic": "Anthropic", "ollama_chat": "Ollama"}
"""Prefixes of litellm that take the server's address without /v1, with their APIs."""
NODE_SCRIPT = Path(__file__).with_name("chats.mjs")


@dataclass(frozen=True)
class Server:
    """The server under test: its URL ends in /v1. `max_tokens` is the length of each answer."""

    url: str
    model: str
    key: str
    max_tokens: int

    @property
    def root(self) -> str:
        """The server's address without a path."""
        return self.url.removesuffix("/v1")


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


def openai_responses(*, stream: bool) -> Chat:
    def chat(server: Server) -> Iterator[str]:
        import openai

        client = openai.OpenAI(base_url=server.url, api_key=server.key)
        items: list[Any] = []
        for question in QUESTIONS:
            items.append(user(question))
            some: Any = {"model": server.model, "input": items, "max_output_tokens": server.max_tokens}
            if stream:
                with client.responses.stream(**some) as events:
                    seen: list[Any] = list(events)
                # The limit of tokens ends the answer, and the SDK's get_final_response takes complete ones alone.
                assert seen[0].type == "response.created", seen[0].type
                assert seen[-1].type in ("response.completed", "response.incomplete"), seen[-1].type
                answer = seen[-1].response
            else:
                answer = client.responses.create(**some)
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            yield answer.output_text

    return chat


# anthropic and ollama -------------------------------------------------------------------------------------------


def anthropic_chat(*, stream: bool) -> Chat:
    def chat(server: Server) -> Iterator[str]:
        import anthropic

        client = anthropic.Anthropic(base_url=server.root, api_key=server.key)
        messages: list[Any] = []
        for question in QUESTIONS:
            messages.append(user(question))
            some: Any = {"model": server.model, "messages": messages}
            counted = client.messages.count_tokens(**some).input_tokens
            if stream:
                with client.messages.stream(**some, max_tokens=server.max_tokens) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(**some, max_tokens=server.max_tokens)
            used = answer.usage
            read = (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)
            assert used.input_tokens + read == counted, (
                f"{used.input_tokens} + {read} tokens, not the {counted} counted"
            )
            messages.append({"role": "assistant", "content": answer.model_dump()["content"]})
            yield answer.content[0].text

    return chat


def ollama_chat(*, stream: bool) -> Chat:
    def chat(server: Server) -> Iterator[str]:
        import ollama

        client = ollama.Client(server.root)
        messages: list[Any] = []
        for question in QUESTIONS:
            messages.append(user(question))
            some: Any = {"model": server.model, "messages": messages, "options": {"num_predict": server.max_tokens}}
            if stream:
                parts = list(client.chat(**some, stream=True))
                assert parts[-1].done, "the last line is not the end"
                text = "".join(part.message.content or "" for part in parts)
                messages.append({**parts[0].message.model_dump(), "content": text})
            else:
                answer = client.chat(**some)
                messages.append(answer.message.model_dump())
                text = answer.message.content or ""
            yield text

    return chat


# litellm --------------------------------------------------------------------------------------------------------


def litellm_chat(prefix: str, *, stream: bool) -> Chat:
    def chat(server: Server) -> Iterator[str]:
        import litellm

        base = server.root if prefix in LITELLM_ROOTS else server.url

        litellm.suppress_debug_info = True
        messages: list[Any] = []
        for question in QUESTIONS:
            messages.append(user(question))
            answer = litellm.completion(
                model=f"{prefix}/{server.model}",
                api_base=base,
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


def chat_openai(server: Server) -> Any:
    from langchain_openai import ChatOpenAI

    some = {"base_url": server.url, "api_key": server.key, "model": server.model, "stream_usage": True}
    return ChatOpenAI(**some, max_tokens=server.max_tokens)


def chat_anthropic(server: Server) -> Any:
    from langchain_anthropic import ChatAnthropic

    some = {"base_url": server.root, "api_key": server.key, "model": server.model}
    return ChatAnthropic(**some, max_tokens=server.max_tokens)


def chat_ollama(server: Server) -> Any:
    from langchain_ollama import ChatOllama

    return ChatOllama(base_url=server.root, model=server.model, num_predict=server.max_tokens)


def langchain_chat(model_of: Callable[[Server], Any], *, stream: bool) -> Chat:
    def chat(server: Server) -> Iterator[str]:
        from langchain_core.messages import HumanMessage

        model = model_of(server)
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
    def chat(server: Server) -> Iterator[str]:
        with tempfile.TemporaryDirectory() as folder:
            entry = {"model_id": "treadle", "model_name": server.model, "api_base": server.url, "can_stream": True}
            Path(folder, "extra-openai-models.yaml").write_text(json.dumps([entry]), encoding="utf-8")
            Path(folder, "keys.json").write_text(json.dumps({"openai": server.key}), encoding="utf-8")
            os.environ["LLM_USER_PATH"] = folder
            import llm

            talk = llm.get_model("treadle").conversation()
            for question in QUESTIONS:
                yield talk.prompt(question, stream=stream, max_tokens=server.max_tokens).text()

    return chat


# JavaScript -----------------------------------------------------------------------------------------------------


class Node:
    """Process of node that holds chats through JavaScript packages, one after the other. The first chat starts it, and
    one that fails ends it."""

    def __init__(self, modules: Path) -> None:
        self._modules = modules
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._idle: subprocess.Popen[str] | None = None

    def chat(self, package: str, way: str) -> Chat:
        """Return the chat through a package."""

        def chat(server: Server) -> Iterator[str]:
            process, self._idle = self._idle or self._start(), None
            assert process.stdin is not None
            assert process.stdout is not None
            request = {**asdict(server), "root": server.root, "questions": QUESTIONS, "package": package, "way": way}
            try:
                print(json.dumps(request), file=process.stdin, flush=True)
                for line in process.stdout:
                    match json.loads(line):
                        case str(answer):
                            yield answer
                        case {"error": str(error)}:
                            raise RuntimeError(error)
                        case {}:
                            self._idle = process
                            return
                raise RuntimeError("node has ended")
            finally:
                if self._idle is None:
                    process.kill()
                    process.wait()

        return chat

    def _start(self) -> subprocess.Popen[str]:
        if self._folder is None:  # node finds packages only next to the script
            self._folder = tempfile.TemporaryDirectory()
            shutil.copy(NODE_SCRIPT, self._folder.name)
            Path(self._folder.name, "node_modules").symlink_to(self._modules.resolve())
        command = ["node", str(Path(self._folder.name, NODE_SCRIPT.name))]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


# The cases ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A chat through one client: its name, API and way to call it, and what it needs (a Python package, or the folder
    of a JavaScript one)."""

    client: str
    api: str
    way: str
    need: str | Path
    chat: Chat


def cases(modules: Path) -> Iterator[Case]:
    """Yield all cases. JavaScript packages are in `modules`."""
    yield from _python_cases()
    yield from _litellm_cases()
    node = Node(modules)
    for name, package, api, ways in (
        ("openai (JavaScript)", "openai", "chat", ("create", "stream", "create tools", "stream tools")),
        (
            "openai (JavaScript)",
            "openai",
            "Responses",
            ("responses", "responses stream", "responses tools", "responses stream tools"),
        ),
        ("@anthropic-ai/sdk", "@anthropic-ai/sdk", "Anthropic", ("create", "stream", "create tools", "stream tools")),
        ("ollama (JavaScript)", "ollama", "Ollama", ("create", "stream")),
        ("Vercel AI SDK", "ai", "chat", ("generateText", "streamText")),
        ("Vercel AI SDK, anthropic", "ai", "Anthropic", ("generateText anthropic", "streamText anthropic")),
        ("Vercel AI SDK, openai", "ai", "Responses", ("generateText openai", "streamText openai")),
    ):
        for way in ways:
            yield Case(name, api, way, modules / package, node.chat(package, way))


def _python_cases() -> Iterator[Case]:
    for way, chat in (
        ("create", openai_sync),
        ("stream", openai_stream),
        ("async create", openai_async),
        ("async stream", openai_async_stream),
    ):
        yield Case("openai (Python)", "chat", way, "openai", chat)
    for stream in (False, True):
        way = _way(stream)
        yield Case("openai (Python)", "Responses", f"responses {way}", "openai", openai_responses(stream=stream))
        yield Case("anthropic (Python)", "Anthropic", way, "anthropic", anthropic_chat(stream=stream))
        yield Case("ollama (Python)", "Ollama", way, "ollama", ollama_chat(stream=stream))
        for name, api, package, model_of in (
            ("ChatOpenAI", "chat", "langchain_openai", chat_openai),
            ("ChatAnthropic", "Anthropic", "langchain_anthropic", chat_anthropic),
            ("ChatOllama", "Ollama", "langchain_ollama", chat_ollama),
        ):
            yield Case(f"LangChain {name}", api, way, package, langchain_chat(model_of, stream=stream))
        yield Case("llm", "chat", way, "llm", llm_chat(stream=stream))


def _litellm_cases() -> Iterator[Case]:
    for prefix in (*LITELLM_PREFIXES, *LITELLM_ROOTS):
        for stream in (False, True):
            api = LITELLM_ROOTS.get(prefix, "chat")
            yield Case("litellm", api, f"{prefix}/ {_way(stream)}", "litellm", litellm_chat(prefix, stream=stream))


def _way(stream: bool) -> str:
    return "stream" if stream else "create"


def installed(need: str | Path) -> bool:
    """Whether a package is there."""
    if isinstance(need, Path):
        return need.is_dir() and shutil.which("node") is not None
    return importlib.util.find_spec(need) is not None


def version(need: str | Path) -> str:
    """Return a package's version."""
    if isinstance(need, Path):
        return str(json.loads((need / "package.json").read_text(encoding="utf-8"))["version"])
    return importlib.metadata.version(need.replace("_", "-"))


def check(case: Case, server: Server) -> None:
    """Hold the chat of a case. Raises what its client raises, and AssertionError for a chat that ends early or has an
    answer without a text."""
    turns = list(case.chat(server))
    assert len(turns) == len(QUESTIONS), f"{len(turns)} of {len(QUESTIONS)} turns were answered"
    assert all(turns), "an answer has no text"
