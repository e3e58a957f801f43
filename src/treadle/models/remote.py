"""The hub's answer about one model: its files at one commit, and pieces of them by range requests.

Everything uses the client's own session, headers and addresses (`HF_ENDPOINT`, `HF_TOKEN`, proxies). Imported late, as
it imports `huggingface_hub`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from huggingface_hub import HfApi, constants, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import build_hf_headers, filter_repo_objects, hf_raise_for_status  # type: ignore[attr-defined]

from ..errors import ModelError
from . import hub_checks, hub_errors

# Never code, never pickles: a file that no pattern names is not downloaded.
WEIGHTS = "model*.safetensors"
PATTERNS = [WEIGHTS, "*.json", "*.jinja", "tokenizer.model", "*.txt"]
TIMEOUT_S = 10.0
_PASSING = (408, 429, 500, 502, 503, 504)


class CutOff(Exception):
    """A body that ended before its length."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of the repository. `etag` names its content: a sha256 (LFS) or git's blob id."""

    name: str
    size: int
    etag: str


@dataclass(frozen=True)
class Listing:
    """All files of `model` at `commit`."""

    model: str
    commit: str
    files: tuple[RemoteFile, ...]
    endpoint: str | None = None

    @property
    def names(self) -> list[str]:
        return [file.name for file in self.files]

    def wanted(self) -> list[RemoteFile]:
        """The files that a download fetches."""
        return list(filter_repo_objects(self.files, allow_patterns=PATTERNS, key=lambda file: file.name))

    def url(self, name: str) -> str:
        return hf_hub_url(self.model, name, revision=self.commit, endpoint=self.endpoint)


def look_up(model: str, revision: str | None = None, endpoint: str | None = None) -> Listing:
    """Ask the hub for the files of `model`. Raises the errors of `huggingface_hub` and its HTTP client, and ModelError
    for an answer that can't be read or could lead outside the cache."""
    if revision:
        hub_checks.revision(revision)
    info = _ask(model, revision, endpoint)
    siblings = info.siblings or []
    hub_checks.names(model, [sibling.rfilename for sibling in siblings])
    listing = Listing(model, hub_checks.commit(model, info.sha, revision), tuple(map(_file, siblings)), endpoint)
    for file in listing.files:
        hub_checks.content(model, file.name, file.size, file.etag)
    return listing


def _ask(model: str, revision: str | None, endpoint: str | None) -> Any:
    try:
        return HfApi(endpoint=endpoint).model_info(model, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    except HFValidationError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError, AssertionError) as error:
        raise ModelError(hub_errors.unreadable(model, error)) from error


def _file(sibling: Any) -> RemoteFile:
    etag = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
    return RemoteFile(sibling.rfilename, sibling.size, etag)


def stream(listing: Listing, name: str, span: str = "") -> Any:
    """A context manager for the response with the content of file `name`, or of `span` of it ("0-99", "5-")."""
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={span}"} if span else {}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    return get_session().stream("GET", listing.url(name), headers=headers, timeout=timeout, follow_redirects=True)


def check_status(response: Any) -> None:
    """Raise the hub's error for a response that is one."""
    if response.status_code >= 400:
        response.read()
    hf_raise_for_status(response)


def read(listing: Listing, name: str, first: int, count: int) -> bytes:
    """`count` bytes of file `name` from `first` on, fewer at its end. Raises CutOff where the body ends early."""
    with stream(listing, name, f"{first}-{first + count - 1}") as response:
        check_status(response)
        skip = 0 if response.status_code == 206 else first  # a server may ignore the range
        data = bytearray()
        for block in response.iter_bytes():
            data += block
            if len(data) >= skip + count:
                break
        return bytes(data[skip : skip + count])


def is_passing(error: BaseException | None) -> bool:
    """Whether `error` may be gone at the next attempt: a connection that failed, a busy or broken hub."""
    if error is None:
        return False
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _PASSING
    return isinstance(error, (HTTPError, CutOff)) or is_passing(error.__cause__)
