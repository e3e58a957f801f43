"""SubscribeKvEvents of a real server: what a gateway knows of its cache, whatever happens."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from tests.serve.conftest import Start, Tiny
from tests.serve.gateway import grpc_url
from tests.serve.server import Serve, until

BLOCK = 32
WORKER = ("--grpc-port", "0", "--context", "9000")
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536))


class Mirror:
    """What a subscriber knows: tokens of blocks by their hash. Each message has to continue what it knows. One that
    follows subscribes again where its stream ends, as a gateway does."""

    def __init__(self, url: str) -> None:
        self.channel = grpc.insecure_channel(url.removeprefix("grpc://"), SMALL_WINDOW)
        self.stub = vllm_engine_pb2_grpc.VllmEngineStub(self.channel)
        self.subscribe()
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.parents: dict[int, int | None] = {}
        self.snapshots = self.last = self.ended = 0
        self.closing = False

    def subscribe(self) -> None:
        self.call = self.stub.SubscribeKvEvents(common.SubscribeKvEventsRequest())

    def cancel(self) -> None:
        self.closing = True
        self.call.cancel()

    def read(self) -> None:
        message = next(self.call)
        if message.HasField("snapshot"):
            self.snapshots += message.snapshot.index == 0
        else:
            assert message.sequence_number == self.last + 1
        self.last = message.sequence_number
        for event in message.events:
            self.apply(event)

    def apply(self, event: Any) -> None:
        match event.WhichOneof("data"):
            case "stored":
                (block,) = event.stored.blocks
                parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                assert parent is None or parent in self.blocks
                assert block.block_hash not in self.blocks
                assert block.block_size == len(block.token_ids) == BLOCK
                self.blocks[block.block_hash] = tuple(block.token_ids)
                self.parents[block.block_hash] = parent
            case "removed":
                for removed in event.removed.block_hashes:
                    del self.blocks[removed]
            case "cleared":
                self.blocks.clear()

    def follow(self) -> None:
        """Read on a thread until the end."""
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        while not self.closing:
            try:
                while True:
                    self.read()
            except (grpc.RpcError, StopIteration):
                if not self.closing:
                    self.ended += 1
                    time.sleep(0.1)
                    self.subscribe()
            except ValueError:  # the channel is closed
                return

    def knows(self, tokens: list[int]) -> bool:
        """Whether each full block of a prompt is known, after the one before it."""
        at: int | None = None
        known = {(self.parents[id_], held): id_ for id_, held in self.blocks.copy().items()}
        for i in range(0, len(tokens) - BLOCK + 1, BLOCK):
            at = known.get((at, tuple(tokens[i : i + BLOCK])))
            if at is None:
                return False
        return True


@pytest.fixture
def mirrors() -> Iterator[list[Mirror]]:
    made: list[Mirror] = []
    yield made
    for mirror in made:
        mirror.cancel()
        mirror.channel.close()


def prompt(number: int, length: int) -> list[int]:
    return [(number * 7 + i * i) % 250 for i in range(length)]


def test_subscribers_know_what_is_cached_through_lag_and_death(start: Start, tiny: Tiny, mirrors: list[Mirror]) -> None:
    server = start(tiny("llama"), *WORKER, module="tests.serve.short_history").ready()
    url = grpc_url(server)
    first = prompt(0, 200)
    server.complete(first, max_tokens=1)
    quick, slow = Mirror(url), Mirror(url)
    mirrors += (quick, slow)
    quick.follow()
    until("the block of before", lambda: quick.knows(first))
    slow.read()
    prompts = [prompt(number, 2000) for number in range(1, 21)]
    for each in prompts:
        server.complete(each, max_tokens=1)
    until("all prompts", lambda: all(quick.knows(each) for each in [first, *prompts]))
    assert quick.snapshots == 1 + quick.ended
    while slow.blocks != quick.blocks:
        slow.read()
    assert slow.snapshots == 2, "it was behind, and started anew"

    old = server.child()
    os.kill(old, signal.SIGKILL)
    until("nothing is cached any more", lambda: not quick.blocks)
    until("ready again", server.is_ready, every_s=0.1)
    server.complete(first, max_tokens=1)
    until("the prompt again", lambda: quick.knows(first))
    assert not quick.knows(prompts[0])
    while not slow.knows(first) or slow.knows(prompts[0]):
        slow.read()
    late = Mirror(url)
    mirrors.append(late)
    late.read()
    assert late.blocks == quick.blocks == slow.blocks

    for mirror in mirrors:
        mirror.cancel()
    assert server.complete(first, max_tokens=1).status_code == 200
    server.idle()


def test_prompts_of_a_salt_of_their_own_are_not_told(start: Start, tiny: Tiny, mirrors: list[Mirror]) -> None:
    server: Serve = start(tiny("llama"), *WORKER).ready()
    mirror = Mirror(grpc_url(server))
    mirrors.append(mirror)
    mirror.follow()
    told, secret = prompt(1, 100), prompt(2, 100)
    server.complete(secret, max_tokens=1, cache_salt="mine")
    server.complete(told, max_tokens=1)
    until("the prompt without a salt", lambda: mirror.knows(told))
    tokens = set(itertools.chain.from_iterable(mirror.blocks.values()))
    assert not mirror.knows(secret)
    assert len(mirror.blocks) == 3
    assert tokens <= set(told)
