from __future__ import annotations

import re
import shlex
from collections import Counter
from typing import Any

import pytest

from tests.fronts.web.server import Front, embeds_only, front
from tests.fronts.web.site.reader import Page
from tests.support.aio import in_loop
from treadle.errors import ConfigError, JobFailed, MessageTimeout, ModelError, ReaderStalled, StartFailed, TreadleError
from treadle.fronts.web.errors import ClientLeft
from treadle.fronts.web.site.docs import ERRORS, Docs, examples_of, operations_of
from treadle.fronts.web.site.examples import ANSWERS, FIELDS, REQUESTS
from treadle.fronts.web.site.fields import GROUPS, IDLE, Fields
from treadle.fronts.web.site.snippets import FirstCall, Snippets

LEADS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
WITH_ERRORS = ("errors", "content_coding", "request_routes", "responses.store")
CALLER = Snippets("m", key_needed=False, first=FirstCall.CHAT, root="http://h")


async def docs(f: Front, **headers: str) -> Page:
    client = await f.get("/docs", headers={"accept": "text/html", **headers})
    assert client.status == 200
    return Page(client.body.decode())


@in_loop
async def test_the_page_leads_with_chat_and_its_messages() -> None:
    async with front() as f:
        page = await docs(f)
        order = [page.ids.index(name) for name in ("chat-completions", "chat-completions-messages")]
        others = [i for i, name in enumerate(page.ids) if name.startswith("chat-completions-")]
        assert order[1] == min(others)
        assert order[0] < page.ids.index("completions") < page.ids.index("routes") < page.ids.index("errors")
        assert page.code[1].startswith("curl http://localhost/v1/chat/completions")
        assert '"messages": [' in page.code[1]


@in_loop
async def test_every_route_field_and_shape_is_shown_once() -> None:
    async with front() as f:
        page, document = await docs(f), (await f.get("/openapi.json")).json
        assert [name for name, count in Counter(page.ids).items() if count > 1] == []
        for path in document["paths"]:
            assert path in page.text
        for name in document["components"]["schemas"]["ChatRequest"]["properties"]:
            assert f"chat-completions-{name}" in page.ids, name
        for name in document["components"]["schemas"]["CompletionRequest"]["properties"]:
            assert f"completions-{name}" in page.ids, name
        assert "role" in page.text


@in_loop
async def test_the_page_links_only_to_itself_and_to_this_server() -> None:
    async with front() as f:
        page = await docs(f)
        for link in page.links:
            if link.startswith("#"):
                assert link[1:] in page.ids
            elif not link.startswith("data:image/svg"):
                assert (await f.get(f"/{link.removeprefix('./')}")).status == 200, link


@in_loop
async def test_the_examples_name_the_served_model_and_work_as_they_stand() -> None:
    async with front() as f:
        for code in (await docs(f)).code:
            if not code.startswith("curl ") or "{response_id}" in code:
                continue
            words = shlex.split(code)
            address = next(word for word in words if word.startswith("http://localhost"))
            path = address.removeprefix("http://localhost")
            if "-d" in words:
                body = words[words.index("-d") + 1].encode()
                client = await f.post(path, [body])
            elif "-X" in words:
                client = await f.post(path, {})
            else:
                client = await f.get(path)
            runs_no_more = path.endswith("/cancel")
            assert client.status == (404 if runs_no_more else 200), code


@in_loop
async def test_an_embedding_model_is_documented_with_calls_that_it_answers() -> None:
    async with front() as f:
        embeds_only(f)
        page = await docs(f)
        calls = [code for code in page.code if code.startswith("curl ")]
        assert calls[0].startswith("curl http://localhost/v1/embeddings")
        for code in calls:
            words = shlex.split(code)
            if "-d" in words:
                path = words[1].removeprefix("http://localhost")
                assert (await f.post(path, [words[words.index("-d") + 1].encode()])).status == 200, code
        assert "generates no text" in page.text


@in_loop
async def test_the_page_names_every_route_that_the_document_leaves_out() -> None:
    async with front() as f:
        page, documented = await docs(f), (await f.get("/openapi.json")).json["paths"]
        included = [getattr(route, "original_router", route) for route in f.app.routes]
        routes = [inner for one in included for inner in getattr(one, "routes", [one])]
        paths = (re.sub(r":\w+}", "}", route.path) for route in routes)
        served = {path for path in paths if path.startswith(("/api/", "/v1/"))}
        assert "/api/show" in served
        assert {path for path in served - set(documented) if path not in page.text} == set()


@in_loop
async def test_example_answers_have_the_keys_of_real_ones() -> None:
    async with front() as f:
        for (method, path), example in ANSWERS.items():
            if isinstance(example, str):
                continue
            at = path.replace("{model}", "m")
            client = await (f.get(at) if method == "get" else f.post(at, REQUESTS.get(path, {}) | model(path)))
            assert client.status == 200, path
            assert list(example) == [key for key in client.json if key in example], path
            if path != "/v1/status":
                assert set(example) == set(client.json), path


def model(path: str) -> dict[str, Any]:
    return {"model": "m"} if path in REQUESTS else {}


@pytest.mark.parametrize("path", LEADS)
@in_loop
async def test_example_fields_are_valid(path: str) -> None:
    async with front() as f:
        lead = LEADS[path]
        client = await f.post(path, {**REQUESTS[path], "model": "m", lead: FIELDS[lead]})
        assert client.status == 200, client.body


@in_loop
async def test_a_key_is_named_in_every_example() -> None:
    async with front(api_key="secret") as f:
        page = await docs(f, authorization="Bearer secret")
        calls = [code for code in page.code if code.startswith("curl ")]
        assert len(calls) >= 10
        assert all('-H "Authorization: Bearer $TREADLE_API_KEY"' in code for code in calls)


def test_every_error_that_a_request_can_get_is_explained() -> None:
    def tree(kind: type[TreadleError]) -> set[type[TreadleError]]:
        return {kind}.union(*map(tree, kind.__subclasses__()))

    before_and_after = {ConfigError, ModelError, StartFailed, JobFailed}
    modules = {f"treadle.{name}" for name in ("errors", *(f"fronts.web.{name}" for name in WITH_ERRORS))}
    known = {kind for kind in tree(TreadleError) if kind.__module__ in modules}
    unheard = {ClientLeft, ReaderStalled}
    grpc_alone = {MessageTimeout}
    assert set(ERRORS) == known - unheard - before_and_after - grpc_alone


# Any document


INNER = {"properties": {"deep": {"type": "boolean"}, "audio": {"enum": [None]}}}


def document(body: dict[str, Any], media: dict[str, Any] | None = None) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Body"}, **(media or {})}}
    return {
        "info": {"title": "T", "version": "1"},
        "paths": {"/v1/any": {"post": {"requestBody": {"content": content}, "responses": {}}}},
        "components": {"schemas": {"Body": body, "Inner": INNER}},
    }


def shown(body: dict[str, Any], media: dict[str, Any] | None = None) -> Page:
    return Page(Docs(document(body, media), CALLER).html())


def test_ranges_enums_defaults_and_inner_shapes_are_shown() -> None:
    page = shown(
        {
            "required": ["must"],
            "properties": {
                "must": {"type": "string", "enum": ["a", "b"], "description": "Says `which`."},
                "n": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 128}, {"type": "null"}], "default": 1},
                "inner": {"$ref": "#/components/schemas/Inner"},
            },
        }
    )
    assert '"a" or "b"' in page.of("any-must") or '"a" or "b"' in page.text
    assert "needed" in page.text
    assert "1 to 128" in page.of("any-n")
    assert "Default: 1." in page.of("any-n")
    assert "boolean" in page.of("any-Inner-deep")
    assert "Only null or empty: audio." in page.text


def test_the_documents_own_examples_win() -> None:
    both = {"one": {"summary": "First", "value": {"x": 1}}, "two": {"summary": "A stream", "value": {"x": 2}}}
    page = shown({"properties": {}}, {"examples": both})
    assert '{"x": 1}' in page.code[1]
    assert "A stream" in page.text
    assert '{"x": 2}' in page.code[2]
    assert list(examples_of({"example": 5}, {})) == [("", 5)]


def test_an_example_stands_beside_its_own_answer() -> None:
    body = {"$ref": "#/components/schemas/Body"}
    asked = {"example": {"prompt": "theirs"}, "schema": body}
    told = {"content": {"application/json": {"example": {"text": "their answer"}}}}
    both = document({"properties": {}})
    both["paths"] = {
        "/v1/completions": {
            "post": {"requestBody": {"content": {"application/json": asked}}, "responses": {"200": told}}
        }
    }
    page = Page(Docs(both, CALLER).html())
    assert '"theirs"' in page.code[1]
    assert '"their answer"' in page.code[2]
    both["paths"]["/v1/completions"]["post"]["responses"] = {}
    page = Page(Docs(both, CALLER).html())
    assert "Water boils" in page.code[1]
    assert "100 degrees" in page.code[2]
    assert '"theirs"' in page.code[3]


def test_a_head_beside_a_get_is_not_shown() -> None:
    paths = {"/a": {"get": {}, "head": {}}, "/b": {"head": {}}}
    assert [(one.method, one.path) for one in operations_of({"paths": paths})] == [("get", "/a"), ("head", "/b")]


def test_what_the_document_says_is_escaped() -> None:
    page = shown({"properties": {"<b>": {"type": "string", "description": "<i>`<u>`</i>", "default": "<s>"}}})
    assert not {"b", "i", "u", "s"} & set(page.tags)


def test_no_field_is_in_two_groups() -> None:
    names = [name for group in GROUPS.values() for name in group]
    assert len(names) == len(set(names))
    fields = Fields("/v1/x", {"properties": {"new": {}, "model": {}}}, {}, {})
    assert fields.groups() == {"Model and limits": ["model"], "Other fields": ["new"]}


@pytest.mark.parametrize(
    ("path", "name", "title"),
    [
        ("/v1/chat/completions", "thinking", "Names that other servers use"),
        ("/v1/messages", "thinking", "Reasoning"),
        ("/v1/messages/count_tokens", "output_config", "Structured output"),
        ("/v1/responses", "reasoning", "Reasoning"),
        ("/v1/responses/compact", "stop", "Beyond OpenAI"),
        ("/v1/responses", "prompt", IDLE),
    ],
)
def test_a_field_is_in_the_group_that_it_has_in_its_dialect(path: str, name: str, title: str) -> None:
    fields = Fields(path, {"properties": {"input": {}, name: {}}}, {}, {})
    assert fields.main_fields() == ["input"]
    assert fields.groups() == {title: [name]}


@in_loop
async def test_a_slash_too_many_leads_to_the_page() -> None:
    async with front() as f:
        client = await f.get("/docs/")
        assert (client.status, client.headers["location"]) == (307, "../docs")
