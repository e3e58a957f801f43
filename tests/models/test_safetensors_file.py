"""The safetensors format: what is written is what others read, and a torn file never passes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from treadle.errors import ModelError
from treadle.models import safetensors_file


def write_sample(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    values = {
        "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "empty": np.zeros((0, 5), dtype=np.float32),
        "scalar": np.array(7, dtype=np.int32),
    }
    kinds = {"float32": "F32", "int32": "I32"}
    tensors = {name: (kinds[str(value.dtype)], value.shape) for name, value in values.items()}
    digest = safetensors_file.write(path, tensors, {name: [value.tobytes()] for name, value in values.items()})
    return digest, values


def raw(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def test_another_reader_finds_what_was_written(tmp_path: Path) -> None:
    _, values = write_sample(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "mlx"}
        assert set(file.keys()) == set(values)
        for name, value in values.items():
            np.testing.assert_array_equal(file.get_tensor(name), value)


def test_the_returned_digest_is_the_files(tmp_path: Path) -> None:
    digest, _ = write_sample(tmp_path / "model.safetensors")
    assert digest == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()


def test_the_header_is_read_back(tmp_path: Path) -> None:
    write_sample(tmp_path / "model.safetensors")
    tensors = safetensors_file.read_header(tmp_path / "model.safetensors")
    assert tensors["a.weight"] == safetensors_file.Tensor("F32", (3, 4), 0, 48)
    assert tensors["empty"].start == tensors["empty"].end == 48


def test_contents_that_do_not_fit_their_shape_are_a_bug(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not have the size"):
        safetensors_file.write(tmp_path / "m.safetensors", {"x": ("F32", (2,))}, {"x": [b"1234"]})


def test_every_truncation_is_found(tmp_path: Path) -> None:
    write_sample(tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    torn = tmp_path / "torn.safetensors"
    for length in range(len(whole)):
        torn.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"torn|broken"):
            safetensors_file.read_header(torn)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 9]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, float("inf")]},
        {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 1 << 70]},
        [],
        None,
    ],
)
def test_an_entry_that_contradicts_itself_is_refused(tmp_path: Path, entry: object) -> None:
    path = raw(tmp_path / "m.safetensors", json.dumps({"x": entry}).encode(), bytes(8))
    with pytest.raises(ModelError, match="'x'"):
        safetensors_file.read_header(path)


@pytest.mark.parametrize("header", [b"[]", b"null", b'{"', b"\xff\xfe{}", b"[" * 100_000])
def test_a_header_that_is_no_object_is_refused(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(ModelError, match="broken header"):
        safetensors_file.read_header(raw(tmp_path / "m.safetensors", header))


def test_a_huge_header_length_is_refused_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(ModelError, match="torn"):
        safetensors_file.read_header(tmp_path / "m.safetensors")


def test_an_unknown_dtype_is_left_to_the_loader(tmp_path: Path) -> None:
    entry = {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}
    path = raw(tmp_path / "m.safetensors", json.dumps({"x": entry}).encode(), bytes(8))
    assert safetensors_file.read_header(path)["x"].dtype == "F4"


@pytest.mark.parametrize(
    ("places", "fault"),
    [
        ([(0, 8), (4, 12)], "'1' overlaps '0'"),
        ([(0, 8), (0, 8)], "'1' overlaps '0'"),
        ([(8, 16), (0, 12)], "'0' overlaps '1'"),
        ([(0, 16), (4, 8)], "'1' overlaps '0'"),
        ([(4, 16)], r"4 of its bytes \(from 0 on\)"),
        ([(0, 4), (8, 16)], r"4 of its bytes \(from 4 on\)"),
        ([(0, 4), (4, 8)], r"8 of its bytes \(from 8 on\)"),
        ([(16, 16)], r"16 of its bytes \(from 0 on\)"),
        ([], r"16 of its bytes \(from 0 on\)"),
    ],
)
def test_tensors_that_share_bytes_or_leave_some_out_are_refused(
    tmp_path: Path, places: list[tuple[int, int]], fault: str
) -> None:
    entries = {f"{i}": {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for i, (a, b) in enumerate(places)}
    path = raw(tmp_path / "m.safetensors", json.dumps(entries).encode(), bytes(16))
    with pytest.raises(ModelError, match=f"damaged: {fault}.*; download it again"):
        safetensors_file.read_header(path)
    with pytest.raises(Exception, match=r"(?i)offset|incomplete|invalid"):
        safe_open(path, framework="numpy")


@pytest.mark.parametrize("empty", [0, 4, 8, 16])
def test_a_tensor_without_bytes_may_be_anywhere(tmp_path: Path, empty: int) -> None:
    places = {"b": (8, 16), "empty": (empty, empty), "a": (0, 8)}
    entries = {name: {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for name, (a, b) in places.items()}
    path = raw(tmp_path / "m.safetensors", json.dumps(entries).encode(), bytes(16))
    assert set(safetensors_file.read_header(path)) == set(places)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"can't read .*No such file"):
        safetensors_file.read_header(tmp_path / "m.safetensors")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 80))
def test_random_bytes_never_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, data: bytes, n: int) -> None:
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    path.write_bytes(struct.pack("<Q", n) + data)
    with contextlib.suppress(ModelError):
        safetensors_file.read_header(path)
