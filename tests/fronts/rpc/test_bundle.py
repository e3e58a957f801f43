"""The tokenizer's zip: files of the model, and none elsewhere that a folder's links name."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from treadle.fronts.rpc.bundle import bundle_of


def names(folder: Path) -> set[str]:
    with zipfile.ZipFile(io.BytesIO(bundle_of(folder, None))) as archive:
        return set(archive.namelist())


def test_a_link_out_of_the_folder_sends_no_file_of_this_machine(tmp_path: Path) -> None:
    folder, secret = tmp_path / "model", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("{}")
    for name in ("merges.txt", "special_tokens_map.json", "generation_config.json"):
        (folder / name).symlink_to(secret)
    (folder / "vocab.json").symlink_to("../secret")
    (folder / "added_tokens.json").write_text("{}")
    assert names(folder) == {"added_tokens.json"}


def test_links_within_the_folder_and_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    for made in (folder, blobs):
        made.mkdir(parents=True)
    (blobs / "1234").write_text("{}")
    (folder / "merges.txt").symlink_to("../../blobs/1234")
    (folder / "vocab.json").write_text("{}")
    (folder / "added_tokens.json").symlink_to("vocab.json")
    assert names(folder) == {"merges.txt", "vocab.json", "added_tokens.json"}


def test_what_the_server_has_read_itself_may_lie_anywhere(tmp_path: Path) -> None:
    folder, shared = tmp_path / "model", tmp_path / "shared.json"
    folder.mkdir()
    shared.write_text("{}")
    (folder / "tokenizer.json").symlink_to(shared)
    assert names(folder) == {"tokenizer.json"}
