"""Output that is queued: nobody waits for its reader, and what is dropped is counted."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.output_streams import LineWriter, QueuedText, relay_lines


class Pipe:
    """A pipe with a writer at one end; the other is read on demand. `full` fills it."""

    def __init__(self, most_bytes: int) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.writer = LineWriter(self.write_fd, most_bytes=most_bytes)

    def fill(self) -> int:
        """Fill the pipe itself; how many bytes it took."""
        os.set_blocking(self.write_fd, False)
        size = 0
        try:
            while True:
                size += os.write(self.write_fd, b"." * 4096)
        except BlockingIOError:
            os.set_blocking(self.write_fd, True)
            return size

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += os.read(self.read_fd, size - len(data))
        return data

    def read_line(self) -> bytes:
        data = b""
        while not data.endswith(b"\n"):
            data += os.read(self.read_fd, 1)
        return data

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe(100)
    yield made
    made.close()


def test_lines_come_in_their_order_from_all_threads(pipe: Pipe) -> None:
    writer = LineWriter(pipe.write_fd)
    threads = [
        threading.Thread(target=lambda n=n: [writer.put(b"%d %d\n" % (n, i)) for i in range(500)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    lines = [pipe.read_line().split() for _ in range(2000)]
    assert all([int(i) for n, i in lines if int(n) == one] == [*range(500)] for one in range(4))


def test_text_beyond_the_bound_is_dropped_and_told_of_once(pipe: Pipe) -> None:
    size, writer = pipe.fill(), pipe.writer
    writer.put(b"first\n")
    for _ in range(10):
        writer.put(b"x" * 29 + b"\n")
    writer.put(b"small\n")  # there would be room, but it would come before its elders
    assert (writer.statistics().dropped_lines, writer.statistics().queued_bytes) == (8, 96)
    assert not writer.flush_within(0.01)
    pipe.read(size)
    said = [pipe.read_line() for _ in range(5)]
    assert said == [b"first\n", *[b"x" * 29 + b"\n"] * 3, b"8 lines were dropped: nobody read this output\n"]
    assert writer.flush_within(10)
    writer.put(b"after\n")
    assert pipe.read_line() == b"after\n"
    assert writer.flush_within(10)
    assert (writer.statistics().dropped_lines, writer.statistics().queued_bytes) == (8, 0)


def test_a_line_longer_than_a_pipe_takes_at_once_arrives_whole(pipe: Pipe) -> None:
    writer = LineWriter(pipe.write_fd)
    lines = [b"a" * 3000 + b"\n", b"b" * 200_000 + b"\n", b"c\n", b"d" * 3000 + b"\n"]
    for line in lines:
        writer.put(line)
    assert pipe.read(sum(map(len, lines))) == b"".join(lines)
    assert writer.flush_within(10)


def test_a_descriptor_that_does_not_block_is_waited_for(pipe: Pipe) -> None:
    size = pipe.fill()
    os.set_blocking(pipe.write_fd, False)
    pipe.writer.put(b"line\n")
    assert not pipe.writer.flush_within(0.01)
    assert pipe.read(size + 5).endswith(b"line\n")
    assert pipe.writer.flush_within(10)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_text_that_can_not_be_written_counts_as_dropped() -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        writer = LineWriter(full.fileno())
        writer.put(b"one\ntwo\n")
        assert writer.flush_within(10)
        writer.put(b"three\n")
        assert writer.flush_within(10)
        assert writer.statistics().dropped_lines == 3


def test_a_stream_gives_on_whole_lines_and_flushed_parts(pipe: Pipe) -> None:
    stream = QueuedText(LineWriter(pipe.write_fd), pipe.write_fd)
    print("a", "b", file=stream)
    assert pipe.read_line() == b"a b\n"
    stream.write("half")
    stream.flush()
    stream.flush()
    assert pipe.read(4) == b"half"
    stream.write("\udcffü\n")
    assert pipe.read_line() == b"\\udcff\xc3\xbc\n"
    assert (stream.isatty(), stream.writable(), stream.fileno()) == (False, True, pipe.write_fd)
    assert (stream.encoding, stream.errors) == ("utf-8", "backslashreplace")


def test_a_finalizer_may_write_while_its_thread_does(pipe: Pipe) -> None:
    """Garbage is collected anywhere: also within `put`, which must not wait for itself."""
    writer = LineWriter(pipe.write_fd, most_bytes=1 << 20)

    class Loud:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            writer.put(b"gone\n")

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            Loud()
            writer.put(b"line\n")
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert pipe.read(400 * 5).count(b"line\n") == 200


def test_another_process_is_drained_to_its_end_in_whole_lines() -> None:
    ours, theirs = os.pipe()
    said: list[bytes] = []
    ended = threading.Event()
    relay_lines(ours, said.append, ended.set)
    for data in (b"one\ntw", b"o\n" + b"x" * 140_000, b"y\n", b"the end"):
        os.write(theirs, data)
    os.close(theirs)
    assert ended.wait(60)
    assert all(part.endswith(b"\n") for part in said)
    whole = b"".join(said)
    assert whole.startswith(b"one\ntwo\nx")
    assert whole.replace(b"\n", b"") == b"onetwo" + b"x" * 140_000 + b"ythe end"


def run(code: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **more)


def test_a_process_that_unblocked_its_streams_writes_them_at_its_end() -> None:
    done = run(
        "import sys; from treadle import output_streams as streams\n"
        "assert streams.own() is None\n"
        "assert streams.unblock() is streams.unblock() is streams.own()\n"
        "print('out'); print('err', file=sys.stderr); sys.stderr.write('half'); raise SystemExit(3)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "out\nerr\nhalf")


def test_a_traceback_that_ends_it_is_written() -> None:
    assert run("from treadle import output_streams as streams; streams.unblock(); 1 / 0").stderr.endswith(
        "ZeroDivisionError: division by zero\n"
    )


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_descriptors_are_filled(closed: tuple[int, ...], tmp_path: Path) -> None:
    code = (
        "import os, sys; from treadle import output_streams as streams\n"
        "streams.open_missing_descriptors(); streams.open_missing_descriptors()\n"
        f"print('out'); print('err', file=sys.stderr); sys.stdin.read(); streams.flush_within()\n"
        f"found = [os.path.samestat(os.fstat(fd), os.stat(os.devnull)) for fd in {closed}]\n"
        f"open({str(tmp_path / 'found')!r}, 'w').write(str(all(found)))"
    )
    redirections = " ".join(f"{fd}>&-" for fd in closed)
    command = ["sh", "-c", f'exec "$0" "$@" {redirections}', sys.executable, "-c", code]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60).returncode == 0
    assert (tmp_path / "found").read_text() == "True"
