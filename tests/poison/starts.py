"""Serving a hostile folder as a user does: a `treadle serve` of its own, and what came of it."""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from tests.poison.hostile import canary_of, spoil
from tests.serve.server import Serve
from tests.support.tiny import make_tiny

START_S = 120.0
STOP_S = 60.0
PAUSE_S = 0.05
OPTIONS = ("--max-running", "2", "--memory", "64MiB")
CHAT = {"messages": [{"role": "user", "content": "aaaa"}], "max_tokens": 2}


@dataclass(frozen=True)
class Start:
    """How one start went: `code` is the exit status or None while it ran on, `line` its one line of refusal, `answer`
    the status of a completion and `chat` of a chat, `silent` how often /health/live did not answer in two seconds;
    `ran`: code of the folder did."""

    said: str
    code: int | None
    answer: int | None
    chat: tuple[int, str] | None
    silent: int
    stopped: bool
    took_s: float
    ran: bool = False

    @property
    def line(self) -> str:
        lines = re.findall(r"^treadle: error: (.*)$", self.said, re.M)
        return lines[0] if len(lines) == 1 else ""

    def wrong(self, case: Mapping[str, Any]) -> str:
        """What is wrong with it, given what the case wants; empty where nothing is."""
        if self.ran:
            return "code of the folder was run"
        if "Traceback" in self.said:
            return f"a raw traceback:\n{self.said[-2000:]}"
        if self.silent:
            return f"/health/live did not answer {self.silent} times"
        return self._wrong_service(case) if case.get("serves") else self._wrong_refusal(case)

    def _wrong_service(self, case: Mapping[str, Any]) -> str:
        if self.answer != 200:
            return f"it does not serve: {self.code}, {self.answer}, {self.said[-500:]}"
        if not self.stopped:
            return "SIGTERM does not end it"
        wanted = case.get("chat", 200)
        if self.chat is None or self.chat[0] != wanted:
            return f"a chat got {self.chat}, wanted {wanted}"
        lacking = [word for word in case.get("says", ()) if word not in self.said + self.chat[1]]
        return f"it does not say {lacking}: {self.said} {self.chat[1]}" if lacking else ""

    def _wrong_refusal(self, case: Mapping[str, Any]) -> str:
        if self.code is None:
            return f"no end within {self.took_s:.0f} s (served: {self.answer}): {self.said[-500:]}"
        if self.code != 1 or not self.line:
            return f"ended with {self.code} without one line of refusal: {self.said[-500:]}"
        lacking = [word for word in case["says"] if word not in self.line]
        return f"its line does not say {lacking}: {self.line}" if lacking else ""


def start(case: Mapping[str, Any], *options: str, within_s: float = START_S) -> Start:
    """Serve a good model that was changed as `case` says, until it ends, or has answered and taken a SIGTERM."""
    with tempfile.TemporaryDirectory() as root:
        folder = make_tiny(Path(root) / "model", context=512)
        spoil(folder, case)
        log = Path(root) / "log"
        with Serve(folder, *OPTIONS, *options, log=log) as serve:
            went = _watched(serve, within_s)
        return replace(went, ran=canary_of(folder).exists())


def _watched(serve: Serve, within_s: float) -> Start:
    began, silent, answer, chat = time.monotonic(), 0, None, None
    while serve.process.poll() is None and time.monotonic() < began + within_s:
        silent += _is_silent(serve)
        if _is_ready(serve):
            answer = serve.complete("aaaa").status_code
            reply = serve.http.post(f"{serve.url}/v1/chat/completions", json=CHAT)
            chat = (reply.status_code, reply.text[:300])
            break
        time.sleep(PAUSE_S)
    took_s, code = time.monotonic() - began, serve.process.poll()
    stopped = code is not None or _stops(serve)
    return Start(serve.said, code, answer, chat, silent, stopped, took_s)


def _is_silent(serve: Serve) -> bool:
    """Whether a server that listens and lives leaves /health/live without an answer."""
    if "listens on" not in serve.said:
        return False
    try:
        return serve.http.get(f"{serve.url}/health/live", timeout=5).status_code != 200
    except (httpx.TransportError, AssertionError):
        time.sleep(PAUSE_S)
        return not _ends(serve)


def _is_ready(serve: Serve) -> bool:
    with contextlib.suppress(httpx.TransportError, AssertionError):
        return "listens on" in serve.said and serve.is_ready()
    return False


def _ends(serve: Serve) -> bool:
    """Whether it is on its way out: its last line is written before its end."""
    with contextlib.suppress(Exception):
        serve.process.wait(STOP_S)
    return serve.process.poll() is not None


def _stops(serve: Serve) -> bool:
    serve.process.terminate()
    return _ends(serve)
