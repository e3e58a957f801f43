"""A server whose model plays an agent: `python -m benchmarks.clients.agent serve MODEL OPTION...`.

The server, its text workers and its engine's process are the real ones; only the runner is scripted, with MODEL's
tokenizer. The variable TREADLE_AGENT_SCRIPTS names a JSON file of scripts by marker. A request whose prompt has tools
and a marker gets the script's call that is next by the number of tool results in its prompt, and its last words
behind the last call. Other requests, such as those for a title, get a short text. Each request is appended as a line of
JSON to the same path with ".requests" behind it: its marker, its step, the number of its characters, and whether it has
the output of the task's command.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tests.fronts.runner import FrontRunner
from tests.support.answers import Answers

from treadle.compose.owner import OwnerSpec
from treadle.core.messages import Submit
from treadle.core.plan import StepPlan, StepResult
from treadle.engine.owner import OwnerLimits
from treadle.runner.base import Progress, Runner, RunnerFactory
from treadle.text import TextModel

ENTRY = "benchmarks.clients.agent:owner_of"
VARIABLE = "TREADLE_AGENT_SCRIPTS"
DUMPS = "TREADLE_AGENT_PROMPTS"
"""Names a folder for the text of each prompt, for whoever writes a script."""
RESULT = "<|im_start|>tool\n"
TOOLS = "<tools>"
TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>"
    'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
STEP_S = 0.001
ADDED = ("<tool_call>", "</tool_call>")
CHECKED = "ran-42"
"""What the command of the task prints, and nothing else in a prompt has."""
TITLE = '{"title": "The colour of the project"}'


@dataclass(frozen=True)
class Script:
    """An agent's turns: a text and a call each, and the last words."""

    calls: list[tuple[str, dict[str, Any]]]
    last: str

    def answer(self, results: int) -> str:
        """Return the answer to a prompt with this many tool results."""
        if results >= len(self.calls):
            return self.last
        name, arguments = self.calls[results]
        return f"Step {results + 1}.<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Agent(Answers):
    """Answers of an agent to clients that are told apart by a marker in the prompt."""

    def __init__(self, text: TextModel, scripts: Mapping[str, Script], record: Path) -> None:
        super().__init__(text, TITLE)
        self._scripts = scripts
        self._record = record

    def _answer(self, request: Submit) -> tuple[int, ...]:
        prompt = self._text.decode(request.prompt, skip_special_tokens=False)
        marker = next((marker for marker in self._scripts if marker in prompt), "")
        results = prompt.count(RESULT, prompt.find(marker)) if marker else 0
        acts = bool(marker) and (TOOLS in prompt or not self._scripts[marker].calls)
        step = results if acts else None
        checked = CHECKED in prompt
        self._note(prompt, {"marker": marker, "step": step, "characters": len(prompt), "checked": checked})
        return self._ids(self._scripts[marker].answer(results) if acts else TITLE)

    def _note(self, prompt: str, note: dict[str, Any]) -> None:
        with self._record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")
        if folder := os.environ.get(DUMPS):
            Path(folder, f"{len(list(Path(folder).iterdir())):04}.txt").write_text(prompt, encoding="utf-8")


class PacedRunner(FrontRunner):
    """A runner whose steps take some time, so that answers stream in pieces as those of models do."""

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(STEP_S)
        return super().execute(plan)


def write_scripts(path: Path, scripts: Mapping[str, Script]) -> dict[str, str]:
    """Write the scripts by marker; return the environment of a server that plays them."""
    path.write_text(msgspec.json.encode(scripts).decode(), encoding="utf-8")
    return {VARIABLE: str(path)}


def requests(path: Path) -> list[dict[str, Any]]:
    """Return the notes on the requests so far."""
    file = path.with_name(f"{path.name}.requests")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def owner_of(arguments: Mapping[str, Any]) -> tuple[RunnerFactory, OwnerLimits]:
    """Return the factory of the scripted runner, and the owner's limits."""
    spec = msgspec.convert(arguments, OwnerSpec)
    path = Path(os.environ[VARIABLE])
    scripts = msgspec.json.decode(path.read_bytes(), type=dict[str, Script])

    def build(progress: Progress) -> Runner:
        text = TextModel.load(Path(spec.folder), context=spec.context)
        agent = Agent(text, scripts, path.with_name(f"{path.name}.requests"))
        return PacedRunner(agent, vocabulary=text.vocabulary, context=text.context)

    return build, spec.limits


if __name__ == "__main__":
    from treadle.cli import main
    from treadle.compose import engine

    engine.OWNER_ENTRY = ENTRY
    main()
