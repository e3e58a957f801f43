"""Requests in the form of clients that do not run headless: editors, and a web page.

Each file of `recorded/` has the fields that a client sends with every request, and its forms of messages. The scripted
agent answers with a call; the result goes back in the client's form; the agent's last words must stream in pieces, also
beside tools.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.clients.agent import CHECKED, Script
from benchmarks.clients.programs import LAST, MODEL, TASK, Place
from benchmarks.clients.results import Row

FOLDER = Path(__file__).with_name("recorded")
LIMIT_S = 60


def recordings() -> list[dict[str, Any]]:
    """Return the recorded clients, each with its marker."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
    return [{**one, "marker": f"[task of {one['title']}]"} for one in found]


def script(recording: dict[str, Any]) -> Script:
    """Return the model's turns for a recorded client."""
    call = recording["call"]
    return Script([(call["name"], call["arguments"])], LAST)


def run(recording: dict[str, Any], place: Place) -> Row:
    """Play a client's requests, and judge the answers."""
    began, error = time.perf_counter(), ""
    try:
        _play(recording, place.url)
    except urllib.error.HTTPError as failure:
        error = f"status {failure.code}: {failure.read().decode(errors='replace')[:200]}"
    except (AssertionError, OSError, ValueError, KeyError) as failure:
        error = f"{type(failure).__name__}: {failure}"[:300]
    seconds = round(time.perf_counter() - began, 1)
    case = "call a tool, answer"
    return Row("client", recording["title"], recording["version"], "chat", case, not error, error, seconds)


def _play(recording: dict[str, Any], url: str) -> None:
    if recording["models"]:
        listed = json.loads(_open(f"{url}/v1/models", None).read())
        assert MODEL in {card["id"] for card in listed["data"]}, "the model is not listed"
    task = f"{recording['marker']} {TASK}"
    user = json.loads(json.dumps(recording["user"]).replace("{task}", task))
    messages: list[dict[str, Any]] = [{"role": "user", "content": user}]
    if recording["system"]:
        messages.insert(0, {"role": "system", "content": recording["system"]})
    text, calls = _stream(recording, url, messages)
    assert [call["function"]["name"] for call in calls] == [recording["call"]["name"]], f"the calls are {calls}"
    assert json.loads(calls[0]["function"]["arguments"]) == recording["call"]["arguments"], "other arguments came"
    messages.append({"role": "assistant", "content": "".join(text) or None, "tool_calls": calls})
    messages.append({"role": "tool", "content": f"{CHECKED}\n", "tool_call_id": calls[0]["id"]})
    text, calls = _stream(recording, url, messages)
    assert "".join(text) == LAST, f"the last words are {''.join(text)!r}"
    assert not calls
    assert len(text) > 1, "the text came in one piece"
    if body := recording.get("title_body"):
        ask = {**body, "model": MODEL, "messages": [{"role": "user", "content": "Write a title for this chat."}]}
        assert json.loads(_open(f"{url}/v1/chat/completions", ask).read())["choices"][0]["message"]["content"]


def _stream(
    recording: dict[str, Any], url: str, messages: list[dict[str, Any]]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Send a request; return the pieces of the text, and the calls put together by their index."""
    body = {**recording["body"], "model": MODEL, "messages": messages}
    pieces: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    usage = None
    for event in _events(_open(f"{url}/v1/chat/completions", body)):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            pieces += [choice["delta"]["content"]] if choice["delta"].get("content") else []
            for part in choice["delta"].get("tool_calls") or []:
                call = calls.setdefault(part["index"], {"id": "", "type": "function", "function": {}})
                call["id"] = part.get("id") or call["id"]
                for name, value in part.get("function", {}).items():
                    call["function"][name] = call["function"].get(name, "") + (value or "")
    assert usage, "the usage was asked for"
    assert all(call["id"] for call in calls.values()), "a call has no id"
    return pieces, list(calls.values())


def _open(url: str, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=LIMIT_S)


def _events(answer: Any) -> Iterator[dict[str, Any]]:
    lines = [line.decode().strip() for line in answer]
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events, "no event came"
    assert events[-1] == "[DONE]", "the stream has no end"
    yield from map(json.loads, events[:-1])
