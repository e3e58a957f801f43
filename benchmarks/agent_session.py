"""A coding agent's session in three dialects: which part of each turn's prompt comes from the prefix cache.

    python benchmarks/agent_session.py --url http://127.0.0.1:8000 [--turns 20] [--dialects chat messages responses]
    python benchmarks/agent_session.py --url ... --counts 1000

Each turn sends the whole conversation again, as agents do: a long system prompt, tools, what the server answered before
(text, reasoning, calls), results of tools, and now and then a note of the system between turns. In the Anthropic
dialect the marks of `cache_control` move with each turn, as Claude Code sends them. `can` are the tokens of the prompt
before and its answer, without the last one, which no cache can hold; `cached` those that the server reused. Responses
run twice: with the whole history, and with `previous_response_id`.

`--counts` sends random requests and compares the tokens that `/v1/messages/count_tokens` and `/tokenize` report with
those that the answers then report. Exit code 1 below 95 % of what can be cached in a turn, or for a wrong count.

Needs httpx alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = ("warp", "weft", "treadle", "heddle", "shuttle", "reed", "loom", "beam", "thread", "cloth", "pattern", "lift")
LEAST = 0.95
PLACE = {"type": "object", "properties": {"path": {"type": "string", "maxLength": 12}}, "required": ["path"]}
NAMES = ("read_file", "list_folder", "run_tests")


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)) + "."


@dataclass(frozen=True)
class Counted:
    """Tokens of one answer."""

    prompt: int
    cached: int
    completion: int


@dataclass
class Agent:
    """One session. `history` is what the dialect sends; `user` says the next thing, `ask` sends everything."""

    client: httpx.Client
    model: str
    rng: random.Random
    limit: int = 24
    history: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.system = text(self.rng, 400)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.client.post(path, json={"model": self.model, **body})
        if answer.status_code != 200:
            sys.exit(f"{path}: {answer.status_code} {answer.text[:500]}")
        found: dict[str, Any] = answer.json()
        return found

    def user(self, turn: int) -> None:
        raise NotImplementedError

    def ask(self, turn: int) -> Counted:
        raise NotImplementedError


class Chat(Agent):
    """OpenAI's chat completions."""

    def user(self, turn: int) -> None:
        if not self.history:
            self.history.append({"role": "system", "content": self.system})
        calls = self.history[-1].get("tool_calls") or ()
        for call in calls:
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": text(self.rng, 40)})
        if turn % 5 == 4:
            self.history.append({"role": "system", "content": f"{100 - turn} % of the context are left."})
        if not calls:
            self.history.append({"role": "user", "content": text(self.rng, 20)})

    def ask(self, turn: int) -> Counted:
        tools = [{"type": "function", "function": {"name": name, "parameters": PLACE}} for name in NAMES]
        choice = "required" if turn % 3 == 1 else "auto"
        answer = self.post(
            "/v1/chat/completions",
            {"messages": self.history, "tools": tools, "tool_choice": choice, "max_tokens": self.limit}
            | {"temperature": 0, "close_at_limit": True},
        )
        self.history.append(answer["choices"][0]["message"])
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Counted(usage["prompt_tokens"], cached, usage["completion_tokens"])


class Messages(Agent):
    """Anthropic's Messages, with the habits of Claude Code."""

    def user(self, turn: int) -> None:
        calls = [b for b in self.history[-1]["content"] if b["type"] == "tool_use"] if self.history else []
        for message in self.history:
            for block in message["content"] if isinstance(message["content"], list) else ():
                block.pop("cache_control", None)
        results: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": text(self.rng, 40)} for call in calls
        ]
        if turn % 5 == 4:
            self.history.append({"role": "user", "content": results or [{"type": "text", "text": text(self.rng, 20)}]})
            self.history.append({"role": "system", "content": f"{100 - turn} % of the context are left."})
            return
        content = results or [{"type": "text", "text": text(self.rng, 20)}]
        content[-1]["cache_control"] = {"type": "ephemeral"}
        self.history.append({"role": "user", "content": content})

    def ask(self, turn: int) -> Counted:
        tools = [{"name": name, "input_schema": PLACE} for name in NAMES]
        choice = {"type": "any"} if turn % 3 == 1 else {"type": "auto"}
        system = [{"type": "text", "text": self.system, "cache_control": {"type": "ephemeral"}}]
        answer = self.post(
            "/v1/messages",
            {"messages": self.history, "tools": tools, "tool_choice": choice, "max_tokens": self.limit}
            | {"temperature": 0, "system": system},
        )
        self.history.append({"role": "assistant", "content": answer["content"] or [{"type": "text", "text": "."}]})
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + cached + usage.get("cache_creation_input_tokens", 0)
        return Counted(prompt, cached, usage["output_tokens"])


class Responses(Agent):
    """OpenAI's Responses, with the whole history in each request."""

    stateful = False
    previous: str | None = None

    def user(self, turn: int) -> None:
        calls = [item for item in self._last() if item["type"] == "function_call"]
        if self.stateful:
            self.history = []
        for call in calls:
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": text(self.rng, 40)}
            self.history.append(result)
        if turn % 5 == 4:
            self.history.append({"role": "developer", "content": f"{100 - turn} % of the context are left."})
        if not calls:
            self.history.append({"role": "user", "content": text(self.rng, 20)})

    def _last(self) -> list[dict[str, Any]]:
        return self.history[self._answered :] if self.history else []

    _answered = 0

    def ask(self, turn: int) -> Counted:
        tools = [{"type": "function", "name": name, "parameters": PLACE, "strict": False} for name in NAMES]
        choice = "required" if turn % 3 == 1 else "auto"
        state = {"previous_response_id": self.previous} if self.stateful and self.previous else {}
        answer = self.post(
            "/v1/responses",
            {"input": self.history, "tools": tools, "tool_choice": choice, "max_output_tokens": self.limit}
            | {"temperature": 0, "instructions": self.system, "store": self.stateful, **state},
        )
        self.previous = answer["id"]
        self._answered = len(self.history)
        self.history += answer["output"]
        usage = answer["usage"]
        return Counted(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"])


class Stateful(Responses):
    """The same with `previous_response_id`."""

    stateful = True


DIALECTS: dict[str, type[Agent]] = {
    "chat": Chat,
    "messages": Messages,
    "responses": Responses,
    "responses-stateful": Stateful,
}


def session(name: str, client: httpx.Client, model: str, turns: int, seed: int) -> float:
    """Run a session, print each turn, and return the least share of a turn."""
    agent = DIALECTS[name](client, model, random.Random(f"{seed} {name}"))
    least, before, total, possible = 1.0, 0, 0, 0
    for turn in range(turns):
        agent.user(turn)
        counted = agent.ask(turn)
        can = min(before, counted.prompt - 1)
        share = counted.cached / can if can else 1.0
        print(
            f"{name} turn {turn + 1:2}: prompt {counted.prompt:5}, cached {counted.cached:5} of {can:5} ({share:.1%})"
        )
        if turn:
            least, total, possible = min(least, share), total + counted.cached, possible + can
        before = counted.prompt + counted.completion - 1
    print(f"{name}: cached {total:,} of {possible:,} ({total / max(1, possible):.1%}), least of a turn {least:.1%}")
    return least


# Counts -------------------------------------------------------------------------------------------------------------


def random_body(rng: random.Random) -> dict[str, Any]:
    """Return a random request that both dialects take, without the limit of tokens."""
    turns: list[dict[str, Any]] = []
    for i in range(rng.randrange(1, 6)):
        role = "user" if i % 2 == 0 else "assistant"
        body = text(rng, rng.randrange(1, 60)) if rng.random() < 0.8 else "日本語 🙂 <|im_end|> \n\t {} "
        turns.append({"role": role, "content": body if rng.random() < 0.5 else [{"type": "text", "text": body}]})
    if turns[-1]["role"] == "assistant":
        turns.append({"role": "user", "content": "and now?"})
    return {"messages": turns}


def count_messages(agent: Agent, rng: random.Random) -> tuple[int, int]:
    body = random_body(rng)
    if rng.random() < 0.5:
        body["system"] = text(rng, 30)
    if rng.random() < 0.4:
        body["tools"] = [{"name": name, "description": text(rng, 9), "input_schema": PLACE} for name in NAMES]
    if rng.random() < 0.2:
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    counted = agent.post("/v1/messages/count_tokens", body)["input_tokens"]
    usage = agent.post(
        "/v1/messages", {**body, "max_tokens": 2048 if "thinking" in body else 1, "stop_sequences": ["e"]}
    )
    usage = usage["usage"]
    return counted, usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]


def count_chat(agent: Agent, rng: random.Random) -> tuple[int, int]:
    body = random_body(rng)
    if rng.random() < 0.4:
        body["tools"] = [{"type": "function", "function": {"name": name, "parameters": PLACE}} for name in NAMES]
    counted = agent.post("/tokenize", body)["count"]
    return counted, agent.post("/v1/chat/completions", {**body, "max_tokens": 1})["usage"]["prompt_tokens"]


COUNTS: dict[str, Callable[[Agent, random.Random], tuple[int, int]]] = {"messages": count_messages, "chat": count_chat}


def compare_counts(client: httpx.Client, model: str, requests: int, seed: int) -> int:
    """Return the number of wrong counts."""
    wrong = 0
    for name, count in COUNTS.items():
        rng, agent, bad = random.Random(f"{seed} {name}"), Agent(client, model, random.Random(0)), 0
        for i in range(requests):
            counted, used = count(agent, rng)
            if counted != used:
                bad += 1
                print(f"{name} request {i}: counted {counted}, used {used}")
        print(f"{name}: {requests - bad} of {requests} counts equal the usage")
        wrong += bad
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", help="default: the first listed")
    parser.add_argument("--dialects", nargs="+", choices=DIALECTS, default=list(DIALECTS))
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--counts", type=int, metavar="REQUESTS", help="compare counts instead")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with httpx.Client(base_url=options.url, timeout=600) as client:
        model = options.model or client.get("/v1/models").json()["data"][0]["id"]
        if options.counts:
            sys.exit(compare_counts(client, model, options.counts, options.seed) > 0)
        least = [session(name, client, model, options.turns, options.seed) for name in options.dialects]
    print(json.dumps({"least": dict(zip(options.dialects, least, strict=True))}))
    sys.exit(min(least) < LEAST)


if __name__ == "__main__":
    main()
