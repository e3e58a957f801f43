"""The lines that grpc.aio writes for what clients send."""

from __future__ import annotations

import asyncio
from types import ModuleType

import pytest

from tests.fronts.rpc.worker import worker
from tests.support.aio import in_loop
from treadle.fronts.rpc.log_filter import LOGGER, LogFilter


@in_loop
async def test_metadata_that_is_no_text_writes_one_line_without_its_value(
    raw: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker() as w:
        host, _, port = w.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(raw.PREFACE + raw.frame(raw.SETTINGS, 0, 0))
        for stream in range(1, 101, 2):
            block = raw.head("/nothing", [(b"authorization", b"Bearer my-secret\xff")])
            writer.write(raw.frame(raw.HEADERS, raw.END_HEADERS | raw.END_STREAM, stream, block))
        async with asyncio.timeout(60):
            ended = 0
            while ended < 50:
                size, kind = int.from_bytes((head := await reader.readexactly(9))[:3]), head[3]
                await reader.readexactly(size)
                ended += kind == raw.HEADERS
        writer.close()
    lines = [record.getMessage() for record in caplog.records if record.name == LOGGER.name]
    assert len(lines) == 1
    assert "not UTF-8" in lines[0]
    assert "my-secret" not in caplog.text
    assert not LOGGER.filters


def test_lines_that_were_left_out_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    few = LogFilter(lambda: now)
    LOGGER.addFilter(few)
    try:
        for _ in range(5):
            LOGGER.error("Failed %s", "so")
        now += 1.0
        LOGGER.error("Failed again")
    finally:
        LOGGER.removeFilter(few)
    assert caplog.messages == ["Failed so", "Failed again (4 more lines of gRPC since the last)"]
