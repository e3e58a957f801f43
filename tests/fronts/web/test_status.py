from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.fronts.web.server import embeds_only, forever, front, settle
from tests.support.aio import in_loop
from tests.support.asgi import Client, get, post
from treadle.config import Settings
from treadle.core.refusals import Refusal
from treadle.errors import Busy
from treadle.fronts.connections import Connections
from treadle.fronts.served_models import Models, model_names
from treadle.fronts.web.app import create_app
from treadle.fronts.web.body import BodyBudget


@in_loop
async def test_health_tells_ready_from_live() -> None:
    """C4."""
    async with front() as f:
        for path in ("/health", "/health/ready", "/health/live"):
            client = await f.get(path)
            assert (client.status, client.json["status"]) == (200, "ok")
            assert (await Client("HEAD", path).run(f.app)).status == 200
        await f.engine.stop()
        assert (await f.get("/health/live")).status == 200
        ready = await f.get("/health/ready")
        assert (ready.status, ready.json["status"]) == (503, "unavailable")
        assert ready.json["error"]["code"] == (await f.chat()).json["error"]["code"] == "server_stopping"
        assert "retry-after" in ready.headers


@in_loop
async def test_health_is_not_ready_before_the_tokenizer_is_loaded() -> None:
    """C4: the engine may be ready earlier, and every request would still be refused."""
    async with front() as f:
        f.texts.loaded = None
        ready = await f.get("/health/ready")
        assert (ready.status, ready.json["state"]) == (503, "starting")
        assert "loading" in ready.json["reason"]
        assert (await f.get("/health/live")).status == 200
        status = (await f.get("/v1/status")).json
        assert (status["ready"], status["state"]) == (False, "starting")
        metrics = (await f.get("/metrics")).body.decode()
        assert "treadle_ready 0.0" in metrics
        assert 'treadle_engine_state{state="starting"} 1.0' in metrics
        assert 'treadle_engine_state{state="blocked"} 0.0' in metrics


@in_loop
async def test_while_the_text_processes_restart_health_and_requests_tell_the_same_time() -> None:
    async with front() as f:
        f.texts.loaded, f.texts.restarting, f.texts.back_s = None, True, 7.0
        ready = await f.get("/health/ready")
        assert (ready.status, ready.json["state"]) == (503, "restarting")
        assert ready.headers["retry-after"] == (await f.chat()).headers["retry-after"] == "7"
        assert 'treadle_engine_state{state="restarting"} 1.0' in (await f.get("/metrics")).body.decode()


@in_loop
async def test_status_answers_while_the_engine_does_nothing() -> None:
    """D3, A2: the owner does not step at all here."""
    async with front(forever, pump=False) as f:
        client = post("/v1/completions", {"prompt": "x"}).start(f.app)
        await f.step(0)
        status = (await f.get("/v1/status")).json
        assert status["model"] == "m"
        assert status["admission"]["rows"] == 1
        assert {"p50_ms", "p99_ms", "max_ms"} <= set(status["event_loop_lag"])
        client.leave()
        await f.step(2)
        assert client.task is not None
        await client.task


@in_loop
async def test_status_tells_whether_the_model_makes_embeddings_alone() -> None:
    """`treadle connect` asks for it."""
    async with front() as f:
        assert not (await f.get("/v1/status")).json["capabilities"]["embedding"].get("only")
        embeds_only(f)
        assert (await f.get("/v1/status")).json["capabilities"]["embedding"]["only"] is True


@in_loop
async def test_models_lists_the_served_name() -> None:
    async with front() as f:
        (card,) = (await f.get("/v1/models")).json["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == ("m", "model", 4096)
        assert (await f.get("/v1/models/m")).json == card
        assert (await f.get("/v1/models/demo")).status == 200
        missing = await f.get("/v1/models/some/other")
        assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")


@in_loop
async def test_unknown_routes_and_methods_answer_in_the_envelope() -> None:
    async with front() as f:
        nowhere = await f.get("/v1/nowhere")
        assert (nowhere.status, nowhere.json["error"]["code"]) == (404, "not_found")
        wrong = await f.get("/v1/completions")
        assert (wrong.status, wrong.json["error"]["code"], wrong.headers["allow"]) == (
            405,
            "method_not_allowed",
            "POST",
        )
        assert (await f.get("/v1/models/")).status == 404


@in_loop
async def test_metrics_count_what_happened() -> None:
    async with front() as f:
        await f.chat()
        await f.chat(n=0)
        text = (await f.get("/metrics")).body.decode()
        assert 'treadle_http_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
        assert 'treadle_http_requests_total{route="/v1/chat/completions",status="400"} 1.0' in text
        assert (
            'treadle_http_requests_total{route="/metrics",status="200"} 1.0' in (await f.get("/metrics")).body.decode()
        )
        assert 'treadle_finished_total{kind="chat",reason="stop"} 1.0' in text
        assert "treadle_completion_tokens_total 12.0" in text
        assert "treadle_ready 1.0" in text
        assert 'treadle_engine_state{state="ready"} 1.0' in text


@in_loop
async def test_status_and_metrics_count_refusals_by_the_same_reasons() -> None:
    """D3."""
    async with front(pump=False, running=1, waiting=0) as f:
        running = asyncio.create_task(f.chat())
        await settle(200)
        assert f.engine.busy == 1
        assert [(await f.chat()).status for _ in range(2)] == [503, 503]
        f.engine.drain()
        assert (await f.chat()).status == 503
        assert (await f.get("/v1/status")).json["admission"]["refused"] == {"queue_full": 2, "server_stopping": 1}
        for reason, count in (("queue_full", 2), ("server_stopping", 1), ("wait_over", 0)):
            assert f.telemetry.metrics.value("treadle_refused_total", {"reason": reason}) == count
        await f.step(100)
        assert (await running).status == 200


@in_loop
async def test_paths_that_clients_invent_do_not_become_metrics() -> None:
    async with front() as f:
        for i in range(20):
            await f.get(f"/v1/invented/{i}")
            await f.get(f"/v1/models/{i}/of/mine")
        assert f.telemetry.metrics.value("treadle_http_requests_total", {"route": "other", "status": "404"}) == 20
        of_models = {"route": "/v1/models/{model}", "status": "404"}
        assert f.telemetry.metrics.value("treadle_http_requests_total", of_models) == 20


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("GET", "/v1/models/m", "/v1/models/{model}"),
        ("GET", "/v1/responses/resp_1", "/v1/responses/{response_id}"),
        ("DELETE", "/v1/responses/resp_1", "/v1/responses/{response_id}"),
        ("POST", "/v1/responses/resp_1/cancel", "/v1/responses/{response_id}/cancel"),
        ("GET", "/v1/responses/resp_1/input_items", "/v1/responses/{response_id}/input_items"),
        ("POST", "/v1/requests/a/b/cancel", "/v1/requests/{request_id}/cancel"),
        ("GET", "/v1/responses/compact", "/v1/responses/compact"),
        ("GET", "/v1/status", "/v1/status"),
        ("GET", "/docs", "/docs"),
        ("GET", "/v1/response/resp_1", "other"),
    ],
)
@pytest.mark.parametrize("key", ["", "k"])
@in_loop
async def test_a_path_with_a_parameter_counts_for_its_route(method: str, path: str, route: str, key: str) -> None:
    """Also where it is refused for want of a key, before it is routed."""
    async with front(api_key="k") as f:
        client = await Client(method, path, headers={"x-api-key": key} if key else {}).run(f.app)
        assert (client.status == 401) is not bool(key)
        counted = {"route": route, "status": str(client.status)}
        assert f.telemetry.metrics.value("treadle_http_requests_total", counted) == 1


@in_loop
async def test_the_openapi_document_knows_every_field_and_failure() -> None:
    async with front() as f:
        document = (await f.get("/openapi.json")).json
        chat = document["components"]["schemas"]["ChatRequest"]
        assert chat["additionalProperties"] is False
        assert {"messages", "tools", "user", "top_k"} <= set(chat["properties"])
        responses = document["paths"]["/v1/chat/completions"]["post"]["responses"]
        assert {"200", "400", "413", "422", "503"} <= set(responses)
        assert "HTTPValidationError" not in document["components"]["schemas"]


def test_a_model_from_a_folder_is_known_by_the_folders_name() -> None:
    assert model_names(Settings(model="/models/gemma-3")) == ("gemma-3", "/models/gemma-3")
    assert model_names(Settings(model="org/name")) == ("org/name",)
    assert model_names(Settings(model="org/name", served_model_name="x")) == ("x", "org/name")


@in_loop
async def test_what_is_read_only_takes_head_too() -> None:
    async with front() as f:
        for path in ("/v1/models", "/v1/models/m", "/v1/status", "/metrics"):
            assert (await Client("HEAD", path).run(f.app)).status == 200
        assert (await Client("HEAD", "/v1/models/other").run(f.app)).status == 404


@in_loop
async def test_status_and_metrics_show_the_connections_of_each_front() -> None:
    async with front() as f:
        books = Connections(5, 2)
        books.enter("192.0.2.1")
        f.telemetry.metrics.watch_connections("http", books)
        app = create_app(Models(f.model), Settings(), f.telemetry, connections={"http": books})
        shown = (await get("/v1/status").run(app)).json["connections"]["http"]
        assert (shown["open"], shown["limit"], shown["per_peer"]) == (1, 5, 2)
        metrics = (await get("/metrics").run(app)).body.decode()
        assert 'treadle_connections{front="http"} 1.0' in metrics


@in_loop
async def test_the_event_loop_has_its_turns_during_a_scrape() -> None:
    async with front() as f:
        scrape = asyncio.create_task(f.get("/metrics"))
        turns = 0
        while not scrape.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 20


@in_loop
async def test_a_body_for_which_there_is_no_memory_is_among_the_refusals() -> None:
    told: list[Refusal] = []
    budget = BodyBudget(10, told.append)
    with pytest.raises(Busy):
        budget.take("alice", 11)
    assert told == [Refusal.BODY_BYTES]


PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


@in_loop
async def test_each_metric_and_each_field_of_the_status_is_in_the_documents() -> None:
    """And no metric is there that the server does not have."""
    named = set(re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8")))
    async with front() as f:
        await f.chat()
        status = (await f.get("/v1/status")).json
        families = re.findall(r"^# TYPE (\w+)", (await f.get("/metrics")).body.decode(), re.MULTILINE)
    fields = {name for part in ("admission", "engine", "bodies", "log") for name in status[part]}
    assert {*status, *fields, *families} <= named
    # With keys, in a whole server, and with a model.
    elsewhere = ("treadle_key_", "treadle_connections", "treadle_grpc_calls", "treadle_compute_", "treadle_kernel_")
    assert {name for name in named - set(families) if name.startswith("treadle_")} == {
        name for name in named if name.startswith(elsewhere)
    }
