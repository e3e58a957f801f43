"""The gRPC server's connections, counted in this process's own descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

import pytest

from tests.fronts.rpc.worker import refused, until, worker
from tests.support.aio import in_loop
from treadle.core.refusals import Refusal
from treadle.fronts.connections import Connections
from treadle.fronts.rpc import connection_census
from treadle.fronts.rpc.connection_census import ConnectionCensus


def test_clients_are_counted_until_they_have_gone() -> None:
    books = Connections()
    it = ConnectionCensus(books)
    assert it.update([("192.0.2.1", 1), ("192.0.2.1", 2), ("127.0.0.1", 3)]) == []
    assert it.update([("192.0.2.1", 2), ("127.0.0.1", 3)]) == []
    assert (books.open, books.statistics()["most_of_a_peer"]) == (2, 1)
    assert it.update([]) == []
    assert books.open == 0


def test_the_newest_beyond_a_peers_share_are_surplus() -> None:
    told: list[Refusal] = []
    books = Connections(10, 2, on_refused=told.append)
    it = ConnectionCensus(books)
    first = [("192.0.2.1", 1), ("192.0.2.1", 2)]
    assert it.update(first) == []
    assert it.update([("192.0.2.1", 3), *first, ("192.0.2.2", 4)]) == [("192.0.2.1", 3)]
    assert told == [Refusal.PEER_CONNECTIONS]
    assert it.update([*first, ("192.0.2.2", 4)]) == []


def test_beyond_the_limit_in_all_the_core_itself_closes() -> None:
    books = Connections(1)
    assert ConnectionCensus(books).update([("192.0.2.1", 1), ("192.0.2.2", 2)]) == []
    assert books.open == 1


def test_looking_leaves_no_descriptor_behind_and_shuts_down_only_what_it_was_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        accepted = [listening.accept()[0] for _ in clients]
        before = os.listdir(connection_census.OWN_FILES)
        ends = {client.getsockname() for client in clients}
        assert set(connection_census._clients(port)) == ends
        assert os.listdir(connection_census.OWN_FILES) == before
        connection_census._shut_down(port, frozenset({clients[1].getsockname()}))
        assert os.listdir(connection_census.OWN_FILES) == before
        clients[1].settimeout(60)
        assert clients[1].recv(1) == b""
        for i in (0, 2):
            accepted[i].sendall(b"x")
            assert clients[i].recv(1) == b"x"
        for sock in (*clients, *accepted):
            sock.close()


@in_loop
async def test_a_server_counts_its_clients_and_ends_those_beyond_one_addresss_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_census, "EVERY_S", 0.01)
    monkeypatch.setattr(connection_census, "peer_of", lambda host: "192.0.2.1")
    books = Connections(10, 1, front="gRPC")
    async with worker(connections=books) as w:
        answer = await w.mlx.answer()
        assert answer.end.finish_reason
        await until(lambda: books.open == 1)
        host, _, port = w.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(60):
            while await reader.read(1000):
                pass
        assert books.statistics()["refused"] == {"peer_connections": 1}
        assert (await w.mlx.answer("r2")).end.finish_reason, "the first client is left alone"
        writer.close()


@in_loop
async def test_the_limit_in_all_is_the_cores() -> None:
    books = Connections(2, front="gRPC")
    async with worker(connections=books) as w:
        await w.mlx.answer()
        host, _, port = w.address.rpartition(":")
        (_, held), (reader, surplus) = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        async with asyncio.timeout(60):
            while await reader.read(1000):
                pass
        assert (await w.mlx.answer("r2")).end.finish_reason
        held.close()
        surplus.close()


@in_loop
async def test_a_crowd_of_watchers_is_bounded_and_one_task_looks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from treadle.fronts.rpc import call_slots, health

    monkeypatch.setattr(call_slots, "STREAMS_PER_PEER", 5)
    monkeypatch.setattr(health, "POLL_S", 0.01)
    async with worker(start=False) as w:
        stub = health_pb2_grpc.HealthStub(w.channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(5)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        error = await refused(stub.Watch(health_pb2.HealthCheckRequest()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        looking = [task for task in asyncio.all_tasks() if task.get_name() == "treadle-health"]
        assert len(looking) == 1
        await w.engine.start()
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
        await until(lambda: looking[0].done())
        again = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await again.read()).status == health_pb2.HealthCheckResponse.SERVING
        again.cancel()


@in_loop
async def test_looking_goes_on_after_a_moment_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def clients(port: int) -> list[tuple[str, int]]:
        looks.append(port)
        if len(looks) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return []

    monkeypatch.setattr(connection_census, "_clients", clients)
    monkeypatch.setattr(connection_census, "EVERY_S", 0.01)
    looking = asyncio.create_task(ConnectionCensus(Connections()).run(1))
    await until(lambda: len(looks) > 1)
    assert not looking.done()
    looking.cancel()
