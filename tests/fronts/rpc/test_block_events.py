"""SubscribeKvEvents over a real channel: whose blocks a subscriber hears of, and when it hears of none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common

from tests.fronts.rpc.worker import Scene, refused, until, worker
from tests.support.aio import in_loop
from treadle.core.messages import BlockStored, Image
from treadle.engine.block_event_feeds import EventBatch
from treadle.fronts.rpc.block_events import message_of
from treadle.keys import Key, digest
from treadle.keys.file import add

BLOCK = 4
PROMPT = tuple(range(65, 75))


def subscribe(scene: Scene, start: int = 0, **options: Any) -> Any:
    request = common.SubscribeKvEventsRequest(start_sequence_number=start)
    return scene.vllm.stub.SubscribeKvEvents(request, **options)


async def batch(call: Any) -> Any:
    async with asyncio.timeout(60):
        message = await call.read()
    assert message is not grpc.aio.EOF
    return message


def kinds(message: Any) -> list[str]:
    return [event.WhichOneof("data") for event in message.events]


def blocks(*messages: Any) -> list[Any]:
    stored = [event.stored for message in messages for event in message.events if event.HasField("stored")]
    return [block for event in stored for block in event.blocks]


@in_loop
async def test_a_subscriber_hears_of_its_blocks() -> None:
    async with worker(prefix_cache=True, block=BLOCK) as scene:
        call = subscribe(scene)
        first = await batch(call)
        assert kinds(first) == ["cleared"]
        assert (first.snapshot.index, first.snapshot.count, first.snapshot.blocks) == (0, 1, 0)
        await scene.vllm.answer("r1", PROMPT, max_tokens=1)
        second = await batch(call)
        assert second.sequence_number == first.sequence_number + 1
        assert not second.HasField("snapshot")
        assert [tuple(block.token_ids) for block in blocks(second)] == [PROMPT[:4], PROMPT[4:8]]
        assert [block.block_size for block in blocks(second)] == [BLOCK, BLOCK]
        parents = [event.stored for event in second.events]
        assert not parents[0].HasField("parent_block_hash")
        assert parents[1].parent_block_hash == blocks(second)[0].block_hash
        assert [event.event_id for event in second.events] == [1, 2]
        info = await scene.vllm.stub.GetServerInfo(scene.vllm.pb.GetServerInfoRequest())
        assert info.block_size == BLOCK
        await scene.vllm.stub.FlushCache(common.FlushCacheRequest())
        assert kinds(await batch(call)) == ["cleared"]
        call.cancel()
        await until(lambda: scene.owner.loop is not None and not scene.owner.loop._watched)


@in_loop
async def test_removed_blocks_are_told() -> None:
    async with worker(prefix_cache=True, block=BLOCK) as scene:
        call = subscribe(scene)
        await batch(call)
        await scene.vllm.answer("r1", PROMPT, max_tokens=1)
        stored = blocks(await batch(call))
        assert scene.runner.index is not None
        scene.runner.index.evict(1)
        await scene.vllm.answer("r2", PROMPT[:1], max_tokens=1)
        (event,) = (await batch(call)).events
        assert list(event.removed.block_hashes) == [stored[1].block_hash]


@in_loop
async def test_a_late_subscriber_and_one_that_comes_back() -> None:
    async with worker(prefix_cache=True, block=BLOCK) as scene:
        early = subscribe(scene)
        await batch(early)
        await scene.vllm.answer("r1", PROMPT, max_tokens=1)
        live = await batch(early)
        late = await batch(subscribe(scene))
        assert kinds(late) == ["cleared", "stored", "stored"]
        assert [event.event_id for event in late.events] == [0, 0, 0]
        assert (late.sequence_number, late.snapshot.blocks) == (live.sequence_number, 2)
        back = subscribe(scene, start=live.sequence_number)
        assert await batch(back) == live
        waits = subscribe(scene, start=live.sequence_number + 1)
        await asyncio.wait_for(waits.initial_metadata(), 10)  # the gateway dials again without it


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    for name in ("one", "two"):
        add(path, Key(name, digest(f"{name}-key".encode())))
    return path


@in_loop
async def test_nobody_hears_of_the_prompts_of_others(keys: Path) -> None:
    """Neither of other keys, nor of requests without one."""
    one, two = ((("x-api-key", f"{name}-key"),) for name in ("one", "two"))
    async with worker(prefix_cache=True, block=BLOCK, api_keys=keys) as scene:
        calls = [subscribe(scene, metadata=metadata) for metadata in (one, two, ())]
        for call in calls:
            assert kinds(await batch(call)) == ["cleared"]
        for number, metadata in enumerate((one, two, ())):
            prompt = tuple(number * 10 + i for i in range(5))
            request = scene.vllm.request(f"r{number}", prompt, max_tokens=1)
            async for _ in scene.vllm.stub.Generate(request, metadata=metadata):
                pass
        for number, call in enumerate(calls):
            (block,) = blocks(await batch(call))
            assert list(block.token_ids) == [number * 10 + i for i in range(4)]


@in_loop
async def test_where_there_are_no_blocks_it_says_so() -> None:
    async with worker(prefix_cache=True) as scene:
        error = await refused(subscribe(scene))
        assert (error.code(), "whole states" in error.details()) == (grpc.StatusCode.UNIMPLEMENTED, True)
    async with worker() as scene:
        error = await refused(subscribe(scene))
        assert (error.code(), "--no-prefix-cache" in error.details()) == (grpc.StatusCode.UNIMPLEMENTED, True)
    async with worker(start=False) as scene:
        assert (await refused(subscribe(scene))).code() == grpc.StatusCode.UNAVAILABLE


@in_loop
async def test_the_end_of_the_server_ends_subscriptions() -> None:
    async with worker(prefix_cache=True, block=BLOCK) as scene:
        call = subscribe(scene)
        await batch(call)
        await scene.engine.stop()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE


@in_loop
async def test_subscriptions_have_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.fronts.rpc.call_slots.STREAMS_PER_PEER", 1)
    async with worker(prefix_cache=True, block=BLOCK) as scene:
        call = subscribe(scene)
        await batch(call)
        assert (await refused(subscribe(scene))).code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_keys_of_images_are_told_as_numbers_that_a_message_holds() -> None:
    """They are negative where tokens are unsigned; requests without these images do not begin with them."""
    keys = Image(start=0, count=3, hash=bytes(range(32)), shm="", shape=(1,)).keys
    batch = EventBatch(1, 0.0, (BlockStored(salt="", id=1, parent=0, tokens=(7, *keys)),), 1)
    (block,) = blocks(message_of(batch))
    assert block.token_ids[0] == 7
    assert len(set(block.token_ids)) == 4
    assert block.block_size == 4
