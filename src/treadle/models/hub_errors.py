"""One-line messages for errors of the hub's client: the failure and its fix."""

from __future__ import annotations

import difflib
from json import JSONDecodeError
from pathlib import Path

from ..errors import ModelError
from ..installation import command
from . import folder_checks
from .cache_paths import SHORTEST_COMMIT, commits, ref, repository

MAIN = "main"


def explain(model: str, revision: str | None, offline: bool, error: Exception, cache: Path) -> str:
    """Describe an error of the hub's client in one line: the failure and its fix."""
    from huggingface_hub import errors

    from .remote import is_transient

    at = f" at revision {revision}" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        return f"{model} is gated: accept its terms on the hub, then run 'hf auth login' (or set HF_TOKEN)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no folder '{model}' here and no such model on the hub{nearest(model, cache)} (a private one "
            "needs 'hf auth login')"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        if revision is None:
            return f"the hub lists {model} and then denies its files: is HF_ENDPOINT a Hugging Face hub?"
        return f"{model} has no revision {revision}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        other = other_commits(model, revision, cache)
        return f"{model}{at} is not wholly in the local cache and HF_HUB_OFFLINE is set: unset it to download{other}"
    if isinstance(error, errors.LocalEntryNotFoundError) and offline:
        pull = f"{command()} pull {model}" + (f" --revision {revision}" if revision else "")
        other = other_commits(model, revision, cache)
        return f"{model}{at} is not wholly in the local cache and offline is set: '{pull}' fetches it{other}"
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401:
        return f"the hub refuses the token for {model}{at} (401): run 'hf auth login', or correct or unset HF_TOKEN"
    if isinstance(error, errors.HfHubHTTPError):
        return f"the hub answers {error.response.status_code} for {model}{at}"
    if is_transient(error) or isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"can't reach the hub for {model}{at}, and it is not wholly cached: check the network (and HF_ENDPOINT), "
            f"or give a folder ({line(error)}){other_commits(model, revision, cache)}"
        )
    return f"can't download {model}{at}: {line(error)}"


def other_commits(model: str, revision: str | None, cache: Path) -> str:
    """Return a hint at whole models of other commits in the cache; "" if there are none."""
    asked = revision or MAIN
    known = {asked, ref(cache, model, asked)}
    found = [commit for commit in commits(cache, model) if commit not in known and _is_whole(cache, model, commit)]
    if not found:
        return ""
    short = [commit[:SHORTEST_COMMIT] for commit in found]
    return f"; cached at {', '.join(short)}: give --revision {short[0]} for that"


def _is_whole(cache: Path, model: str, commit: str) -> bool:
    try:
        folder_checks.check_any(repository(cache, model) / "snapshots" / commit)
    except ModelError:
        return False
    return True


def unreadable(model: str, error: BaseException) -> str:
    """Describe an answer that is not in the hub's format, in one line."""
    why = "it is not JSON" if isinstance(error, (JSONDecodeError, RecursionError)) else "it describes no model"
    return f"the hub's answer about {model} can't be read: {why}; is HF_ENDPOINT a Hugging Face hub?"


def nearest(model: str, cache: Path) -> str:
    """Return a hint at a cached model with a similar name; "" if there is none."""
    cached = [path.name.removeprefix("models--").replace("--", "/", 1) for path in cache.glob("models--*--*")]
    near = difflib.get_close_matches(model, [name for name in cached if name != model], n=1, cutoff=0.8)
    return f"; did you mean '{near[0]}', which is cached?" if near else ""


def line(error: BaseException) -> str:
    """Format an error in one line without control characters, which a server could have put there."""
    lines = ["".join(c if c.isprintable() else "?" for c in line) for line in str(error).strip().splitlines()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
