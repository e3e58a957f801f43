"""Resumable downloads into the hub's cache, also after another process was interrupted.

Rules: a file's bytes are appended to `blobs/ETAG.incomplete` under the lock that `huggingface_hub` takes for the file;
they are checked against the etag, renamed to `blobs/ETAG`, and linked into a snapshot by `links`. The library's own
downloads write to a file with a random name and do not resume.
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
from .remote import ConnectionCut, Listing, RemoteFile, check_status, is_transient, stream
from .transfer import DownloadProgress, Transfer

T = TypeVar("T")

RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each retry. The count of retries starts again whenever bytes were received."""
SHORT_RETRY_DELAYS_S = (0.5, 2.0)
"""The same for the first request, which mostly fails for a wrong address or a missing network."""
_CONCURRENCY = 8
_REPORT_S = 0.25
_LOCK_S = 0.5
_MAX_DELAY_S = 60.0


class CorruptFile(Exception):
    """A file's content does not match its size or checksum."""


class DownloadStopped(Exception):
    """The caller has abandoned the download."""


def bytes_on_disk(blobs: Path, file: RemoteFile) -> int:
    """Return the bytes of `file` in the folder `blobs`, complete or partial."""
    whole = blobs / file.etag
    return min(file.size, blob_size(whole) or blob_size(whole.with_name(whole.name + PARTIAL)))


class Fetcher:
    """Downloader of the files of one listing into the hub's cache."""

    def __init__(self, listing: Listing, cache: Path, progress: DownloadProgress) -> None:
        self._listing = listing
        self._blobs = repository(cache, listing.model) / "blobs"
        self._locks = locks_of(cache, listing.model)
        self._progress = progress
        self._stop = threading.Event()

    def fetch(self, files: list[RemoteFile], report: Callable[[Transfer], None]) -> None:
        """Download `files` concurrently; `report` is called on this thread four times a second. Raises the first error
        that retries did not resolve; downloaded bytes are kept."""
        for folder in (self._blobs, self._locks):
            folder.mkdir(parents=True, exist_ok=True)
        self._stop = threading.Event()
        pool = ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="treadle-download")
        try:
            pending = {pool.submit(self._fetch, file) for file in files}
            while pending:
                done, pending = wait(pending, timeout=_REPORT_S, return_when=FIRST_EXCEPTION)
                report(self._progress.snapshot())
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
                except CorruptFile:  # now or in an earlier attempt: download once more from the start
                    self._complete(file, target)
            self._progress.place(file.name, file.size)

    def _complete(self, file: RemoteFile, target: Path) -> None:
        with contextlib.closing(_PartialFile(target.with_name(target.name + PARTIAL), file)) as part:
            self._progress.place(file.name, part.have)

            def attempt() -> None:
                before = part.have
                try:
                    self._receive(file, part)
                except Exception as error:
                    if part.have > before:
                        raise _FailedWithProgress from error
                    raise

            retry(attempt, self._pause, RETRY_DELAYS_S)
            part.finish(target)

    def _receive(self, file: RemoteFile, part: _PartialFile) -> None:
        """Request the missing bytes once. Raises ConnectionCut when the response ends early."""
        if part.have == file.size:
            return
        with stream(self._listing, file.name, f"{part.have}-" if part.have else "") as response:
            check_status(response)
            if part.have and not _continues(response, part.have):
                part.restart()
                self._progress.place(file.name, 0)
            for block in response.iter_bytes():
                self._check_stopped()
                part.write(block)
                self._progress.receive(file.name, len(block))
        if part.have < file.size:
            raise ConnectionCut(f"the connection ended {file.size - part.have} bytes early")

    def _pause(self, wait_s: float, error: BaseException) -> None:
        self._progress.note(f"{reason(error)}: trying again in {wait_s:g} s")
        self._stop.wait(wait_s)
        self._check_stopped()

    def _check_stopped(self) -> None:
        if self._stop.is_set():
            raise DownloadStopped

    @contextlib.contextmanager
    def _locked(self, file: RemoteFile) -> Iterator[None]:
        """Hold the library's lock of this file; report the progress of another process that holds it meanwhile."""
        with contextlib.ExitStack() as held:
            while True:
                try:
                    held.enter_context(WeakFileLock(self._locks / f"{file.etag}.lock", timeout=_LOCK_S))
                    break
                except TimeoutError:
                    self._check_stopped()
                    self._progress.place(file.name, blob_size(self._blobs / f"{file.etag}{PARTIAL}"))
                    self._progress.note("another process downloads it: waiting for that")
            yield


class _FailedWithProgress(Exception):
    """An attempt failed after bytes were received; the failure is its cause."""


class _PartialFile:
    """A partial file on disk and the digest of its bytes so far."""

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
        """Append a block. Raises CorruptFile when the file becomes too long."""
        if self.have + len(block) > self._expected.size:
            self._discard(f"is longer than {self._expected.size} bytes")
        view = memoryview(block)
        while view:
            view = view[self._file.write(view) :]
        self._digest.update(block)
        self.have += len(block)

    def restart(self) -> None:
        """Truncate the file to zero bytes."""
        self._file.truncate(0)
        self._digest, self.have = self._new_digest(), 0

    def finish(self, target: Path) -> None:
        """Check the digest and rename the file. Raises CorruptFile, after removing it, when the digest differs."""
        if self._digest.hexdigest() != self._expected.etag:
            self._discard("does not have the content that the hub names")
        os.fsync(self._file.fileno())
        self._path.replace(target)

    def _discard(self, why: str) -> None:
        self._path.unlink(missing_ok=True)
        raise CorruptFile(f"{self._expected.name} {why}")

    def close(self) -> None:
        self._file.close()


def retry(attempt: Callable[[], T], pause: Callable[[float, BaseException], None], waits_s: Sequence[float]) -> T:
    """Call `attempt` until it succeeds, with `pause(seconds, error)` after each transient failure. Raises an error that
    is not transient, and the last one after `len(waits_s)` retries in a row."""
    failures = 0
    while True:
        try:
            return attempt()
        except Exception as failure:
            error = failure.__cause__ if isinstance(failure, _FailedWithProgress) else failure
            assert error is not None
            failures = 1 if isinstance(failure, _FailedWithProgress) else failures + 1
            if not is_transient(error) or failures > len(waits_s):
                raise error from None
        pause(_delay_s(error, waits_s[failures - 1]), error)


def _delay_s(error: BaseException, planned_s: float) -> float:
    """Return the delay before a retry in seconds: `Retry-After`, at most a minute, or `planned_s` if that is longer."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    retry_after = str(headers.get("Retry-After", ""))
    return max(planned_s, min(float(retry_after), _MAX_DELAY_S)) if retry_after.isdecimal() else planned_s


def reason(error: BaseException) -> str:
    """Describe a transient failure in a few words."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"the hub answers {response.status_code}"
    if "Timeout" in type(error).__name__:
        return "the hub does not answer"
    return "can't connect" if "Connect" in type(error).__name__ else "the connection was lost"


def remove_partials(cache: Path, model: str) -> int:
    """Remove the partial files of a model that no process is writing. Returns the freed bytes."""
    freed = 0
    for path in (repository(cache, model) / "blobs").glob(f"*{PARTIAL}"):
        lock = locks_of(cache, model) / f"{path.name.split('.')[0]}.lock"
        with contextlib.suppress(OSError), WeakFileLock(lock, timeout=0.01):
            freed += blob_size(path)
            path.unlink()
    return freed


def _continues(response: Any, have: int) -> bool:
    return response.status_code == 206 and str(response.headers.get("Content-Range", "")).startswith(f"bytes {have}-")
