from __future__ import annotations

import pytest

from tests.fronts.web.server import Front, front
from tests.fronts.web.site.reader import Page
from tests.support.aio import in_loop
from tests.support.asgi import Client
from treadle.fronts.web.site.key import KEY_PAGE
from treadle.fronts.web.site.shell import HEADERS, POLICY, SCRIPTS, STYLE

KEY = "s3cret"
MODEL = "a-model-nobody-knows"
PATHS = ["/", "/docs", "/openapi.json", "/v1/status", "/metrics", "/v1/models", "/nowhere", "//evil.example/x"]


async def browse(f: Front, path: str, method: str = "GET", **headers: str) -> Client:
    return await Client(method, path, headers={"accept": "text/html,*/*;q=0.8", **headers}).run(f.app)


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_a_browser_without_the_key_is_asked_for_it_and_told_nothing_else(path: str) -> None:
    """S1: the page is the same for every path and every server."""
    async with front(api_key=KEY, served_model_name=MODEL) as f:
        client = await browse(f, path)
        assert (client.status, client.headers["www-authenticate"]) == (401, "Bearer")
        assert client.headers["content-type"].startswith("text/html")
        page = Page(client.body.decode())
        assert "API key needed" in page.text
        assert MODEL not in page.html
        assert KEY not in page.html
    async with front(api_key="other", host="0.0.0.0") as other:
        assert (await browse(other, "/")).body == client.body


@in_loop
async def test_programs_without_the_key_get_the_envelope() -> None:
    async with front(api_key=KEY) as f:
        for method, path, accept in (
            ("GET", "/", "application/json"),
            ("GET", "/docs", "*/*"),
            ("POST", "/v1/chat/completions", "text/html"),
        ):
            client = await browse(f, path, method, accept=accept)
            assert (client.status, client.json["error"]["code"]) == (401, "invalid_api_key")
        head = await browse(f, "/", "HEAD")
        assert head.status == 401


@in_loop
async def test_the_key_opens_the_pages() -> None:
    async with front(api_key=KEY, served_model_name=MODEL) as f:
        home = await browse(f, "/", authorization=f"Bearer {KEY}")
        assert (home.status, Page(home.body.decode()).of("model")) == (200, MODEL)
        assert "$TREADLE_API_KEY" in Page(home.body.decode()).text
        assert (await browse(f, "/", "HEAD", authorization=f"Bearer {KEY}")).status == 200
        docs = await browse(f, "/docs", authorization=f"Bearer {KEY}")
        assert (docs.status, "messages" in docs.body.decode()) == (200, True)
        assert KEY not in home.body.decode() + docs.body.decode()


@in_loop
async def test_every_page_runs_under_the_policy_of_the_key_page() -> None:
    """It shows the other pages in its own document, and a browser keeps a document's first policy."""
    async with front(api_key=KEY) as f:
        asked = await browse(f, "/")
        assert asked.headers["content-security-policy"] == POLICY
        for path in ("/", "/docs"):
            client = await browse(f, path, authorization=f"Bearer {KEY}")
            assert {name: client.headers[name] for name in HEADERS} == HEADERS
            for answer in (client, asked):
                page = Page(answer.body.decode())
                assert page.scripts
                assert not page.blocked_by(POLICY)


@in_loop
async def test_a_foreign_site_gets_no_page() -> None:
    """S2: asking for a key under a foreign name would hand it to whoever owns the name."""
    async with front() as f:
        client = Client("GET", "/", headers={"accept": "text/html"})
        client._headers[0] = (b"host", b"evil.example")
        await client.run(f.app)
        assert (client.status, client.json["error"]["code"]) == (403, "foreign_site")


def test_the_key_never_gets_into_an_address_or_into_lasting_storage() -> None:
    html = KEY_PAGE.decode()
    assert " name=" not in html[html.index("<form") : html.index("</form>")]
    for script in SCRIPTS.values():
        assert "localStorage" not in script
        assert "cookie" not in script


def test_scripts_and_style_can_stand_inside_a_document() -> None:
    for text in (*SCRIPTS.values(), STYLE):
        assert "</" not in text
        assert "<!--" not in text
        assert "\r" not in text
