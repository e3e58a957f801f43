"""The OpenAPI document against the server it describes. `benchmarks/conformance.py` does the same with thousands of
requests; what it found is pinned here and in test_leniency."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fronts.web.server import front
from tests.support.aio import in_loop
from tests.support.asgi import Client
from treadle.fronts.web.schema_limits import at_most
from treadle.fronts.web.site.docs import ERRORS

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
Document = dict[str, Any]


async def document(**settings: Any) -> Document:
    async with front(**settings) as f:
        found: Document = (await f.get("/openapi.json")).json
        return found


def fields(document: Document, name: str = "ChatRequest") -> dict[str, Any]:
    found: dict[str, Any] = document["components"]["schemas"][name]["properties"]
    return found


def kind(field: dict[str, Any], name: str) -> dict[str, Any]:
    """The alternative of this type."""
    found: dict[str, Any] = next(one for one in field.get("anyOf", [field]) if one.get("type") == name)
    return found


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


@in_loop
async def test_every_route_and_method_is_documented() -> None:
    async with front() as f:
        paths = (await f.get("/openapi.json")).json["paths"]
        documented = {(path, method.upper()) for path, operations in paths.items() for method in operations}
        for path in {path for path, _ in documented}:
            refused = {method for method in METHODS if (await Client(method, _concrete(path)).run(f.app)).status == 405}
            assert METHODS - refused == {method for known, method in documented if known == path}, path


def _concrete(path: str) -> str:
    return path.replace("{model}", "m")


@in_loop
async def test_a_method_that_is_not_allowed_names_those_that_are() -> None:
    async with front() as f:
        for path, allowed in (("/health", {"GET", "HEAD"}), ("/v1/models", {"GET", "HEAD"}), (CHAT, {"POST"})):
            client = await Client("DELETE", path).run(f.app)
            assert (client.status, set(client.headers["allow"].split(", "))) == (405, allowed)


@in_loop
async def test_every_reference_leads_somewhere() -> None:
    found = await document()
    names = {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
    assert references(found) <= names


@pytest.mark.parametrize("request_name", ["ChatRequest", "CompletionRequest"])
@in_loop
async def test_the_model_is_a_required_field_where_the_server_requires_it(request_name: str) -> None:
    free, required = [(await document(require_model=on))["components"]["schemas"][request_name] for on in (False, True)]
    assert required["required"] == [*free["required"], "model"]
    assert kind(free["properties"]["model"], "null")
    assert required["properties"]["model"] == kind(free["properties"]["model"], "string")


@in_loop
async def test_answers_are_documented_with_their_types() -> None:
    paths = (await document())["paths"]
    types = {path: set(next(iter(of.values()))["responses"]["200"]["content"]) for path, of in paths.items()}
    assert types["/metrics"] == {"text/plain"}
    assert types[CHAT] == types[TEXT] == {"application/json", "text/event-stream"}
    assert types["/v1/status"] == types["/health"] == {"application/json"}
    for path in ("/health", "/health/live", "/health/ready"):
        assert {"200", "503"} <= set(paths[path]["get"]["responses"])
        assert all("content" not in answer for answer in paths[path]["head"]["responses"].values())


@in_loop
async def test_every_error_that_generation_ends_with_is_documented() -> None:
    paths = (await document())["paths"]
    possible = {str(error.http_status) for error in ERRORS} - {"405"}
    for path in (CHAT, TEXT):
        responses = paths[path]["post"]["responses"]
        assert possible <= set(responses)
        assert "x-should-retry" in responses["422"]["headers"]


@in_loop
async def test_every_part_of_the_status_is_documented() -> None:
    async with front() as f:
        told = set((await f.get("/v1/status")).json)
        assert told == set(fields((await f.get("/openapi.json")).json, "Status"))


@in_loop
async def test_the_message_field_comes_first_and_the_examples_are_answered() -> None:
    async with front() as f:
        found = (await f.get("/openapi.json")).json
        assert next(iter(fields(found))) == "messages"
        assert next(iter(fields(found, "CompletionRequest"))) == "prompt"
        for path in (CHAT, TEXT):
            content = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]
            for example in content["examples"].values():
                assert (await f.post(path, example["value"])).status == 200


@in_loop
async def test_the_document_has_the_limits_of_this_server_and_model() -> None:
    found = await document(max_tokens=50, running=3, waiting=2, context=1000)
    chat, text = fields(found), fields(found, "CompletionRequest")
    assert kind(chat["n"], "integer")["maximum"] == 5
    assert kind(chat["model"], "string")["enum"] == ["m", "demo"]
    assert kind(chat["max_tokens"], "integer") == {"type": "integer", "minimum": 1, "maximum": 50}
    assert kind(chat["num_predict"], "integer")["anyOf"][0] == {"minimum": 1, "maximum": 50}
    assert kind(fields(found, "Options")["num_ctx"], "integer")["maximum"] == 1000
    assert kind(chat["stop_token_ids"], "array")["items"]["maximum"] == 260
    strings, ids, lists = text["prompt"]["anyOf"][1:]
    assert (strings["maxItems"], lists["maxItems"]) == (5, 5)
    assert ids["items"]["maximum"] == lists["items"]["items"]["maximum"] == 260
    for example in found["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["examples"].values():
        assert example["value"]["max_tokens"] == 50


@in_loop
async def test_the_document_changes_when_the_model_has_been_loaded() -> None:
    async with front() as f:
        loaded = f.app.openapi()
        assert f.app.openapi() is loaded
        f.engine.admission.capabilities = None
        assert "maximum" not in kind(fields(f.app.openapi())["stop_token_ids"], "array")["items"]


@in_loop
async def test_an_api_key_is_documented_where_one_is_needed() -> None:
    assert "security" not in await document()
    async with front(api_key="k") as f:
        found = (await f.get("/openapi.json", headers={"authorization": "Bearer k"})).json
        assert found["security"] == [{"bearer": []}, {"x-api-key": []}]
        assert found["paths"]["/health/live"]["get"]["security"] == []
        assert "security" not in found["paths"]["/health"]["get"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("temperature", {"minimum": 0, "maximum": 2}),
        ("top_p", {"exclusiveMinimum": 0, "maximum": 1}),
        ("presence_penalty", {"minimum": -2, "maximum": 2}),
    ],
)
@in_loop
async def test_ranges_are_documented(name: str, expected: dict[str, float]) -> None:
    assert kind(fields(await document())[name], "number") == {"type": "number", **expected}


@in_loop
async def test_what_can_not_be_asked_together_is_documented() -> None:
    chat = (await document())["components"]["schemas"]["ChatRequest"]
    assert chat["not"]["required"] == ["continue_final_message", "add_generation_prompt"]


@in_loop
async def test_messages_are_documented_by_role() -> None:
    schemas = (await document())["components"]["schemas"]
    mapping = schemas["Message"]["discriminator"]["mapping"]
    assert set(mapping) == {"system", "developer", "user", "assistant", "tool", "function"}
    assert schemas["UserMessage"]["required"] == ["role", "content"]
    assert schemas["AssistantMessage"]["required"] == ["role"]
    assert schemas["UserMessage"]["properties"]["function_call"] == {"type": "null"}
    assert schemas["AssistantMessage"]["properties"]["function_call"] != {"type": "null"}
    assert "additionalProperties" not in schemas["UserMessage"]


@given(last=st.integers(0, 300_000), number=st.integers(0, 400_000))
def test_the_pattern_of_token_ids_matches_those_of_the_model(last: int, number: int) -> None:
    pattern = re.compile(at_most(last))
    assert bool(pattern.fullmatch(str(number))) == (number <= last)
    assert pattern.fullmatch(str(last))
    assert not pattern.fullmatch(str(last + 1))
    assert not pattern.fullmatch("0" + str(number))
