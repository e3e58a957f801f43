from __future__ import annotations

import ast
import json
import shlex
from dataclasses import replace

import pytest

from tests.fronts.web.server import Front, embeds_only, forever, front
from tests.fronts.web.site.reader import Page, contrast
from tests.support.aio import in_loop
from tests.support.asgi import Client, post
from treadle.fronts.web.site.home import root_of
from treadle.fronts.web.site.negotiate import wants_html
from treadle.fronts.web.site.shell import POLICY, STYLE
from treadle.fronts.web.site.snippets import FirstCall, Snippets, pretty

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"
HOSTILE = "a'b\"<script>alert(1)</script>&$(id)`\\n"


async def home(f: Front, accept: str = BROWSER, **headers: str) -> Client:
    return await f.get("/", headers={"accept": accept, **headers})


# HTML or JSON


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        (BROWSER, True),
        ("text/html", True),
        ("TEXT/HTML; q=0.5", True),
        ("text/html;q=0.9, application/json;q=0.8", True),
        ("application/json, text/html", True),
        ("text/html;q=0.5, application/json", False),
        ("application/json", False),
        ("*/*", False),
        ("text/html;q=0", False),
        ("text/html;q=much", False),
        ("text/html;level=1;q=0.5", True),
        (";;,,=", False),
        ("", False),
    ],
)
def test_html_is_for_those_who_name_it(accept: str, html: bool) -> None:
    assert wants_html({"headers": [(b"accept", accept.encode())]}) is html


def test_accept_may_come_in_several_lines() -> None:
    lines = [(b"accept", b"image/png"), (b"accept", b"text/html")]
    assert wants_html({"headers": lines})
    assert not wants_html({"headers": []})


@in_loop
async def test_programs_get_json() -> None:
    async with front() as f:
        for accept in ("application/json", "*/*"):
            client = await home(f, accept)
            assert (client.status, client.headers["content-type"]) == (200, "application/json")
            assert client.json["base_url"] == "http://localhost/v1"
            assert (client.json["model"], client.json["state"], client.json["ready"]) == ("m", "ready", True)
            assert "Accept" in client.headers["vary"]
        for path in (await home(f, "*/*")).json["links"].values():
            assert (await f.get(path)).status == 200, path


@in_loop
async def test_browsers_get_a_page_that_needs_nothing_of_the_network() -> None:
    async with front() as f:
        client = await home(f)
        page = Page(client.body.decode())
        assert client.headers["content-type"] == "text/html; charset=utf-8"
        assert (page.of("model"), page.of("state")) == ("m", "Ready")
        assert len(client.body) < 30_000
        for link in page.links:
            assert link.startswith("data:image/svg") or (await f.get(f"/{link.removeprefix('./')}")).status == 200, link


@in_loop
async def test_head_answers_without_the_engine() -> None:
    """Clients probe a base URL with it; neither it nor the page waits for a step."""
    async with front(forever, pump=False) as f:
        stream = post("/v1/completions", {"prompt": "x"}).start(f.app)
        await f.step(0)
        assert (await Client("HEAD", "/").run(f.app)).status == 200
        assert (await home(f)).status == 200
        stream.leave()
        await f.step(2)
        assert stream.task is not None
        await stream.task


# State


@in_loop
async def test_the_page_answers_while_the_model_loads() -> None:
    async with front() as f:
        f.texts.loaded = None
        f.engine.admission.capabilities = None
        page = Page((await home(f)).body.decode())
        assert (page.of("state"), page.of("why")) == ("Loading", "the model is loading")
        assert page.of("about") == ""
        assert (await home(f, "*/*")).json["ready"] is False


@in_loop
async def test_the_page_answers_while_the_server_drains() -> None:
    async with front() as f:
        f.engine.drain()
        page = Page((await home(f)).body.decode())
        assert (page.of("state"), page.of("why")) == ("Draining", "the server is shutting down")


@in_loop
async def test_the_page_answers_after_the_engine_is_gone() -> None:
    async with front() as f:
        await f.engine.stop()
        assert Page((await home(f)).body.decode()).of("state") == "Stopped"


# What the model is called


@in_loop
async def test_hostile_names_are_escaped() -> None:
    async with front(served_model_name=HOSTILE) as f:
        page = Page((await home(f)).body.decode())
        assert page.of("model") == HOSTILE
        assert not page.blocked_by(POLICY)
        docs = Page((await f.get("/docs")).body.decode())
        assert not docs.blocked_by(POLICY)
        assert "alert(1)" not in "".join(page.scripts + docs.scripts)


@pytest.mark.parametrize(
    ("host", "root"),
    [
        (b"example.org:81", "https://example.org:81"),
        (b"[::1]:8000", "https://[::1]:8000"),
        (b'"><b>x', "https://127.0.0.1:8000"),
        (b"a/b", "https://127.0.0.1:8000"),
        (b"", "https://127.0.0.1:8000"),
    ],
)
def test_the_address_is_the_clients_where_it_is_one(host: bytes, root: str) -> None:
    assert root_of({"scheme": "https", "server": ("127.0.0.1", 8000), "headers": [(b"host", host)]}) == root


@pytest.mark.parametrize("model", ["m", HOSTILE, "модель", "org/name-4bit", "x\n-d @/etc/passwd"])
@pytest.mark.parametrize(
    ("first", "path"),
    [
        (FirstCall.CHAT, "chat/completions"),
        (FirstCall.COMPLETION, "completions"),
        (FirstCall.EMBEDDING, "embeddings"),
    ],
)
@pytest.mark.parametrize("key_needed", [True, False])
def test_snippets_quote_the_model_for_their_language(model: str, first: FirstCall, path: str, key_needed: bool) -> None:
    caller = Snippets(model, key_needed, first, "http://h:1")
    code = {name: Page(f"<pre>{html}</pre>").code[0] for name, html in caller.all().items()}
    words = shlex.split(code["curl"])
    assert words[:2] == ["curl", f"http://h:1/v1/{path}"]
    assert json.loads(words[words.index("-d") + 1])["model"] == model
    assert ("Authorization: Bearer $TREADLE_API_KEY" in words) is key_needed
    (call,) = [n for n in ast.walk(ast.parse(code["Python"])) if isinstance(n, ast.keyword) and n.arg == "model"]
    assert ast.literal_eval(call.value) == model
    assert f"model: {json.dumps(model, ensure_ascii=False)}" in code["JavaScript"]
    assert "OPENAI_BASE_URL=http://h:1/v1" in code["env"]


def test_json_for_people_is_json() -> None:
    value = {"a": [{"b": "x" * 50}, {"c": ["y" * 50, {}, []]}], "é": None, "f": 1.5}
    assert json.loads(pretty(value)) == value
    assert pretty({"a": 1}) == '{"a": 1}'


# Looks


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(
    ("ink", "paper"),
    [
        *((ink, paper) for ink in ("ink", "soft", "link") for paper in ("bg", "card", "code")),
        ("good", "good-bg"),
        ("bad", "bad-bg"),
        ("bad", "card"),
        ("warn", "warn-bg"),
        ("even", "even-bg"),
        ("on-accent", "accent"),
    ],
)
def test_text_stands_out_from_its_ground(ink: str, paper: str, dark: bool) -> None:
    """WCAG AA."""
    assert contrast(STYLE, ink, paper, dark=dark) >= 4.5


@in_loop
async def test_a_model_without_a_chat_template_is_not_asked_to_chat() -> None:
    async with front() as f:
        assert f.texts.loaded is not None
        f.texts.loaded = replace(f.texts.loaded, chat_template=None, no_chats="this model has no chat template")
        page = Page((await home(f)).body.decode())
        assert page.code[1].startswith("curl http://localhost/v1/completions")


@in_loop
async def test_an_embedding_model_is_shown_with_embeddings() -> None:
    async with front() as f:
        embeds_only(f)
        page = Page((await home(f)).body.decode())
        curl, python, javascript = page.code[1:4]
        assert curl.startswith("curl http://localhost/v1/embeddings")
        words = shlex.split(curl)
        assert (await f.post("/v1/embeddings", [words[words.index("-d") + 1].encode()])).status == 200
        assert "client.embeddings.create(" in python
        assert "client.embeddings.create(" in javascript
        assert "one input" in page.of("about")
        assert "no KV cache" in page.of("about")
