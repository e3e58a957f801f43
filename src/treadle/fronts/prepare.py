"""Preparation of answers in a text worker: the grammar that holds an answer to its tools or its format, the limits of
its reasoning, and the setup of its reader."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..core.messages import Constraint, Thinking
from ..errors import InvalidRequest
from ..grammar import deep_stack
from ..grammar.build import build, json_rule
from ..grammar.places import below, refusal
from ..grammar.validation import check_grammar
from ..text.formats import lark
from ..text.formats.base import AUTO, NONE, REQUIRED, ToolFormat, ToolSpec
from ..text.formats.json_lark import in_json
from ..text.formats.reader import ReaderSetup
from ..text.formats.reasoning import MARKERS, ReasoningMarkers
from ..text.formats.registry import find
from ..text.formats.schema_branches import Unheld
from ..text.formats.typed_values import parameter_types
from .answer_options import AnswerOptions, OutputGrammar
from .prepared import Prepared
from .prompt_reasoning import PromptReasoning, reasoning_after
from .structural_tags import KIND as STRUCTURAL_TAG
from .structural_tags import structural_tag

if TYPE_CHECKING:
    from ..text import TextModel

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_RULE = "%json "


def prepare_text(model: TextModel, options: AnswerOptions, prompts: Sequence[Sequence[int]]) -> Prepared:
    """Return the values of a request whose prompts are no chat: its grammar, which begins behind reasoning that a
    prompt leaves open. Raises InvalidRequest."""
    if options.output is None:
        return Prepared()
    made, markers = Prepared(_output(model, options.output)), _markers(model)
    if markers is None:
        return made
    after = [reasoning_after(model, markers, prompt) for prompt in prompts]
    answering = tuple(i for i, state in enumerate(after) if state is not PromptReasoning.OPEN)
    if len(answering) == len(prompts):
        return made
    thinking = _thinking(model, options, markers, PromptReasoning.OPEN, constrained=True)
    return msgspec.structs.replace(made, thinking=thinking, answering=answering)


def prepare_rendered(model: TextModel, options: AnswerOptions, prompt: Sequence[int]) -> Prepared:
    """Return the values of a request whose prompt another server has rendered, which also reads the answer: as
    `prepare_text`, but where a chat's answer has channels, the grammar is of the reasoning and the final one. Raises
    InvalidRequest."""
    after = None if options.output is None else _channels_after(model, prompt)
    made = prepare_text(model, options, () if after is not None else (prompt,))
    return made if after is None else _in_channels(model, options, made, after)


def _channels_after(model: TextModel, prompt: Sequence[int]) -> PromptReasoning | None:
    """Return the state of the reasoning behind a prompt that awaits a channel or ends in one of reasoning; None for
    others, and in formats without channels."""
    tool_format = find(model.formats.tools)
    if tool_format.turn_start is None or tool_format.reasoning is None or not model.formats.by_template:
        return None
    start = tuple(model.encode(tool_format.turn_start, add_special_tokens=False))
    if tuple(prompt[-len(start) :]) == start:
        return PromptReasoning.AHEAD
    after = reasoning_after(model, tool_format.reasoning, prompt)
    return after if after is PromptReasoning.OPEN else None


def _channel_of_chat(model: TextModel, tool_format: ToolFormat, prompt: Sequence[int]) -> PromptReasoning:
    """Return the state of the reasoning behind a chat whose format has channels: it is over where the prompt ends in
    the text of another one, which the answer continues."""
    if tool_format.answer_start is None or tool_format.reasoning is None:
        return PromptReasoning.AHEAD
    if reasoning_after(model, tool_format.reasoning, prompt) is PromptReasoning.OPEN:
        return PromptReasoning.OPEN
    last = next((token for token in reversed(prompt) if token in model.special_ids), None)
    inside = last is not None and tool_format.reasoning.open.endswith(model.token_text(last))
    return PromptReasoning.OVER if inside else PromptReasoning.AHEAD


def _in_channels(model: TextModel, options: AnswerOptions, made: Prepared, after: PromptReasoning) -> Prepared:
    """Return the values for an answer of channels, from those for a text. A structural tag describes channels itself:
    all of them, or those behind the reasoning."""
    tool_format, constraint = find(model.formats.tools), made.constraint
    assert constraint is not None
    assert tool_format.reasoning is not None
    if constraint.kind != STRUCTURAL_TAG:
        tools = _Tools(options, tool_format, model.grammar_tokens, after)
        return Prepared(_in_channel(model, tools, tool_format, constraint))
    opening = lark.Grammar(model.grammar_tokens, lark.plain_schema).text(tool_format.reasoning.open)
    if after is PromptReasoning.AHEAD and (constraint.triggers or opening in constraint.grammar):
        return made
    thinking = _thinking(model, options, tool_format.reasoning, after, constrained=True)
    return msgspec.structs.replace(made, thinking=thinking)


def prepare_chat(model: TextModel, options: AnswerOptions, prompt: Sequence[int]) -> Prepared:
    """Return the values of a chat, rendered as `prompt`. Raises InvalidRequest with the place in a schema."""
    tool_format = find(model.formats.tools)
    tools = _Tools(options, tool_format, model.grammar_tokens, _channel_of_chat(model, tool_format, prompt))
    constraint = None
    if tools.active or options.output is not None:
        constraint = deep_stack.call(lambda: _constraint(model, options, tools, tool_format))
    markers = _markers(model)
    if options.thinking_budget is not None and tool_format.own_reasoning:
        limited: ReasoningMarkers | None = tool_format.reasoning
    else:
        limited = markers
    after = PromptReasoning.AHEAD if limited is None else reasoning_after(model, limited, prompt)
    return Prepared(
        constraint=constraint,
        optional=tools.active and options.output is None and tools.may_be_free,
        thinking=_thinking(model, options, limited, after, constrained=constraint is not None),
        reader=_reader(tools, tool_format if tools.active or tool_format.own_reasoning else None, markers, after),
        loose_tools=tools.loose,
    )


def _output(model: TextModel, output: OutputGrammar) -> Constraint:
    if output.kind == STRUCTURAL_TAG:
        special, end_ids = model.grammar_tokens, model.eos_token_ids
        return structural_tag(output.spec, special=special, end_ids=end_ids, param=output.param)
    return build(output.kind, output.spec, param=output.param, close_at_limit=output.close_at_limit)  # type: ignore[arg-type]


class _Tools:
    """Tools of a request that may be called: as they were given, and with parameters that a grammar can hold (`specs`).
    `loose` are those whose own schema it can't, with the reason: their arguments have any values. Strict ones are
    refused instead. `after` is the state of the reasoning behind the prompt, where the format has channels, and
    `reasons` whether such reasoning has no budget."""

    def __init__(
        self, options: AnswerOptions, tool_format: ToolFormat, special: Mapping[str, int], after: PromptReasoning
    ) -> None:
        self.after = after
        self.reasons = options.thinking_budget is None
        self._format = tool_format
        self._special = special
        self.unheld: dict[str, list[str]] = {}
        self.loose: dict[str, str] = {}
        self._rules: dict[str, str] = {}
        self.param = options.tools_param
        self.choice = options.choice
        self.parallel = options.parallel and not options.choice.single
        function = ".function" if self.param == "tools" else ""
        openai = [f"{self.param}[{i}]{function}.parameters" for i in range(len(options.tools))]
        self._places = options.tool_schemas or openai
        self.given = options.choice.allowed(options.tools)
        names = {tool.name for tool in self.given}
        self._index = {tool.name: i for i, tool in enumerate(options.tools) if tool.name in names}
        self.specs = tuple(self._held(options.tools[i], i) for i in self._index.values())

    @property
    def active(self) -> bool:
        return bool(self.specs) and self.choice.mode != NONE

    @property
    def may_be_free(self) -> bool:
        """Whether calls need no grammar: the model chooses them, and no tool is strict."""
        return self.choice.mode == AUTO and not any(tool.strict for tool in self.given)

    def schema(self, schema: Mapping[str, Any]) -> str:
        """Return a JSON schema as Lark's `%json` takes it."""
        return self._rule(schema, self.param)

    def loosen(self, reason: str) -> None:
        """Hold no tool to its schema."""
        self.loose = {tool.name: reason for tool in self.given}
        self.specs = tuple(map(self._with_any_values, self.given))

    def loosen_faulty(self) -> bool:
        """Hold no tool to its schema whose grammar has a fault by itself. Return whether there is one."""
        before = self.specs
        self.specs = tuple(self._held(tool, self._index[tool.name], check=True) for tool in before)
        return any(tool is not held for tool, held in zip(before, self.specs, strict=True))

    def _held(self, tool: ToolSpec, index: int, *, check: bool = False) -> ToolSpec:
        place = self._places[index]
        if tool.text_grammar:
            return self._held_text(tool, place)
        schema = {**tool.parameters, "type": "object"}
        try:
            json_rule(schema, param=place) if check else self._rule(schema, place)
            self._check_names(tool, place)
            if check:
                self._check_calls(tool, place)
        except InvalidRequest as error:
            if tool.strict:
                raise
            self.loose[tool.name] = error.message.removeprefix(f"{place}.")  # its index varies among requests
            return self._with_any_values(tool)
        return tool

    def _check_names(self, tool: ToolSpec, place: str) -> None:
        """Raise InvalidRequest for a parameter with a name that the format can't write."""
        for name in {**dict.fromkeys(_names_in(tool)), **dict.fromkeys(tool.parameters.get("required", ()))}:
            if not self._format.can_name(name):
                raise refusal(below(below(place, "properties"), name), "has a name that the model's format can't write")

    def _check_calls(self, tool: ToolSpec, place: str) -> None:
        """Raise InvalidRequest, with the place, for a tool that calls in the format can't be held to, or whose grammar
        has a fault."""
        grammar = lark.Grammar(self._special, lambda schema: self._rule(schema, place))
        try:
            calls = self._format.calls((tool,), grammar, several=False)
        except Unheld as fault:
            within = below(below(place, "properties"), fault.parameter) if fault.parameter else place
            raise refusal(within, fault.message) from None
        check_grammar(grammar.render(calls), param=place)

    def _held_text(self, tool: ToolSpec, place: str) -> ToolSpec:
        """Return a tool whose text has a grammar, if calls in the format can be held to it. Raises InvalidRequest for a
        wrong grammar."""
        build("lark", tool.text_grammar, param=place)
        if not self._format.text_grammars:
            self.loose[tool.name] = "calls in the model's format have texts that no grammar of another text describes"
        elif not self._format.typed and in_json(tool.text_grammar) is None:
            self.loose[tool.name] = "its Lark grammar has parts that have no form inside of JSON"
        else:
            return tool
        return self._with_any_values(tool)

    def _with_any_values(self, tool: ToolSpec) -> ToolSpec:
        """Return the tool with any values of those of its parameters that the format can name."""
        names = list(filter(self._format.can_name, _names_in(tool)))
        parameters = {**_ANY_OBJECT, "properties": {name: {} for name in names}} if names else _ANY_OBJECT
        return msgspec.structs.replace(tool, parameters=parameters, text_grammar="", strict=False)

    def _rule(self, schema: Mapping[str, Any], param: str) -> str:
        key = json.dumps(schema)
        if key not in self._rules:
            self._rules[key] = json_rule(dict(schema), param=param, check=False).removeprefix(_RULE)
        return self._rules[key]


def _names_in(tool: ToolSpec) -> list[str]:
    properties = tool.parameters.get("properties")
    return list(properties) if isinstance(properties, Mapping) else []


# The constraint -------------------------------------------------------------------------------------------------


def _constraint(model: TextModel, options: AnswerOptions, tools: _Tools, tool_format: ToolFormat) -> Constraint | None:
    output = None if options.output is None else _output(model, options.output)
    if not tools.active:
        return None if output is None else _in_channel(model, tools, tool_format, output)
    made = _with_possible_calls(model, output, tools, tool_format)
    return msgspec.structs.replace(made, close_at_limit=options.close_at_limit)


def _with_possible_calls(
    model: TextModel, output: Constraint | None, tools: _Tools, tool_format: ToolFormat
) -> Constraint:
    """Return the constraint with calls of all tools, with any arguments for those whose schemas no grammar can hold."""
    try:
        return _with_calls(model, output, tools, tool_format)
    except InvalidRequest as error:
        if not _is_within(error.param, tools.param):
            raise
        if tools.loosen_faulty():
            return _with_possible_calls(model, output, tools, tool_format)
        if any(tool.strict for tool in tools.given):
            raise
        tools.loosen(error.message)
    return _with_calls(model, output, tools, tool_format)


def _is_within(param: str | None, place: str) -> bool:
    return param is not None and param.startswith(place) and param[len(place) :][:1] in ("", ".", "[")


def _with_calls(model: TextModel, output: Constraint | None, tools: _Tools, tool_format: ToolFormat) -> Constraint:
    if output is None or tools.choice.mode == REQUIRED:
        return _checked(model, tools, lambda special: _calls(tool_format, tools, special))
    return _or_output(model, tools, tool_format, output)


def _in_channel(model: TextModel, tools: _Tools, tool_format: ToolFormat, output: Constraint) -> Constraint:
    """Return the constraint of an answer that has to begin with a text of its format; any other is left as it is."""
    if tool_format.answer_start is None or not model.formats.by_template:
        return output
    return _or_output(model, tools, tool_format, output)


def _or_output(model: TextModel, tools: _Tools, tool_format: ToolFormat, output: Constraint) -> Constraint:
    """Return the constraint of an answer that is calls or `output`, which holds alone where the prompt begins it."""
    if tools.after is PromptReasoning.OVER:
        return output
    return _checked(model, tools, lambda special: _calls_or_output(tool_format, tools, output, special))


def _checked(model: TextModel, tools: _Tools, make: Callable[[Mapping[str, int]], Constraint]) -> Constraint:
    """Return the checked constraint, with special tokens as tokens."""
    tools.unheld.clear()
    try:
        made = make(model.grammar_tokens)
    except Unheld as fault:
        raise refusal(tools.param, fault.message) from None
    tools.loose |= {name: "; ".join(reasons[:3]) for name, reasons in tools.unheld.items()}
    check_grammar(made.grammar, param=tools.param)
    return msgspec.structs.replace(made, param=made.param or tools.param)


def _calls(tool_format: ToolFormat, tools: _Tools, special: Mapping[str, int]) -> Constraint:
    made = tool_format.constraint(
        tools.specs,
        tools.choice,
        parallel=tools.parallel,
        special=special,
        schema=tools.schema,
        reasons=tools.reasons,
        unheld=tools.unheld,
    )
    assert made is not None
    return made


def _calls_or_output(
    tool_format: ToolFormat, tools: _Tools, output: Constraint, special: Mapping[str, int]
) -> Constraint:
    """Return the grammar of an answer that is either calls or `output`, behind the text that begins an answer in the
    format, and behind reasoning of the format's own. A structural tag's triggers stay triggers: text is free before."""
    start = tool_format.answer_start
    grammar = lark.Grammar(special, tools.schema, tools.unheld)
    choices = [f"{tool_format.answer_header(grammar)} @output" if start else "@output"]
    if tools.specs:
        choices.append(tool_format.calls(tools.specs, grammar, several=tools.parallel))
    answer, triggers = lark.any_of(choices), tuple[str, ...]()
    if start and output.triggers:
        triggers = (start, *(tool_format.triggers(tools.specs) if tools.specs else ()))
    else:
        opened = tools.after is PromptReasoning.OPEN
        answer = tool_format.whole_answer(answer, grammar, reasons=tools.reasons, opened=opened)
    text = _with_nested(grammar.render(answer), output.grammar)
    kind = "tool" if tools.specs else output.kind
    return msgspec.structs.replace(output, kind=kind, grammar=text, triggers=triggers)


def _with_nested(text: str, inner: str) -> str:
    """Return the grammar of a Lark text that refers to the grammar `inner` as `@output`."""
    nested = json.loads(inner)["grammars"] if inner.startswith("{") else [{"lark_grammar": inner}]
    return json.dumps({"grammars": [{"lark_grammar": text}, {**nested[0], "name": "output"}, *nested[1:]]})


# Reasoning and the reader ---------------------------------------------------------------------------------------


def _markers(model: TextModel) -> ReasoningMarkers | None:
    return None if model.formats.reasoning is None else MARKERS[model.formats.reasoning]


def _thinking(
    model: TextModel,
    options: AnswerOptions,
    markers: ReasoningMarkers | None,
    after: PromptReasoning,
    *,
    constrained: bool,
) -> Thinking | None:
    """Return the reasoning that the engine has to know of: before a grammar begins, or for its budget. None where the
    prompt has ended it already."""
    if markers is None or not (constrained or options.thinking_budget is not None):
        return None
    if after is PromptReasoning.OVER:
        return None
    return Thinking(
        open_ids=tuple(model.encode(markers.open, add_special_tokens=False)),
        close_ids=tuple(model.encode(markers.close, add_special_tokens=False)),
        opened=after is PromptReasoning.OPEN,
        budget=options.thinking_budget,
        reopens=markers.anywhere and options.thinking_budget is not None,
    )


def _reader(
    tools: _Tools, tool_format: ToolFormat | None, markers: ReasoningMarkers | None, after: PromptReasoning
) -> ReaderSetup | None:
    if tool_format is None and markers is None:
        return None
    return ReaderSetup(
        format=None if tool_format is None else tool_format.name,
        reasoning=markers,
        opened=markers is not None and after is PromptReasoning.OPEN,
        tools=tuple(tool.name for tool in tools.given),
        forced=tool_format is not None and tools.active and tools.choice.mode == REQUIRED,
        types=parameter_types(tools.given) if tool_format is not None and tool_format.typed else {},
    )
