"""Servers under test: those that run already, and those that are started, awaited and stopped here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import PurePath
from typing import IO, Any

from ..processes import free_port, last_lines, signal_group, wait_for_exit
from .client import Client
from .errors import BenchError
from .plan import PromptMessage, Request
from .samples import Sample, TargetInfo
from .wire import Endpoint

PORT = re.compile(r"(?<!\S)--port(?:=|\s+)(\d+)")
POLL_S = 0.2
STOP_S = 15.0


class Process:
    """Process group of a server. Its output is recorded, and it never outlives the run."""

    def __init__(self, command: str) -> None:
        """Start `command`, in a shell's words, with `NAME=value` before it for its environment. `{port}` stands for a
        free port; without it and without `--port N`, `--port` and a free port are added."""
        self.command, self.port = with_port(command)
        self._variables, self._arguments = split_environment(split_command(self.command))
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.start()

    def start(self) -> None:
        """Start it; also again, when it has ended. Raises BenchError."""
        self._log.truncate(0)
        try:
            self._process = subprocess.Popen(
                self._arguments,
                env=os.environ | self._variables,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise BenchError(
                f"'{self._arguments[0]}' can't be started: {error.strerror}: give its whole path"
            ) from error

    @property
    def ended(self) -> str:
        """Its exit in words; empty while it runs."""
        code = self._process.poll()
        return "" if code is None else f"ended with {_exit_text(code)}: {self.last_lines()}"

    def check(self) -> None:
        """Raise BenchError if it has ended."""
        if ended := self.ended:
            raise BenchError(f"'{self.command}' {ended}")

    def last_lines(self) -> str:
        """Return the end of its output."""
        self._log.seek(0)
        return last_lines(self._log.read().decode("utf-8", "replace")) or "it said nothing"

    async def stop(self) -> None:
        """Send SIGTERM, and after a while SIGKILL to the rest of its group."""
        signal_group(self._process, signal.SIGTERM)
        await wait_for_exit(self._process, STOP_S)
        self.kill()

    def kill(self) -> None:
        signal_group(self._process, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def with_port(command: str) -> tuple[str, int]:
    """Return the command with its port filled in, and the port."""
    if "{port}" in command:
        port = free_port()
        return command.replace("{port}", str(port)), port
    found = PORT.search(command)
    if found is not None:
        return command, int(found[1])
    port = free_port()
    return f"{command} --port {port}", port


def split_command(command: str) -> list[str]:
    """Split a command as a shell would. Raises BenchError."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise BenchError(f"the command {command} can't be read: {error}") from None


def split_environment(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split `NAME=value` words at the beginning from the rest. Raises BenchError if nothing is left."""
    variables: dict[str, str] = {}
    while arguments and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", arguments[0], re.DOTALL):
        name, _, value = arguments.pop(0).partition("=")
        variables[name] = value
    if not arguments:
        raise BenchError("the command to start is empty: give the server's command line")
    return variables, arguments


def program_name(command: str) -> str:
    """Return the name of a started server for tables."""
    _, arguments = split_environment(split_command(command))
    if PurePath(arguments[0]).name.startswith("python") and "-m" in arguments[:-1]:
        return arguments[arguments.index("-m") + 1]
    return PurePath(arguments[0]).name


class Target:
    """One server: its client, and the facts found out about it."""

    def __init__(self, name: str, client: Client, endpoint: Endpoint, *, process: Process | None = None) -> None:
        self.client = client
        self.endpoint: Endpoint = endpoint
        self.process = process
        self.info = TargetInfo(
            name=name,
            url=f"http://{client.host}:{client.port}",
            model="",
            command="" if process is None else process.command,
        )
        self.extra: dict[str, Any] = {}
        self.control: list[str] = []

    async def get_ready(self, timeout_s: float, model: str | None) -> None:
        """Wait until it answers a small request. Finds its model, its control routes and the fields it takes."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_until_listening()
                await self._find_model(model)
                await self._wait_until_answering()
        except TimeoutError:
            arguments = "" if self.process is None else f": {self.process.last_lines()}"
            raise BenchError(f"{self.info.name} was not ready after {timeout_s:g} s{arguments}") from None
        self.control = [path for path in ("/health", "/v1/models") if (await self.client.get(path)).status == 200]
        self.info.version = await self._version()
        self.info.compute = await self._compute()

    async def _version(self) -> str:
        """Return title and version from its API's description; empty if it has none."""
        described = (await self.client.get("/openapi.json")).json()
        info = described.get("info") if isinstance(described, dict) else None
        return f"{info.get('title', '')} {info.get('version', '')}".strip() if isinstance(info, dict) else ""

    async def _compute(self) -> str:
        """Return the compute path of a Treadle server, in one line; empty for others."""
        status = await self._status()
        compute = None if status is None else status.get("compute")
        return str(compute.get("summary", "")) if isinstance(compute, dict) else ""

    async def _wait_until_listening(self) -> None:
        while not (answer := await self.client.get("/v1/models")).status:
            if self.process is None:
                raise BenchError(f"nothing answers at {self.info.url}: start the server, or mend the URL")
            self.process.check()
            await asyncio.sleep(POLL_S)
        self._models = answer

    async def _find_model(self, requested: str | None) -> None:
        listed = self._models.json()
        cards = listed.get("data") if isinstance(listed, dict) else None
        named = (card.get("id") for card in cards if isinstance(card, dict)) if isinstance(cards, list) else ()
        self._served = [name for name in named if isinstance(name, str)]
        if requested is None and not self._served:
            raise BenchError(f"{self.info.name} lists no model at /v1/models: name it with --model")
        self.info.model = requested or self._served[0]

    async def _wait_until_answering(self) -> None:
        """Ask for two tokens until it has loaded everything; fields it does not know are left out then."""
        for extra in ({"ignore_eos": True}, {}):
            self.extra = extra
            while (sample := await self.ask("ready", "Hello", 2)).outcome == "refused" or not sample.status:
                if self.process is not None:
                    self.process.check()
                await asyncio.sleep(POLL_S)
            if sample.outcome == "ok":
                return
            if sample.status not in (400, 422):
                break
        alternatives = f" (it lists {', '.join(self._served)})" if self._served else ""
        raise BenchError(
            f"{self.info.name} does not answer for model '{self.info.model}'{alternatives}: {sample.reason}"
        )

    async def ask(self, id_: str, text: str, tokens: int) -> Sample:
        """Send one small request, outside of any round."""
        request = Request(id_, (PromptMessage("user", text),), tokens)
        sample = Sample(id=id_, role="", due_s=0.0, sent_s=0.0)
        await self.send(request, sample, asyncio.Event(), lambda _: None)
        return sample

    async def send(self, request: Request, sample: Sample, leave: asyncio.Event, on_pieces: Any) -> None:
        await self.client.send(
            request, sample, leave, model=self.info.model, endpoint=self.endpoint, extra=self.extra, on_pieces=on_pieces
        )

    async def status(self) -> dict[str, float] | None:
        """Return the counters of a Treadle server; None for other servers."""
        status = await self._status()
        return None if status is None else counters(status)

    async def _status(self) -> dict[str, Any] | None:
        answer = await self.client.get("/v1/status")
        value = answer.json() if answer.status == 200 else None
        return value if isinstance(value, dict) else None


def counters(status: dict[str, Any]) -> dict[str, float] | None:
    """Return the counters of `/v1/status` that a round changes. `rows` are the sequences admitted now; the rest only
    grow."""
    try:
        statistics = status["engine"]["statistics"]
        speculation, sparse = statistics.get("speculation", {}), statistics.get("spec_prefill", {})
        return {
            "rows": float(status["admission"]["rows"]),
            "restarts": float(status["engine"]["restarts"]),
            "prompt_tokens": float(statistics["prompt_tokens"]),
            "completion_tokens": float(statistics["completion_tokens"]),
            **{f"draft {name}": float(speculation.get(name, 0)) for name in ("rows", "drafted", "accepted")},
            **{f"sparse {name}": float(sparse.get(name, 0)) for name in ("scored_tokens", "kept_tokens")},
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


@contextlib.asynccontextmanager
async def started(command: str | None) -> AsyncIterator[Process | None]:
    """Context manager of the process of `command`; None for None."""
    if command is None:
        yield None
        return
    process = Process(command)
    try:
        yield process
        await process.stop()
    except BaseException:
        process.kill()
        raise
