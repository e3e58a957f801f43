"""Listings of hub models, and range requests for their files.

Uses the session, headers and addresses of `huggingface_hub` (`HF_ENDPOINT`, `HF_TOKEN`, proxies), and is imported late
for that import's sake.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from huggingface_hub import HfApi, constants, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import build_hf_headers, filter_repo_objects, hf_raise_for_status  # type: ignore[attr-defined]

from ..errors import ModelError
from ..weight_names import WEIGHTS
from . import hub_checks, hub_errors

# Files that match no pattern, such as code and pickles, are never downloaded.
DENSE = "*_Dense/model.safetensors"
"""Layers behind the pooling of an embedding model (sentence-transformers)."""
PATTERNS = [*WEIGHTS, DENSE, "*.json", "*.jinja", "tokenizer.model", "*.txt"]
TIMEOUT_S = 10.0
_TRANSIENT = (408, 429, 500, 502, 503, 504)


class ConnectionCut(Exception):
    """A response body ended early."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of the repository. `etag`: the sha256 (LFS) or git blob id of its content."""

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

    def needed_files(self) -> list[RemoteFile]:
        """Return the files that a download needs, by PATTERNS."""
        return list(filter_repo_objects(self.files, allow_patterns=PATTERNS, key=lambda file: file.name))

    def url(self, name: str) -> str:
        return hf_hub_url(self.model, name, revision=self.commit, endpoint=self.endpoint)


def list_files(model: str, revision: str | None = None, endpoint: str | None = None) -> Listing:
    """Request the listing of `model`. Raises the errors of `huggingface_hub` and its HTTP client, and ModelError for an
    answer that is malformed or contains unsafe paths."""
    if revision:
        hub_checks.check_revision(revision)
    info = _request_info(model, revision, endpoint)
    siblings = info.siblings or []
    hub_checks.check_names(model, [sibling.rfilename for sibling in siblings])
    listing = Listing(model, hub_checks.check_commit(model, info.sha, revision), tuple(map(_file, siblings)), endpoint)
    for file in listing.files:
        hub_checks.check_content(model, file.name, file.size, file.etag)
    return listing


def _request_info(model: str, revision: str | None, endpoint: str | None) -> Any:
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
    """Request file `name`, or the byte range `span` of it ("0-99", "5-"). Returns a context manager for the
    response."""
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={span}"} if span else {}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    return get_session().stream("GET", listing.url(name), headers=headers, timeout=timeout, follow_redirects=True)


def check_status(response: Any) -> None:
    """Raise the hub's error for a response with an error status."""
    if response.status_code >= 400:
        response.read()
    hf_raise_for_status(response)


def read(listing: Listing, name: str, first: int, count: int) -> bytes:
    """Read up to `count` bytes of file `name` from offset `first`. Raises ConnectionCut when the body ends early."""
    with stream(listing, name, f"{first}-{first + count - 1}") as response:
        check_status(response)
        skip = 0 if response.status_code == 206 else first  # a server may ignore the range
        data = bytearray()
        for block in response.iter_bytes():
            data += block
            if len(data) >= skip + count:
                break
        return bytes(data[skip : skip + count])


def is_transient(error: BaseException | None) -> bool:
    """Whether a retry may succeed: the connection failed, or the hub is busy or broken."""
    if error is None:
        return False
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _TRANSIENT
    return isinstance(error, (HTTPError, ConnectionCut)) or is_transient(error.__cause__)
