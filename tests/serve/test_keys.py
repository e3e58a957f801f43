"""API keys on a real server: several at once, revoked while it runs, on both wires, and in no other process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import grpc
import openai
import psutil
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from tests.serve.conftest import Start, Tiny
from tests.serve.gateway import Gateway, grpc_url
from tests.serve.server import Serve, until
from tests.serve.test_fleet import Running, shown, started
from treadle.processes import free_port

SECRET = "secret-of-this-test-0123456789abcdef"


def keys(path: Path, *arguments: str, given: str = "") -> str:
    """`treadle keys` on the file; what it printed on standard output."""
    command = [sys.executable, "-m", "treadle", "keys", *arguments, "--api-keys", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, input=given).stdout.strip()


def models(server: Serve, key: str) -> int:
    return server.http.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code


def test_keys_are_made_used_limited_and_revoked_while_the_server_runs(start: Start, tiny: Tiny, tmp_path: Path) -> None:
    """S1: no restart, and nothing but hashes on the disk."""
    path = tmp_path / "keys.toml"
    alice, boss = keys(path, "add", "alice"), keys(path, "add", "boss", "--scope", "admin")
    server = start(tiny(), "--api-keys", str(path), env={"TREADLE_API_KEY": ""})
    until("ready", lambda: server.http.get(f"{server.url}/health/ready", headers={"x-api-key": boss}).is_success, 60)
    assert (models(server, alice), models(server, boss), models(server, "wrong")) == (200, 200, 401)
    assert alice not in path.read_text()
    assert keys(path, "list").splitlines()[0].split()[:2] == ["alice", "use"]
    reset = f"{server.url}/v1/prefix_cache/reset"
    assert server.http.post(reset, headers={"x-api-key": alice}).status_code == 403
    assert server.http.post(reset, headers={"x-api-key": boss}).status_code == 200
    carol = keys(path, "add", "carol", "--requests-per-minute", "1")
    until("carol", lambda: models(server, carol) == 200)
    keys(path, "remove", "alice")
    until("alice is out", lambda: models(server, alice) == 401)
    assert models(server, boss) == 200
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=carol, max_retries=0, timeout=60) as client:
        assert client.completions.create(model=str(tiny()), prompt="hi", max_tokens=2).usage
        with pytest.raises(openai.RateLimitError) as limited:
            client.completions.create(model=str(tiny()), prompt="hi", max_tokens=2)
        assert limited.value.code == "rate_limit_exceeded"
        assert float(limited.value.response.headers["retry-after"]) > 1
        with pytest.raises(openai.PermissionDeniedError, match="needs the scope 'admin'"):
            client.get("/../metrics", cast_to=str)
        client.api_key = alice
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    assert "keys file read again" in server.said
    until("its line in the log", lambda: "key=carol" in server.said)
    assert not any(key in server.said for key in (alice, boss, carol))


@pytest.fixture(scope="module")
def server(start_shared: Start, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """A worker with the key SECRET, on all addresses; its environment has other secrets, too."""
    hashes = tmp_path_factory.mktemp("keys") / f"{SECRET}.toml"
    keys(hashes, "add", "alice")
    secrets = dict.fromkeys(("TREADLE_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), SECRET)
    options = ("--grpc-port", "0", "--grpc-host", "0.0.0.0", "--served-model-name", "m")
    server = start_shared(tiny("llama"), *options, env={**secrets, "TREADLE_API_KEYS": str(hashes)})
    until("ready", lambda: server.http.get(f"{server.url}/health/ready", headers={"x-api-key": SECRET}).is_success, 60)
    return server


def test_grpc_asks_for_the_key_and_the_gateway_on_this_machine_brings_none(server: Serve, tmp_path: Path) -> None:
    """D6, E1: the real gateway generates through a worker that has a key; nobody flushes it without one."""
    url = grpc_url(server)
    with Gateway(tmp_path / "gateway.log", url) as gateway:
        assert gateway.ready().chat().status_code == 200
        gateway.http.headers["authorization"] = "Bearer none"
        assert gateway.chat().status_code == 200, "what its clients send is not passed on"
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel := grpc.insecure_channel(url.rpartition("/")[2]))
    with channel:
        assert _flush(stub) is grpc.StatusCode.PERMISSION_DENIED
        assert _flush(stub, "wrong") is grpc.StatusCode.UNAUTHENTICATED
        assert _flush(stub, SECRET) is grpc.StatusCode.OK


def test_grpc_from_elsewhere_needs_the_key(server: Serve) -> None:
    """D6: beyond loopback it may listen, as it asks."""
    own = _own_address()
    port = grpc_url(server).rpartition(":")[2]
    with grpc.insecure_channel(f"{own}:{port}") as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        info = vllm_engine_pb2.GetModelInfoRequest()
        with pytest.raises(grpc.RpcError) as raised:
            stub.GetModelInfo(info, timeout=60)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert stub.GetModelInfo(info, timeout=60, metadata=(("x-api-key", SECRET),)).served_model_name == "m"
    assert "this machine without one" in server.said


def _flush(stub: vllm_engine_pb2_grpc.VllmEngineStub, key: str = "") -> grpc.StatusCode:
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    try:
        stub.FlushCache(common_pb2.FlushCacheRequest(), timeout=60, metadata=metadata)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def _own_address() -> str:
    """An address of this machine beyond loopback."""
    for found in psutil.net_if_addrs().values():
        for address in found:
            if address.family.name == "AF_INET" and not address.address.startswith("127."):
                return address.address
    pytest.skip("this machine has no address beyond loopback")


# In no other process --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_that_the_server_starts_has_a_secret(server: Serve) -> None:
    """D25: neither the key nor the hub's token."""
    below = server.children()
    assert len(below) >= 4, "the engine, the fork server and its workers"
    for kind in ("environ", "cmdline"):
        assert not [pid for pid, data in shown(below, kind) if SECRET.encode() in data], kind
    assert SECRET.encode() not in dict(shown({server.process.pid}, "cmdline"))[server.process.pid]
    assert b"PATH=" in b"".join(data for _, data in shown(below, "environ"))
    assert SECRET not in server.said


def test_a_key_on_the_command_line_is_warned_of(start: Start, tiny: Tiny) -> None:
    server = start(tiny(), "--api-key", SECRET)
    assert server.url
    (line,) = [line for line in server.said.splitlines() if "ps shows it" in line]
    assert "set TREADLE_API_KEY, or use --api-keys" in line
    assert SECRET not in server.said


def test_a_fleet_of_workers_with_a_keys_file_works(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D14: the fleet looks at them with a key of its own."""
    path = tmp_path / "keys.toml"
    keys(path, "add", "alice")
    monkeypatch.setenv("TREADLE_API_KEYS", str(path))
    with started(Running(tiny("llama"), tmp_path / "log")) as fleet:
        assert fleet.chat() == 200


def test_a_fleet_whose_workers_want_another_key_says_so_and_ends(tiny: Tiny, tmp_path: Path) -> None:
    """D14: it said "starting" for ever."""
    settings = tmp_path / "worker.toml"
    settings.write_text('api-key = "only-the-workers-know"\n')
    command = [sys.executable, "-m", "treadle", "fleet", str(tiny("llama")), "--replicas", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "TREADLE_API_KEY"}
    ended = subprocess.run(
        [*command, "--port", str(free_port()), "--logs", str(tmp_path / "logs"), "--", "--config", str(settings)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env=environment,
    )
    assert ended.returncode == 1
    assert "worker 1 asks for an API key that the fleet does not have: set TREADLE_API_KEY" in ended.stderr


POISON = 77


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_a_poison_counts_against_its_keys_limits(start: Start, tiny: Tiny, tmp_path: Path, wire: str) -> None:
    """It ran, though the engine died before it said so: else its key could take the engine down without an end."""
    path = tmp_path / "keys.toml"
    mallory = keys(path, "add", "mallory", "--requests-per-minute", "1")
    boss = {"x-api-key": keys(path, "add", "boss", "--scope", "admin")}
    server = start(
        *(tiny("llama"), "--api-keys", str(path), "--grpc-port", "0", "--grpc-auth"),
        module="tests.support.poison",
        env={"TREADLE_API_KEY": "", "TREADLE_TEST_POISON": json.dumps({"token": POISON})},
    )

    def ready() -> bool:
        return server.http.get(f"{server.url}/health/ready", headers=boss).is_success

    def send(last: int) -> str:
        return _complete(server, [5, POISON, last], mallory) if wire == "http" else _generate(server, last, mallory)

    until("ready", ready, 60)
    assert send(6) == "request_quarantined"
    until("ready again", ready, 60)
    assert send(7) == "rate_limit_exceeded"
    usage = {
        entry["key"]: entry["requests"]
        for entry in server.http.get(f"{server.url}/v1/status", headers=boss).json()["keys"]
    }
    assert usage == {"mallory": 1, "boss": 0}


def _complete(server: Serve, prompt: list[int], key: str) -> str:
    """The code of the error that it ends with."""
    body = {"prompt": prompt, "max_tokens": 4}
    answer = server.http.post(f"{server.url}/v1/completions", json=body, headers={"x-api-key": key})
    code: str = answer.json()["error"]["code"]
    return code


def _generate(server: Serve, last: int, key: str) -> str:
    """The same over gRPC."""
    request = vllm_engine_pb2.GenerateRequest(
        request_id=f"r{last}",
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[5, POISON, last]),
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=4),
    )
    address = grpc_url(server).rpartition("/")[2]
    with grpc.insecure_channel(address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        answers = stub.Generate(request, metadata=(("x-api-key", key),), timeout=60)
        with pytest.raises(grpc.RpcError) as raised:
            list(answers)
    return str(dict(raised.value.trailing_metadata())["treadle-error"])
