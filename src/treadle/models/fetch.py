"""Downloads of whole files into the hub's cache that go on where an earlier attempt, of any process, stopped.

Rules: a file's bytes go to `blobs/ETAG.incomplete` under the lock that `huggingface_hub` itself takes for it; they are
checked against the etag and renamed to `blobs/ETAG`, which `links` then links into a snapshot. The library's own
downloads write to a file of a random name and begin again at every start.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from .cache_paths import PARTIAL, blob_size, locks_of, repository
from .remote import CutOff, Listing, RemoteFile, check_status, is_passing, stream
from .transfer import Tally, Transfer

T = TypeVar("T")

WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each next attempt; the count begins anew whenever bytes came in."""
FEW_WAITS_S = (0.5, 2.0)
"""The same for a first question, where a wrong address or no network at all is likely."""
_AT_ONCE = 8
_REPORT_S = 0.25
_LOCK_S = 0.5
_LONGEST_WAIT_S = 60.0


class Damaged(Exception):
    """The bytes of a file are not those that the hub names."""


class Stopped(Exception):
    """The download was given up by its caller."""


def on_disk(blobs: Path, file: RemoteFile) -> int:
    """How many bytes of `file` are in the folder `blobs`, whole or in part."""
    whole = blobs / file.etag
    return min(file.size, blob_size(whole) or blob_size(whole.with_name(whole.name + PARTIAL)))


class Fetcher:
    """Fetches files of one listing into the hub's cache."""

    def __init__(self, listing: Listing, cache: Path, tally: Tally) -> None:
        self._listing = listing
        self._blobs = repository(cache, listing.model) / "blobs"
        self._locks = locks_of(cache, listing.model)
        self._tally = tally
        self._stop = threading.Event()

    def fetch(self, files: list[RemoteFile], report: Callable[[Transfer], None]) -> None:
        """Fetch `files`, several at once; `report` is called on this thread, four times a second. Raises the first
        file's error that attempts did not mend; what was fetched is kept."""
        for folder in (self._blobs, self._locks):
            folder.mkdir(parents=True, exist_ok=True)
        self._stop = threading.Event()
        pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="treadle-download")
        try:
            pending = {pool.submit(self._fetch, file) for file in files}
            while pending:
                done, pending = wait(pending, timeout=_REPORT_S, return_when=FIRST_EXCEPTION)
                report(self._tally.snapshot())
                for future in done:
                    future.result()
        finally:
            self._stop.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, file: RemoteFile) -> None:
        target = self._blobs / file.etag
        with self._locked(file):
            if not target.exists():
                try:
                    self._complete(file, target)
                except Damaged:  # of an earlier attempt, or on the way: once more from the start
                    self._complete(file, target)
            self._tally.place(file.name, file.size)

    def _complete(self, file: RemoteFile, target: Path) -> None:
        with contextlib.closing(_Part(target.with_name(target.name + PARTIAL), file)) as part:
            self._tally.place(file.name, part.have)

            def attempt() -> None:
                before = part.have
                try:
                    self._receive(file, part)
                except Exception as error:
                    if part.have > before:
                        raise _Progressed from error
                    raise

            keep_trying(attempt, self._pause, WAITS_S)
            part.become(target)

    def _receive(self, file: RemoteFile, part: _Part) -> None:
        """One request for what is missing. Raises CutOff when less than that came."""
        if part.have == file.size:
            return
        with stream(self._listing, file.name, f"{part.have}-" if part.have else "") as response:
            check_status(response)
            if part.have and not _continues(response, part.have):
                part.restart()
                self._tally.place(file.name, 0)
            for block in response.iter_bytes():
                self._check_stopped()
                part.write(block)
                self._tally.receive(file.name, len(block))
        if part.have < file.size:
            raise CutOff(f"the connection ended {file.size - part.have} bytes early")

    def _pause(self, wait_s: float, error: BaseException) -> None:
        self._tally.note(f"{reason(error)}: trying again in {wait_s:g} s")
        self._stop.wait(wait_s)
        self._check_stopped()

    def _check_stopped(self) -> None:
        if self._stop.is_set():
            raise Stopped

    @contextlib.contextmanager
    def _locked(self, file: RemoteFile) -> Iterator[None]:
        """The library's lock of this file; while another process holds it, its progress is shown as ours."""
        with contextlib.ExitStack() as held:
            while True:
                try:
                    held.enter_context(WeakFileLock(self._locks / f"{file.etag}.lock", timeout=_LOCK_S))
                    break
                except TimeoutError:
                    self._check_stopped()
                    self._tally.place(file.name, blob_size(self._blobs / f"{file.etag}{PARTIAL}"))
                    self._tally.note("another process downloads it: waiting for that")
            yield


class _Progressed(Exception):
    """An attempt that failed after bytes came in; the failure is its cause."""


class _Part:
    """A partial file on disk, with the digest of what it has."""

    def __init__(self, path: Path, file: RemoteFile) -> None:
        self._path = path
        self._expected = file
        self._file = path.open("a+b", buffering=0)
        self._digest = self._new_digest()
        self.have = self._read_again()

    def _new_digest(self) -> Any:
        if len(self._expected.etag) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self._expected.size, usedforsecurity=False)

    def _read_again(self) -> int:
        if blob_size(self._path) > self._expected.size:
            self._file.truncate(0)
        self._file.seek(0)
        while block := self._file.read(1 << 20):
            self._digest.update(block)
        return self._file.tell()

    def write(self, block: bytes) -> None:
        """Append; raises Damaged when it grows over the file's size."""
        if self.have + len(block) > self._expected.size:
            self._discard(f"is longer than {self._expected.size} bytes")
        view = memoryview(block)
        while view:
            view = view[self._file.write(view) :]
        self._digest.update(block)
        self.have += len(block)

    def restart(self) -> None:
        """Forget what is there."""
        self._file.truncate(0)
        self._digest, self.have = self._new_digest(), 0

    def become(self, target: Path) -> None:
        """Check the content and rename the file; raises Damaged, and removes it, when it is not what it should be."""
        if self._digest.hexdigest() != self._expected.etag:
            self._discard("does not have the content that the hub names")
        os.fsync(self._file.fileno())
        self._path.replace(target)

    def _discard(self, why: str) -> None:
        self._path.unlink(missing_ok=True)
        raise Damaged(f"{self._expected.name} {why}")

    def close(self) -> None:
        self._file.close()


def keep_trying(attempt: Callable[[], T], pause: Callable[[float, BaseException], None], waits_s: Sequence[float]) -> T:
    """`attempt()` until it succeeds, with `pause(seconds, error)` after each failure that may pass. Raises the last
    failure after as many in a row as there are waits."""
    failures = 0
    while True:
        try:
            return attempt()
        except Exception as failure:
            error = failure.__cause__ if isinstance(failure, _Progressed) else failure
            assert error is not None
            failures = 1 if isinstance(failure, _Progressed) else failures + 1
            if not is_passing(error) or failures > len(waits_s):
                raise error from None
        pause(_wait_s(error, waits_s[failures - 1]), error)


def _wait_s(error: BaseException, planned_s: float) -> float:
    """The wait that a busy hub asks for, up to a minute, or the planned one."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    asked = str(headers.get("Retry-After", ""))
    return max(planned_s, min(float(asked), _LONGEST_WAIT_S)) if asked.isdecimal() else planned_s


def reason(error: BaseException) -> str:
    """A failure that may pass, in a few words."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"the hub answers {response.status_code}"
    if "Timeout" in type(error).__name__:
        return "the hub does not answer"
    return "can't connect" if "Connect" in type(error).__name__ else "the connection was lost"


def sweep(cache: Path, model: str) -> int:
    """Remove partial files that nobody is writing, of any revision; the bytes that came free."""
    freed = 0
    for path in (repository(cache, model) / "blobs").glob(f"*{PARTIAL}"):
        lock = locks_of(cache, model) / f"{path.name.split('.')[0]}.lock"
        with contextlib.suppress(OSError), WeakFileLock(lock, timeout=0.01):
            freed += blob_size(path)
            path.unlink()
    return freed


def _continues(response: Any, have: int) -> bool:
    return response.status_code == 206 and str(response.headers.get("Content-Range", "")).startswith(f"bytes {have}-")
