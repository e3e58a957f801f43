"""Names of models: Anthropic's own, aliases, and the list in both shapes."""

from __future__ import annotations

from datetime import datetime

import pytest

from tests.fronts.web.anthropic.scenes import COUNT, HI, PATH
from tests.fronts.web.server import front
from tests.support.aio import in_loop
from tests.support.asgi import Client
from treadle.config import Settings
from treadle.errors import ConfigError
from treadle.fronts.served_models import alias_names, model_names

VERSION = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize("name", ["claude-opus-4-8", "claude-3-5-haiku-20241022", "m", "demo", "gpt-4", None])
@in_loop
async def test_names_of_anthropic_and_aliases_mean_the_served_model(name: str | None) -> None:
    async with front(alias=("gpt-4",)) as f:
        body = {"messages": HI, "max_tokens": 3, "model": name}
        assert (await f.post(PATH, body)).json["model"] == "m"
        assert (await f.post(COUNT, body)).status == 200


@in_loop
async def test_a_name_of_anthropic_is_a_name_where_one_is_required() -> None:
    async with front(require_model=True) as f:
        body = {"messages": HI, "max_tokens": 3}
        assert (await f.post(PATH, {**body, "model": "claude-x"})).status == 200
        assert (await f.post(PATH, body)).status == 400


@in_loop
async def test_names_of_anthropic_mean_nothing_to_openais_clients_unless_they_are_aliases() -> None:
    async with front(alias=("claude-x=m",)) as f:
        assert (await f.chat(model="claude-x", max_tokens=3)).status == 200
        assert (await f.chat(model="claude-y", max_tokens=3)).status == 404


@in_loop
async def test_the_list_has_the_shape_of_its_client() -> None:
    async with front(alias=("claude-x",), max_tokens=50) as f:
        found = (await f.get("/v1/models", headers=VERSION)).json
        assert (found["first_id"], found["last_id"], found["has_more"]) == ("m", "claude-x", False)
        first, second = found["data"]
        assert (first["type"], first["id"], first["display_name"]) == ("model", "m", "m")
        assert (second["id"], second["display_name"]) == ("claude-x", "m")
        assert (first["max_input_tokens"], first["max_tokens"]) == (4096, 50)
        assert datetime.fromisoformat(first["created_at"]).tzinfo is not None
        assert [card["id"] for card in (await f.get("/v1/models")).json["data"]] == ["m", "claude-x"]


@in_loop
async def test_one_model_has_the_shape_of_its_client() -> None:
    async with front(alias=("other",)) as f:
        for name in ("m", "other", "claude-anything"):
            found = (await f.get(f"/v1/models/{name}", headers=VERSION)).json
            assert (found["type"], found["id"]) == ("model", name)
        missing = await f.get("/v1/models/nope", headers=VERSION)
        assert (missing.status, missing.json["error"]["type"]) == (404, "not_found_error")


@in_loop
async def test_the_root_answers_the_probe_of_clients() -> None:
    async with front() as f:
        head = await Client("HEAD", "/").run(f.app)
        assert head.status == 200
        assert (await f.get("/", headers=VERSION)).json["model"] == "m"


def test_aliases_are_names_behind_the_others() -> None:
    settings = Settings(model="org/name", served_model_name="x", alias=("a", "b=x", "c = org/name", "x"))
    assert alias_names(settings) == ("a", "b", "c")
    assert model_names(settings) == ("x", "org/name", "a", "b", "c")


def test_an_alias_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a=other.*demo"):
        alias_names(Settings(alias=("a=other",)))


@pytest.mark.parametrize("alias", ["=demo", "a=", "="])
def test_an_alias_that_is_not_complete_is_refused(alias: str) -> None:
    with pytest.raises(ConfigError, match="NAME=MODEL"):
        Settings(alias=(alias,))
