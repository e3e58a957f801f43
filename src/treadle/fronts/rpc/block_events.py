"""SubscribeKvEvents: which blocks of prompts are cached here, for a gateway that routes by them.

A subscriber gets the blocks of its own salt: those that requests with its API key can reuse, or requests without a key
where it has none, as the gateway's. Those with a `cache_salt` of their own are nobody's but that request's.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from smg_grpc_proto.generated import common_pb2 as common

from ...core.messages import BlockEvent, BlockRemoved, BlockStored
from ...engine.block_event_feeds import EventBatch
from ...engine.client import EngineClient
from .context import Context, NotImplementedHere, refuse

_UNSIGNED = (1 << 32) - 1
"""What is kept of a token in a message: all of it, and of the keys that stand for images, which are negative, enough to
tell them apart."""


async def subscribe(engine: EngineClient, salt: str, start: int, context: Context) -> AsyncGenerator[Any, None]:
    """The KvEventBatch messages of a salt, without an end: from number `start` on, or with all blocks first. Ends the
    call with UNIMPLEMENTED where the backend has no blocks to tell of."""
    can = engine.capabilities
    if can is None or not can.kv.prefix_block:
        await refuse(context, NotImplementedHere(_why_not(can is not None and can.steps.prefix_cache)))
    await context.send_initial_metadata(())  # a gateway waits for it, and a resumed stream may have nothing to say
    async with contextlib.aclosing(engine.blocks.follow(salt, start)) as batches:
        async for batch in batches:
            yield message_of(batch)


def message_of(batch: EventBatch) -> Any:
    """A batch as KvEventBatch."""
    message = common.KvEventBatch(
        sequence_number=batch.number,
        timestamp=batch.at_s,
        events=[_event(event, batch.first_id and batch.first_id + i) for i, event in enumerate(batch.events)],
    )
    if batch.chunk is not None:
        chunk = batch.chunk
        message.snapshot.CopyFrom(common.KvSnapshotChunk(index=chunk.index, count=chunk.count, blocks=chunk.blocks))
    return message


def _event(event: BlockEvent, event_id: int) -> Any:
    match event:
        case BlockStored():
            tokens = [token & _UNSIGNED for token in event.tokens]
            block = common.KvBlock(block_hash=event.id, token_ids=tokens, block_size=len(tokens))
            stored = common.KvBlocksStored(blocks=[block], parent_block_hash=event.parent or None)
            return common.KvCacheEvent(event_id=event_id, stored=stored)
        case BlockRemoved():
            removed = common.KvBlocksRemoved(block_hashes=[event.id])
            return common.KvCacheEvent(event_id=event_id, removed=removed)
    return common.KvCacheEvent(event_id=event_id, cleared=common.KvCacheCleared())


def _why_not(caches: bool) -> str:
    if caches:
        return "this worker keeps whole states of prompts and no blocks: route by prompts instead"
    return "this worker keeps no prompts (--no-prefix-cache): route by load instead"
