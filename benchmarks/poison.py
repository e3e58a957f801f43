"""Send the corpus of hostile requests (R4) to a server, and count the answers.

    python benchmarks/poison.py MODEL [--server treadle --server mlx-lm] [--out FILE.json]
    python benchmarks/poison.py MODEL --key

With `--key` Treadle asks for a key: every request is sent without it, which may never be answered with 2xx (but for
/health/live), and then with it.

Over HTTP to any server that `benchmarks/reliability.py` knows; over both gRPC wires to Treadle too. A peer need not
answer in Treadle's words: its answers are counted by what they cost. `--out` is for `reliability.py page`.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.reliability import save
from benchmarks.scored.figures import Figure, ms, quantile
from benchmarks.scored.server import PEERS, Server, peer, treadle
from tests.poison.corpus import ANSWER_S, Answer, Poison, corpus
from tests.serve.server import Serve

LATE_S = 1.0
KEY = "the-key-of-the-poison-corpus"
OPEN = "/health/live"


async def attack(server: Server, poisons: list[Poison]) -> list[Figure]:
    """Send each request in turn; a server that has ended is started again."""
    kinds, wrong, deaths, times, slow = Counter[str](), list[str](), 0, list[float](), list[str]()
    for poison in poisons:
        if not server.is_running:
            await server.start()
        began = time.perf_counter()
        answer = await asyncio.to_thread(sent, poison, server)
        times.append(time.perf_counter() - began)
        if times[-1] > LATE_S:
            slow.append(f"{poison.name}-{poison.front} {times[-1]:.1f} s")
        kinds[kind(answer)] += 1
        if answer is None or poison.wrong(answer):
            wrong.append(f"{poison.name}-{poison.front}")
        await asyncio.sleep(0)
        if not await alive(server):
            deaths += 1
    answers = ", ".join(f"{count} {label}" for label, count in sorted(kinds.items()))
    figures = [
        Figure("requests", str(len(poisons))),
        Figure("answers", answers, not any(kinds[label] for label in ("5xx", "none"))),
        Figure("the server had to be started again", str(deaths), deaths == 0),
        Figure("answer p50, p99", f"{ms(quantile(times, 0.5))}, {ms(quantile(times, 0.99))}"),
        Figure("later than 1 s", ", ".join(slow) or "none", not slow),
    ]
    if server.own:
        restarts = (await server.get("/v1/status")).json()["engine"]["restarts"]
        figures.append(Figure("deaths of the engine", str(restarts), restarts == 0))
        figures.append(Figure("not the answer in the file", ", ".join(wrong) or "none", not wrong))
    return figures


def sent(poison: Poison, server: Server) -> Answer | None:
    """Return the answer; None if none came in time."""
    try:
        if poison.front == "http":
            return poison.send("127.0.0.1", server.port)
        address = re.findall(r"grpc://([\w.:\[\]]+)", server.log.read_text())[-1]
        with grpc.insecure_channel(address, options=(("grpc.max_send_message_length", -1),)) as channel:
            return poison.send("127.0.0.1", server.port, channel)
    except (OSError, ValueError, IndexError):
        return None


def kind(answer: Answer | None) -> str:
    """Return the class of an answer: of an HTTP status, or of the side that a gRPC status blames."""
    if answer is None or answer.status == 0:
        return "none" if answer is None else "closed"
    if isinstance(answer.status, str):
        blamed = ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED")
        return "2xx" if answer.status == "OK" else "5xx" if answer.status in blamed else "4xx"
    return f"{answer.status // 100}xx"


async def alive(server: Server) -> bool:
    """Whether it still answers; if not, it is stopped."""
    if server.is_running and (await server.get(server.probe, within_s=ANSWER_S)).status == 200:
        return True
    await server.stop()
    return False


def with_key(model: Path, log: Path) -> list[Figure]:
    """Send the corpus over HTTP to a server that requires a key, without and with it."""
    poisons = corpus(("http",))
    with Serve(model, log=log, env={"TREADLE_API_KEY": KEY}) as serve:
        serve.http.headers["Authorization"] = f"Bearer {KEY}"
        serve.ready()
        parts = urlsplit(serve.url)
        host, port = str(parts.hostname), int(parts.port or 0)
        bare = {poison.name: poison.send(host, port) for poison in poisons if OPEN not in poison.table.get("raw", "")}
        keyed = {poison.name: poison.wrong(poison.send(host, port, key=KEY), keyed=True) for poison in poisons}
        inside = [name for name, answer in bare.items() if kind(answer) == "2xx"]
        refused = sum(answer.status == 401 for answer in bare.values())
        wrong = [name for name, text in keyed.items() if text]
    return [
        Figure("requests", f"{len(poisons)}, without the key and with it"),
        Figure("refused with 401 without it", f"{refused} of {len(bare)}, the rest as malformed"),
        Figure("answered without it", ", ".join(inside) or "none", not inside),
        Figure("with it not the answer in the file", ", ".join(wrong) or "none", not wrong),
    ]


async def measure(name: str, model: Path, log: Path) -> list[Figure]:
    own = name == "treadle"
    server = treadle(model, log, ("--grpc-port", "0")) if own else peer(name, model, log)
    await server.start()
    try:
        return await attack(server, corpus() if own else corpus(("http",)))
    finally:
        await server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--server", action="append", choices=["treadle", *PEERS])
    parser.add_argument("--key", action="store_true", help="a server that asks for a key, over HTTP")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.server or ["treadle"]:
            log = Path(folder) / f"{name}.log"
            figures = with_key(options.model, log) if options.key else asyncio.run(measure(name, options.model, log))
            rows.append({"row": "R4", "server": name, "figures": [asdict(figure) for figure in figures]})
            print(f"R4 {name}", *(f"  {figure.what}: {figure.value}" for figure in figures), sep="\n", flush=True)
    if options.out is not None:
        save(options.out, f"python benchmarks/poison.py {options.model.name}", rows)


if __name__ == "__main__":
    main()
