"""Misbehaving jobs for text workers."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treadle.errors import ContextLengthExceeded
from treadle.text.work.stages import COMPILING, RENDERING, TOKENIZING

Enter = Callable[[int], None]


def pid(model: Any, params: bytes, payload: bytes, enter: Enter) -> bytes:
    return str(os.getpid()).encode()


def echo(model: Any, params: bytes, payload: bytes, enter: Enter) -> bytes:
    return params + payload


def spin(model: Any, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Run a C call of the interpreter that takes for ever and never releases the GIL."""
    enter(RENDERING)
    return str(10 ** (10**9)).encode()


def compile_for_ever(model: Any, params: bytes, payload: bytes, enter: Enter) -> bytes:
    enter(COMPILING)
    return str(10 ** (10**9)).encode()


def eat(model: Any, params: bytes, payload: bytes, enter: Enter) -> bytes:
    enter(TOKENIZING)
    return bytes(64 << 30)


def refuse(model: Any, params: bytes, payload: bytes, enter: Enter) -> bytes:
    raise ContextLengthExceeded("too long", param="messages")


def panic(model: Any, params: bytes, payload: bytes, enter: Enter) -> bytes:
    enter(TOKENIZING)
    raise BaseException("called `Option::unwrap()` on a `None` value")


def die(model: Any, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Kill this process with signal `params`; with a path in `payload`, only the first time."""
    enter(TOKENIZING)
    path = Path(payload.decode()) if payload else None
    if path is not None and path.exists():
        return b"alive"
    if path is not None:
        path.touch()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), int(params))
    return b"survived"


def hold(model: Any, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Sleep until the file `payload` exists."""
    while not Path(payload.decode()).exists():
        time.sleep(0.01)
    return b"held"


def check(model: Any, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Check a grammar until the file `payload` exists."""
    enter(COMPILING)
    return hold(model, params, payload, enter)


def grow(model: Any, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Leak 80 MB."""
    globals().setdefault("kept", []).append(b"x" * (80 << 20))
    return str(os.getpid()).encode()


def warn(model: Any, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Log a line, and warn as Python does, each with the words `params`."""
    words = params.decode()
    logging.getLogger("treadle.made_up").warning("%s were left out", words, extra={"fields": {"request": 7}})
    warnings.warn(f"{words} are old", DeprecationWarning, stacklevel=1)
    warnings.warn(f"{words} are odd", UserWarning, stacklevel=1)
    return b"warned"


def warn_often(model: Any, params: bytes, payload: bytes, enter: Enter) -> bytes:
    for i in range(int(params)):
        logging.getLogger("treadle.made_up").warning("line %d", i)
    raise ContextLengthExceeded("too long", param="messages")


_ALL = (pid, echo, spin, compile_for_ever, eat, refuse, panic, die, hold, check, grow, warn, warn_often)
JOBS = {job.__name__: job for job in _ALL}


def refuse_folder(folder: Path) -> None:
    if (folder / "never").exists():
        while True:
            pass
