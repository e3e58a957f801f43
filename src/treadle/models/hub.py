"""Models from the Hugging Face hub: resumable downloads into the hub's cache, pinned revisions, offline mode.

Files are downloaded by `fetch` and linked into a snapshot by `links`, so that other programs find the model as if
`huggingface_hub` had downloaded it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ModelError
from ..installation import command
from ..units import size
from . import folder_checks, hub_errors
from .cache_paths import repository, whole_revision
from .transfer import DownloadProgress, ProgressLines, Transfer

if TYPE_CHECKING:
    from .remote import Listing, RemoteFile

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_FULL = (errno.ENOSPC, errno.EDQUOT)

T = TypeVar("T")
Watch = Callable[[Transfer], None]


def is_id(text: str) -> bool:
    """Whether `text` has the form of a hub id: owner/name."""
    return _ID.fullmatch(text) is not None and not any(bad in text for bad in ("..", "--")) and text[-1] not in ".-"


def cache_folder() -> Path:
    """Return the hub's cache: HF_HUB_CACHE, else the folder `hub` in HF_HOME."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def download(
    model: str,
    progress: Callable[[str], None],
    *,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
    watch: Watch | None = None,
) -> Path:
    """Return the folder of `model` at `revision`, downloading missing files. An interrupted download resumes.

    `revision` may be the first seven digits of a cached commit, or more.
    `progress` is called with short lines, `watch` with the transfer four times a second; without `watch`, `progress`
    gets a line of it every five seconds. Raises ModelError when the hub can't be reached or refuses, when the model
    can't be served, when the disk is full, or when files are missing in offline mode.
    """
    from huggingface_hub.errors import HFValidationError

    progress(f"looking up {model}" + (" in the local cache" if offline else " on the hub"))
    cache, watch = cache_dir or cache_folder(), watch or ProgressLines(progress)
    revision = whole_revision(cache, model, revision)
    request = _Download(model, revision, cache, endpoint, progress, watch)
    try:
        return request.snapshot(local=True) if offline else request.run()
    except HFValidationError as error:
        raise ModelError(f"'{model}' is not a hub id: {error}") from error
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(request.explain(error, offline)) from error


class _Download:
    """One download, from the listing to the snapshot."""

    def __init__(
        self,
        model: str,
        revision: str | None,
        cache: Path,
        endpoint: str | None,
        progress: Callable[[str], None],
        watch: Watch,
    ) -> None:
        self._model = model
        self._revision = revision
        self._cache = cache
        self._endpoint = endpoint
        self._progress = progress
        self._watch = watch

    def run(self) -> Path:
        """Download the missing files, settings before weights: a model that is refused costs no large download."""
        from . import fetch, links

        listing = self._list_files()
        if listing is None:
            return self.snapshot(local=True)
        folder_checks.refuse_formats(self._model, listing.names)
        missing = self._missing(listing)
        if missing:
            self._check_space(missing)
        links.record(self._cache, listing, self._revision)
        if missing:
            self._fetch(listing, missing)
            fetch.remove_partials(self._cache, self._model)
        if gone := self._missing(listing):
            raise ModelError(self._removed_message(gone[0].name))
        return links.snapshot_folder(self._cache, listing)

    def _fetch(self, listing: Listing, missing: list[RemoteFile]) -> None:
        from . import fetch, links

        resumable = self._resumable(missing)
        fetcher = fetch.Fetcher(listing, self._cache, self._new_progress(listing, missing, resumable))
        weights = [file for file in resumable if file.name.endswith(".safetensors")]
        settings = [file for file in resumable if file not in weights]
        fetcher.fetch(settings, self._watch)
        links.link(self._cache, listing, settings)
        folder_checks.refuse_code(links.snapshot_folder(self._cache, listing))
        fetcher.fetch(weights, self._watch)
        links.link(self._cache, listing, weights)
        if remaining := [file for file in missing if file not in resumable]:
            names = ", ".join(file.name for file in remaining)
            self._progress(f"downloading by the hub's own client, which begins again when it is cut off: {names}")
            self._with_retries(lambda: self.snapshot(commit=listing.commit))

    def _list_files(self) -> Listing | None:
        """List the files on the hub; None when the hub can't be reached and the model is complete in the cache."""
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RevisionNotFoundError

        from . import remote

        try:
            return remote.list_files(self._model, self._revision, self._endpoint)
        except (HFValidationError, RevisionNotFoundError):
            raise
        except Exception as error:
            with contextlib.suppress(LocalEntryNotFoundError, ModelError):
                folder_checks.check_any(self.snapshot(local=True))
                self._progress(f"the hub does not help ({hub_errors.line(error)}); using the cached {self._model}")
                return None
            if not remote.is_transient(error):
                raise
        return self._with_retries(lambda: remote.list_files(self._model, self._revision, self._endpoint))

    def _missing(self, listing: Listing) -> list[RemoteFile]:
        folder = repository(self._cache, self._model) / "snapshots" / listing.commit
        return [file for file in listing.needed_files() if not (folder / file.name).exists()]

    def _resumable(self, files: list[RemoteFile]) -> list[RemoteFile]:
        """Return the files that `fetch` can download. The default hub serves the largest over Xet only, which needs the
        library's client. That client takes paths from the server, so it is not used for other endpoints."""
        from huggingface_hub import constants

        if (self._endpoint or constants.ENDPOINT).rstrip("/") != constants._HF_DEFAULT_ENDPOINT:
            return files
        return [file for file in files if file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE]

    def _new_progress(
        self, listing: Listing, missing: list[RemoteFile], resumable: list[RemoteFile]
    ) -> DownloadProgress:
        """Start the progress of all files on disk or to be fetched here, without those left to the library."""
        files = [file for file in listing.needed_files() if file in resumable or file not in missing]
        progress = DownloadProgress(self._model, {file.name: file.size for file in files})
        for file in files:
            progress.place(file.name, self._on_disk(file) if file in resumable else file.size)
        return progress

    def _on_disk(self, file: RemoteFile) -> int:
        from . import fetch

        return fetch.bytes_on_disk(repository(self._cache, self._model) / "blobs", file)

    def _check_space(self, missing: list[RemoteFile]) -> None:
        needed = sum(file.size - self._on_disk(file) for file in missing)
        free = free_bytes(self._cache)
        if needed > free:
            raise ModelError(f"{self._model} needs {size(needed)} more and {self._no_space_message(free)}")

    def _no_space_message(self, free: int) -> str:
        name = command()
        return (
            f"{size(free)} are free in {self._cache}: free some ('{name} models' lists what can go, '{name} rm' "
            "removes it), or set HF_HOME to a folder on another disk"
        )

    def snapshot(self, *, local: bool = False, commit: str | None = None) -> Path:
        """Return the library's snapshot folder of the cached files. Without `local` (default hub only), the library
        downloads missing ones."""
        from huggingface_hub import snapshot_download

        from .remote import PATTERNS

        return Path(
            snapshot_download(
                self._model,
                revision=commit or self._revision,
                local_files_only=local,
                allow_patterns=PATTERNS,
                cache_dir=self._cache,
                endpoint=self._endpoint,
                tqdm_class=_silent_progress_bar(),
            )
        )

    def _with_retries(self, attempt: Callable[[], T]) -> T:
        from .fetch import SHORT_RETRY_DELAYS_S, reason, retry

        def pause(wait_s: float, error: BaseException) -> None:
            self._progress(f"{reason(error)}: trying again in {wait_s:g} s")
            time.sleep(wait_s)

        return retry(attempt, pause, SHORT_RETRY_DELAYS_S)

    def _removed_message(self, name: str) -> str:
        return f"the folder of {self._model} in {self._cache} was removed meanwhile ({name}): start the download again"

    def explain(self, error: Exception, offline: bool) -> str:
        """Describe a failed download in one line: the failure and the fix."""
        from huggingface_hub.errors import OfflineModeIsEnabled

        if isinstance(error, OSError) and error.errno in _FULL:
            return f"the disk is full: {self._no_space_message(free_bytes(self._cache))}; what was fetched is kept"
        if isinstance(error, FileNotFoundError) and error.filename:
            return self._removed_message(error.filename)
        if isinstance(error, OSError) and error.filename and error.strerror:
            return f"can't write the hub's cache: {error.strerror} ({error.filename}); set HF_HOME to another folder"
        why = hub_errors.explain(self._model, self._revision, offline, error, self._cache)
        partial = any(repository(self._cache, self._model).glob("blobs/*.incomplete"))
        if not partial:
            return why
        unasked = offline or isinstance(error, OfflineModeIsEnabled)
        return f"{why}; what was fetched is kept{'' if unasked else ', so try again'}"


def free_bytes(folder: Path) -> int:
    """Return the free disk space in bytes at `folder`, which need not exist."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def _silent_progress_bar() -> type[Any]:
    """Return a tqdm class without output: the library only links files here."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Silent(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": io.StringIO(), "disable": False})  # type: ignore[no-untyped-call]

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            return True

    return Silent
