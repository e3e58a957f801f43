"""A server that is attacked over both fronts, beside a client whose answers must not change."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import grpc

from tests.poison.fuzz.wires import Target
from tests.serve.gateway import grpc_url
from tests.serve.server import Serve
from tests.support.tiny import make_tiny

TOKENS = 48
UNBOUNDED = (("grpc.max_send_message_length", -1),)


class Bystander:
    """Somebody who asks for the same greedy answer again and again while hostile requests come in."""

    def __init__(self, serve: Serve) -> None:
        self.calm = self._ask(serve)
        self.answers = Counter[tuple[int, ...]]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(serve,))
        self._thread.start()

    def _run(self, serve: Serve) -> None:
        while not self._over.is_set():
            self.answers[self._ask(serve)] += 1

    def _ask(self, serve: Serve) -> tuple[int, ...]:
        answer = serve.complete("a bystander", max_tokens=TOKENS)
        return tuple(answer.json()["choices"][0]["token_ids"]) if answer.status_code == 200 else (answer.status_code,)

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)


@contextlib.contextmanager
def attacked(folder: Path, *, context: int) -> Iterator[Target]:
    """A server in `folder`. At the end asserts that nothing is left of the attack: the same engine, no place taken, the
    bystander's answers as before, and no traceback in the log."""
    model = make_tiny(folder / "model", context=context, eos=False)
    options = ("--grpc-port", "0", "--max-running", "4", "--max-waiting", "8", "--max-wait", "60")
    with Serve(model, *options, log=folder / "log") as serve:
        serve.ready()
        before = serve.status()["engine"]
        bystander = Bystander(serve)
        try:
            yield from _targets(serve)
        finally:
            bystander.stop()
        assert bystander.answers.keys() == {bystander.calm}
        serve.idle()
        after = serve.status()["engine"]
        assert (after["pid"], after["restarts"]) == (before["pid"], 0)
        assert "Traceback" not in serve.said, serve.said[serve.said.index("Traceback") :][:3000]


def _targets(serve: Serve) -> Iterator[Target]:
    address = grpc_url(serve).removeprefix("grpc://")
    parts = urlsplit(serve.url)
    with grpc.insecure_channel(address, options=UNBOUNDED) as channel:
        yield Target(str(parts.hostname), int(parts.port or 0), int(address.rpartition(":")[2]), channel)
