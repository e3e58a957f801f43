"""Structured output and tool calls through SDKs and libraries.

A case is one client with one helper of its own, such as `parse` of OpenAI's SDK or `with_structured_output` of
LangChain. It passes when the helper returns a value of the declared type, or the error that it should raise. Calls are
forced and schemas bounded: a model that follows no instructions passes too.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from benchmarks.clients.chats import Server
from pydantic import BaseModel, ConfigDict, Field

Check = Callable[[Server], None]
"""Calls the server with one helper and raises where its result is not as it should be."""

TASK: list[Any] = [{"role": "user", "content": "The shuttle of loom 7 broke on Monday; two weavers repaired it."}]


class Tag(BaseModel):
    model_config = ConfigDict(extra="forbid")
    label: Annotated[str, Field(max_length=12)]
    weight: Annotated[int, Field(ge=0, le=9)]


class Report(BaseModel):
    """One repair."""

    model_config = ConfigDict(extra="forbid")
    loom: Annotated[int, Field(ge=0, le=99)]
    day: Literal["Monday", "Tuesday", "Wednesday"]
    note: Annotated[str, Field(max_length=40)]
    repaired: bool
    tags: Annotated[list[Tag], Field(max_length=2)]


class Order(BaseModel):
    """Order spare parts."""

    model_config = ConfigDict(extra="forbid")
    part: Literal["shuttle", "heddle", "reed"]
    count: Annotated[int, Field(ge=1, le=20)]


REPORT = {
    "type": "json_schema",
    "json_schema": {"name": "report", "schema": Report.model_json_schema(), "strict": True},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": model.__name__, "description": model.__doc__, "parameters": schema}}
    for model in (Report, Order)
    if (schema := model.model_json_schema())
]
MODELS: dict[str, type[BaseModel]] = {"Report": Report, "Order": Order}
NAMED = {"type": "function", "function": {"name": "Order"}}
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "Order"}}]},
}


def check_calls(choice: Any, *names: str) -> None:
    """Check that there are calls, of the tools `names` (default: any), with valid arguments and ids of their own. Where
    `max_tokens` cut the answer, the last call need not be complete."""
    calls = choice.message.tool_calls
    if choice.finish_reason == "length":
        calls = calls[:-1]
    assert calls, "no complete tool call came"
    for call in calls:
        assert call.function.name in (names or MODELS), f"{call.function.name} was called"
        MODELS[call.function.name].model_validate_json(call.function.arguments)
    assert len({call.id for call in calls}) == len(calls), "two calls have one id"


# OpenAI's SDK -------------------------------------------------------------------------------------------------------


def openai_client(server: Server) -> Any:
    import openai

    return openai.OpenAI(base_url=server.url, api_key=server.key, max_retries=0, timeout=600)


def created(server: Server, **fields: Any) -> Any:
    some = {"model": server.model, "messages": TASK, "max_tokens": server.max_tokens, "temperature": 0}
    return openai_client(server).chat.completions.create(**(some | fields)).choices[0]


def openai_json_schema(server: Server) -> None:
    choice = created(server, response_format=REPORT)
    assert choice.finish_reason == "stop", choice.finish_reason
    Report.model_validate_json(choice.message.content)


def openai_json_object(server: Server) -> None:
    choice = created(server, response_format={"type": "json_object"}, max_tokens=400)
    assert choice.finish_reason in ("stop", "length"), choice.finish_reason
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    else:
        assert choice.message.content.lstrip().startswith("{")


def openai_parse(server: Server) -> None:
    completion = openai_client(server).chat.completions.parse(
        model=server.model, messages=TASK, max_tokens=server.max_tokens, response_format=Report
    )
    assert isinstance(completion.choices[0].message.parsed, Report)


def openai_parse_async(server: Server) -> None:
    import openai

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=server.url, api_key=server.key, max_retries=0) as client:
            completion = await client.chat.completions.parse(
                model=server.model, messages=TASK, max_tokens=server.max_tokens, response_format=Report
            )
            assert isinstance(completion.choices[0].message.parsed, Report)

    asyncio.run(run())


def openai_parse_cut(server: Server) -> None:
    """An answer that is cut at its limit says so, and the SDK raises."""
    import openai

    try:
        openai_client(server).chat.completions.parse(
            model=server.model, messages=TASK, max_tokens=3, response_format=Report
        )
    except openai.LengthFinishReasonError:
        return
    raise AssertionError("three tokens were no cut answer")


def openai_stream_parse(server: Server) -> None:
    kinds = []
    with openai_client(server).chat.completions.stream(
        model=server.model, messages=TASK, max_tokens=server.max_tokens, response_format=Report
    ) as stream:
        kinds += [event.type for event in stream]
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Report)
    assert kinds.count("content.delta") > 1, "it came in one piece"
    assert "content.done" in kinds


def openai_tools(choice: Any, *names: str, **fields: Any) -> Check:
    def check(server: Server) -> None:
        answer = created(server, tools=TOOLS, tool_choice=choice, **fields)
        check_calls(answer, *names)
        assert answer.finish_reason in ("tool_calls", "stop", "length"), answer.finish_reason
        if choice is NAMED or fields.get("parallel_tool_calls") is False:
            assert len(answer.message.tool_calls) == 1, f"{len(answer.message.tool_calls)} calls came, not one"

    return check


def openai_no_tools(server: Server) -> None:
    answer = created(server, tools=TOOLS, tool_choice="none", max_tokens=16)
    assert not answer.message.tool_calls
    assert answer.message.content


def openai_parse_tools(server: Server) -> None:
    import openai

    completion = openai_client(server).chat.completions.parse(
        model=server.model,
        messages=TASK,
        max_tokens=server.max_tokens,
        tools=[openai.pydantic_function_tool(model) for model in MODELS.values()],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    for call in completion.choices[0].message.tool_calls or []:
        assert isinstance(call.function.parsed_arguments, MODELS[call.function.name])
    check_calls(completion.choices[0])


def openai_stream_tools(server: Server) -> None:
    import openai

    kinds = []
    with openai_client(server).chat.completions.stream(
        model=server.model,
        messages=TASK,
        max_tokens=server.max_tokens,
        tools=[openai.pydantic_function_tool(Order)],
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        kinds += [event.type for event in stream]
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Order)
    assert kinds.count("tool_calls.function.arguments.delta") > 1, "the arguments came in one piece"
    assert "tool_calls.function.arguments.done" in kinds


def openai_tool_results(server: Server) -> None:
    """The whole assistant message goes back, with a result for each call; then another call, and a text."""
    first = created(server, tools=TOOLS, tool_choice=NAMED)
    messages = [*TASK, first.message.model_dump()]
    messages += [{"role": "tool", "tool_call_id": c.id, "content": "3 in stock"} for c in first.message.tool_calls]
    second = created(server, messages=messages, tools=TOOLS, tool_choice="required")
    check_calls(second)
    assert created(server, messages=messages, max_tokens=8).message.content is not None


def openai_structured_outputs(kind: str, spec: Any, is_right: Callable[[str], bool]) -> Check:
    def check(server: Server) -> None:
        choice = created(server, extra_body={"structured_outputs": {kind: spec}})
        assert is_right(choice.message.content), choice.message.content
        assert choice.finish_reason == "stop", choice.finish_reason

    return check


def openai_bad_schema(server: Server) -> None:
    """A schema that can't be followed is refused with its place, and at once."""
    import openai

    schema = {"type": "object", "properties": {"a": {"$ref": "https://example.com/other.json"}}}
    format_ = {"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}}
    began = time.perf_counter()
    try:
        created(server, response_format=format_)
    except openai.BadRequestError as error:
        place = error.param
    else:
        raise AssertionError("it was accepted")
    assert place, "the error names no place"
    assert time.perf_counter() - began < 1, "it took longer than a second"


def openai_unknown_tool(server: Server) -> None:
    import openai

    try:
        created(server, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "Nothing"}})
    except openai.BadRequestError:
        return
    raise AssertionError("it was accepted")


def openai_cases() -> Iterator[tuple[str, Check]]:
    yield "response_format json_schema", openai_json_schema
    yield "response_format json_object", openai_json_object
    yield "parse", openai_parse
    yield "parse (async)", openai_parse_async
    yield "parse, cut at max_tokens", openai_parse_cut
    yield "stream helper, response_format", openai_stream_parse
    yield "tools, required", openai_tools("required")
    yield "tools, named", openai_tools(NAMED, "Order")
    yield "tools, allowed_tools", openai_tools(ALLOWED, "Order")
    yield "tools, parallel_tool_calls false", openai_tools("required", parallel_tool_calls=False)
    yield "tools, none", openai_no_tools
    yield "parse, pydantic_function_tool", openai_parse_tools
    yield "stream helper, pydantic_function_tool", openai_stream_tools
    yield "tool results", openai_tool_results
    yield (
        "structured_outputs regex",
        openai_structured_outputs("regex", "[a-f]{4}-[0-9]{2}", lambda text: len(text) == 7),
    )
    yield (
        "structured_outputs choice",
        openai_structured_outputs("choice", ["warp", "weft"], ("warp", "weft").__contains__),
    )
    yield "structured_outputs json", openai_structured_outputs("json", Report.model_json_schema(), _is_report)
    yield (
        "structured_outputs grammar",
        openai_structured_outputs("grammar", 'start: "loom " /[0-9]{1,3}/', lambda text: text.startswith("loom ")),
    )
    yield "remote $ref is refused", openai_bad_schema
    yield "forced tool that is not there is refused", openai_unknown_tool


def _is_report(text: str) -> bool:
    return bool(Report.model_validate_json(text))


# LangChain ----------------------------------------------------------------------------------------------------------


def langchain_model(server: Server, **fields: Any) -> Any:
    from langchain_openai import ChatOpenAI

    some = {"base_url": server.url, "api_key": server.key, "model": server.model, "max_retries": 0, "temperature": 0}
    return ChatOpenAI(**some, max_tokens=server.max_tokens, **fields)


def langchain_structured(method: str) -> Check:
    def check(server: Server) -> None:
        answer = langchain_model(server).with_structured_output(Report, method=method).invoke(TASK)
        assert isinstance(answer, Report), answer

    return check


def langchain_stream_structured(server: Server) -> None:
    pieces = list(langchain_model(server).with_structured_output(Report, method="json_schema").stream(TASK))
    assert isinstance(pieces[-1], Report)


def langchain_tools(choice: str) -> Check:
    def check(server: Server) -> None:
        answer = langchain_model(server).bind_tools([Report, Order], tool_choice=choice).invoke(TASK)
        assert answer.tool_calls, "no tool call came"
        assert not answer.invalid_tool_calls
        for call in answer.tool_calls:
            MODELS[call["name"]].model_validate(call["args"])

    return check


def langchain_stream_tools(server: Server) -> None:
    chunks = list(langchain_model(server).bind_tools([Order], tool_choice="Order").stream(TASK))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    Order.model_validate(whole.tool_calls[0]["args"])


def langchain_tool_results(server: Server) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = langchain_model(server).bind_tools([Order], tool_choice="Order")
    messages: list[Any] = [HumanMessage(TASK[0]["content"])]
    for _ in range(2):
        answer = model.invoke(messages)
        messages += [answer, *(ToolMessage("3 in stock", tool_call_id=call["id"]) for call in answer.tool_calls)]
    assert len(messages) >= 5


def langchain_cases() -> Iterator[tuple[str, Check]]:
    for method in ("json_schema", "function_calling"):
        yield f"with_structured_output {method}", langchain_structured(method)
    yield "with_structured_output, streamed", langchain_stream_structured
    yield "bind_tools any", langchain_tools("any")
    yield "bind_tools named", langchain_tools("Order")
    yield "bind_tools, streamed", langchain_stream_tools
    yield "tool results", langchain_tool_results


# litellm, instructor, Pydantic AI -----------------------------------------------------------------------------------


def litellm_call(server: Server, **fields: Any) -> Any:
    import litellm

    litellm.suppress_debug_info = True
    some: dict[str, Any] = {"model": f"hosted_vllm/{server.model}", "api_base": server.url, "api_key": server.key}
    return litellm.completion(**some, messages=TASK, max_tokens=server.max_tokens, **fields)


def litellm_schema(server: Server) -> None:
    Report.model_validate_json(litellm_call(server, response_format=Report).choices[0].message.content)


def litellm_tools(*, stream: bool) -> Check:
    def check(server: Server) -> None:
        import litellm

        answer = litellm_call(server, tools=TOOLS, tool_choice="required", stream=stream)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=TASK)
        check_calls(answer.choices[0])

    return check


def litellm_cases() -> Iterator[tuple[str, Check]]:
    yield "response_format of a model", litellm_schema
    yield "tools, required", litellm_tools(stream=False)
    yield "tools, required, streamed", litellm_tools(stream=True)


def instructor_case(mode: str, way: str) -> Check:
    def check(server: Server) -> None:
        import instructor

        client = instructor.from_openai(openai_client(server), mode=instructor.Mode[mode])
        some: dict[str, Any] = {"model": server.model, "messages": TASK, "max_tokens": server.max_tokens}
        if way == "create":
            answer = client.chat.completions.create(**some, response_model=Report, max_retries=0)
        else:
            answer = list(client.chat.completions.create_partial(**some, response_model=Report, max_retries=0))[-1]
        Report.model_validate(answer.model_dump())

    return check


def instructor_cases() -> Iterator[tuple[str, Check]]:
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
        yield f"create, mode {mode}", instructor_case(mode, "create")
    for mode in ("TOOLS", "JSON_SCHEMA"):
        yield f"create_partial, mode {mode}", instructor_case(mode, "create_partial")


def pydantic_ai_case(way: str) -> Check:
    def check(server: Server) -> None:
        from pydantic_ai import Agent, NativeOutput, ToolOutput
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        model = OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=server.url, api_key=server.key))
        output: Any = NativeOutput(Report) if way == "NativeOutput" else ToolOutput(Report)
        settings: Any = {"max_tokens": server.max_tokens, "temperature": 0}
        answer = Agent(model, output_type=output, model_settings=settings, retries=0).run_sync(TASK[0]["content"])
        assert isinstance(answer.output, Report)

    return check


def pydantic_ai_cases() -> Iterator[tuple[str, Check]]:
    for way in ("NativeOutput", "ToolOutput"):
        yield way, pydantic_ai_case(way)


# The cases ----------------------------------------------------------------------------------------------------------

CLIENTS: tuple[tuple[str, str, Callable[[], Iterator[tuple[str, Check]]]], ...] = (
    ("openai (Python)", "openai", openai_cases),
    ("LangChain ChatOpenAI", "langchain_openai", langchain_cases),
    ("litellm", "litellm", litellm_cases),
    ("instructor", "instructor", instructor_cases),
    ("Pydantic AI", "pydantic_ai", pydantic_ai_cases),
)
"""Clients with the package that each needs, and its cases."""
