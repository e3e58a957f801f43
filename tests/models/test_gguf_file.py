"""The GGUF reader agrees with the `gguf` package's own, and a torn file never passes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from tests.models import ggufs
from treadle.errors import ModelError
from treadle.models.gguf_file import GgufFile


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ggufs.write(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_metadata_is_what_the_packages_reader_finds(source: Path) -> None:
    ours = GgufFile(source).metadata
    fields = {
        name: field.contents() for name, field in GGUFReader(source).fields.items() if not name.startswith("GGUF.")
    }
    assert dict(ours) == fields


def test_tensors_are_what_the_packages_reader_finds(source: Path) -> None:
    ours = GgufFile(source)
    theirs = GGUFReader(source).tensors
    assert [tensor.name for tensor in ours.tensors] == [tensor.name for tensor in theirs]
    for mine, other in zip(ours.tensors, theirs, strict=True):
        assert mine.shape == tuple(reversed(other.shape.tolist()))
        assert (mine.kind, mine.size) == (other.tensor_type.value, other.n_elements)
        raw = np.ascontiguousarray(other.data).view(np.uint8).reshape(-1)
        np.testing.assert_array_equal(ours.raw(mine, other.n_bytes), raw)


def test_a_file_that_ends_in_its_metadata_is_refused(source: Path, tmp_path: Path) -> None:
    whole = source.read_bytes()
    for length in range(1, 3000, 7):
        torn = tmp_path / f"{length}.gguf"
        torn.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="not a complete GGUF file"):
            GgufFile(torn)
        torn.unlink()


def test_a_file_that_ends_in_a_tensor_is_refused(source: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(source.read_bytes()[:-1000])
    file = GgufFile(torn)
    with pytest.raises(ModelError, match=r"ends inside the tensor blk\.1\.ffn_down\.weight"):
        file.raw(file.tensors[-1], 64 * 128 // 32 * 34)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\3\4" + bytes(100), b"GGUF\1\0\0\0" + bytes(100)])
def test_what_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="not a complete GGUF file"):
        GgufFile(tmp_path / "x.gguf")


def test_a_string_that_claims_to_be_endless_is_refused(source: Path, tmp_path: Path) -> None:
    content = bytearray(source.read_bytes())
    content[24:32] = b"\xff" * 8  # the length of the first name
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="not a complete GGUF file"):
        GgufFile(tmp_path / "x.gguf")
