"""Errors of a model's files and code, as one line that names the field, its value, and the cure."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import ConfigError, ModelError, one_line
from ..base import RunnerBroken
from ..mlxlm import MlxLm
from ..vision_names import names_of
from .config_oddities import (
    contradictions,
    dimensions,
    doubtful,
    empty_sizes,
    foreign_format,
    lacking_scaling,
    mistyped,
    no_flags,
    not_given,
    oddities,
    read_config,
    too_large,
    zeros,
)
from .headless import tensor_names

_SCALES = {"scales", "weight_scale"}
_WRONG_SHAPE = re.compile(r"Expected shape \(([\d, ]*)\) but received shape \(([\d, ]*)\) for parameter (\S+)")
_MISSING = re.compile(r"Missing (\d+) parameters:\s+([^\s,]+)")
_SURPLUS = re.compile(r"Received (\d+) parameters not in model:\s+([^\s,]+(?:[\s,]+[^\s,]+){0,2})")
_UNKNOWN_KEY = re.compile(r"to_quantized\(\) got an unexpected keyword argument '(\w+)'")
_REQUIRED = re.compile(r"(?:Args|Config)\.__init__\(\) missing \d+ required positional arguments?: (.*)")
_UNKNOWN_SCALING = re.compile(r"Unsupported RoPE type (.+)")
_DEVICE_FAULT = re.compile(r"\bcu(da)?[A-Z]\w+\(.*failed|illegal memory access|misaligned address", re.IGNORECASE)
_NO_FOLDER = re.compile(r"^filesystem error\b")  # of MLX, for what it compiles; weights are read otherwise
_AGAIN = "download it again, or use another model"
_OTHER_VERSION = "use a version in MLX's layout, such as one of mlx-community, or one that is not quantized"

_NONE_PACKED = ": no tensor is packed in that format (if they are plain, remove quantization_config from config.json)"


@contextlib.contextmanager
def model_errors(folder: Path, library: MlxLm | None = None) -> Iterator[None]:
    """Make whatever a model's files or its code raise while loading one line that names the folder. With mlx-lm's
    `library` fields of a wrong type are named."""
    try:
        yield
    except (ConfigError, ModelError, RunnerBroken):
        raise
    except FileNotFoundError as error:
        raise ModelError(f"{folder} is not a model folder, or incomplete: {one_line(error)}") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"a file in {folder} is torn or not JSON: download it again ({one_line(error)})") from error
    except SystemExit as error:  # of a module that lacks a package
        raise ModelError(
            f"{folder} can't be loaded: mlx-lm's code for this architecture needs a package that is not installed, and "
            "ends the process: use another model"
        ) from error
    except (MemoryError, RuntimeError, OSError) as error:
        if _DEVICE_FAULT.search(str(error)):
            raise ModelError(
                f"the device failed while {folder} was loaded and tried: {one_line(error)}; start again with `kernels` "
                "off (--kernels off), which uses MLX's operations alone"
            ) from error
        if _NO_FOLDER.search(str(error)):
            raise ModelError(
                f"MLX has no folder for the code that it compiles: {one_line(error)}; {_temporary_folder()}: "
                "set TMPDIR to a folder that exists and can be written"
            ) from error
        config = read_config(folder)
        if "bad_cast" in str(error) and (found := too_large(config) or doubtful(config, _types(config, library))):
            raise ModelError(f"{folder} can't be loaded: {_broken(found)}") from error
        raise ModelError(f"the weights in {folder} can't be read: {one_line(error)}; download them again") from error
    except Exception as error:
        raise ModelError(f"{folder} can't be loaded: {_explained(error, folder, library)}") from error


def _temporary_folder() -> str:
    """Where C++ has the folder of temporary files from."""
    given = next((name for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if os.environ.get(name)), None)
    return "TMPDIR is not set, which means /tmp" if given is None else f"{given} is {os.environ[given]}"


def _types(config: Mapping[str, Any], library: MlxLm | None) -> Mapping[str, Any]:
    """The types of the architecture's fields, as far as they are known."""
    return {} if library is None else library.field_types(config)


def _explained(error: Exception, folder: Path, library: MlxLm | None) -> str:
    line, config = one_line(error), read_config(folder)
    types = _types(config, library)
    lacking = _lacking(error) or _lacking_scaling(error, config)
    if odd := oddities(folder) or mistyped(config, types) or contradictions(config) or lacking:
        return _broken(odd)
    if "not supported" in line and "Model type" in line:
        return f"{line} This version of mlx-lm does not know the architecture: choose another model"
    if scaled := _UNKNOWN_SCALING.search(line):
        return f"its config.json asks for positions scaled as {scaled[1]}, which mlx-lm does not have; {_AGAIN}"
    if unknown := _unknown_keys(line, config):
        return _broken([*unknown, "unknown to MLX"])
    if isinstance(error, ZeroDivisionError) and (found := zeros(config)):
        return f"its config.json is broken: a number can't be zero ({', '.join(found)}): {_AGAIN}"
    if names := _unknown_names(folder, config):
        return (
            f"{len(names)} of its tensors have names unknown for {config['model_type']}, such as {names[0]}; "
            "save it again by AutoModelForImageTextToText of transformers, or convert it by mlx_vlm.convert"
        )
    causes = doubtful(config, types)
    defaults = {} if library is None else library.default_numbers(config)
    how = _disagreement(str(error), config, causes, defaults)
    if isinstance(error, (ValueError, UnboundLocalError, KeyError)) and (stored := foreign_format(config)):
        other = _NONE_PACKED if isinstance(error, UnboundLocalError) else f": {line}"
        detail = how.removesuffix(f"; {_AGAIN}") or other
        return f"mlx-lm does not read its weights, which another program quantized ({stored}){detail}; {_OTHER_VERSION}"
    if isinstance(error, ValueError) and how:
        return f"its weights and its config.json do not agree{how}"
    if causes:
        return _broken(causes)
    if isinstance(error, ValueError):
        return f"its weights and its config.json do not agree, or are not MLX's: {line}; {_AGAIN}"
    reasons = "; ".join([f"{type(error).__name__}: {line}", *not_given(config, types)])
    return f"its config.json does not fit its architecture ({reasons}): {_AGAIN}"


def _broken(found: list[str]) -> str:
    return f"its config.json is broken ({', '.join(found)}): {_AGAIN}"


def _lacking(error: Exception) -> list[str]:
    """Fields without which the architecture's code makes no model, as `name is missing`."""
    found = _REQUIRED.search(str(error)) if isinstance(error, TypeError) else None
    return [] if found is None else [f"{name} is missing" for name in re.findall(r"'(\w+)'", found[1])]


def _lacking_scaling(error: Exception, config: Mapping[str, Any]) -> list[str]:
    """The field of scaled positions that the code looked for, as `rope_scaling.name is missing`."""
    return lacking_scaling(config, str(error.args[0])) if isinstance(error, KeyError) and error.args else []


def _unknown_keys(line: str, config: Mapping[str, Any]) -> list[str]:
    """Entries of the quantization with the key that a layer did not take."""
    key, stored = _UNKNOWN_KEY.search(line), config.get("quantization")
    if key is None or not isinstance(stored, Mapping):
        return []
    return [f"quantization of {name} has {key[1]}" for name, own in stored.items() if _has(own, key[1])]


def _has(entry: Any, key: str) -> bool:
    return isinstance(entry, Mapping) and key in entry


def _unknown_names(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Names of tensors of a vision model that are of no known layout."""
    vision = names_of(config)
    return [] if vision is None else vision.unknown(tensor_names(folder))


def _disagreement(text: str, config: Mapping[str, Any], causes: list[str], defaults: Mapping[str, int]) -> str:
    """How the weights differ from what the config says, and the cure; empty where the error is about something else.
    `causes` are doubtful values, and `defaults` numbers for fields that the config lacks."""
    if found := _WRONG_SHAPE.search(text):
        wanted, given = _shape(found[1]), _shape(found[2])
        fields = causes or empty_sizes(config, wanted)
        fields = fields or dimensions(config, [size for size in wanted if size not in given], defaults)
        because = f" ({' and '.join(fields)})" if fields else ""
        return f": the config makes the shape of {found[3]} {wanted}{because}, and the weights have {given}; {_AGAIN}"
    because = f" ({' and '.join(causes)})" if causes else ""
    if found := _MISSING.search(text):
        return (
            f": the config asks for {found[1]} parameters that the weights lack, such as {found[2]}{because}; {_AGAIN}"
        )
    if found := _SURPLUS.search(text):
        names = ", ".join(found[2].replace(",", " ").split())
        return f": the config has no place for {found[1]} parameters of the weights, such as {names}{because}; {_AGAIN}"
    return ""


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size.strip())


def check_tensors(module: Any, folder: Path) -> None:
    """Raise ModelError where a layer's tensors are of a type that they can't have: a layer without quantization has
    integers for weights, such as the bytes of FP8, or a quantized one, say, integers for scales: mlx-lm computes with
    them."""
    for path, layer in module.named_modules():
        quantized = hasattr(layer, "bits")
        if not quantized and not _SCALES.isdisjoint(layer):
            continue
        mode = getattr(layer, "mode", "affine")
        packed = {"weight": mx.uint32, **({} if mode == "affine" else {"scales": mx.uint8})} if quantized else {}
        for name, value in layer.items():
            if not isinstance(value, mx.array) or name.startswith("_"):
                continue
            wanted = packed.get(name)
            if mx.issubdtype(value.dtype, mx.inexact) if wanted is None else value.dtype == wanted:
                continue
            if quantized:
                named = "numbers with a fraction" if wanted is None else _named(wanted)
                how = f"where MLX's quantization ({mode}) has {named}: {_AGAIN}"
            else:
                how = f"the format of another program, and has no scales that mlx-lm reads: {_OTHER_VERSION}"
            raise ModelError(f"{folder} can't be loaded: {path}.{name} is stored as {_named(value.dtype)}, {how}")


def _named(dtype: Any) -> str:
    return str(dtype).removeprefix("mlx.core.")


def check_windows(library: MlxLm, module: Any, config: Mapping[str, Any], folder: Path) -> None:
    """Raise ModelError where a layer's sliding window holds no token: answers would be wrong, or a step would fail."""
    windows = library.windows_of_caches(module)
    if all(window > 0 for window in windows):
        return
    named = [f"{name} is {value}" for name, value in _fields(config) if value in windows and "window" in name]
    raise ModelError(
        f"{folder} can't be loaded: its config.json is broken (a sliding window must hold at least one token"
        f"{': ' * bool(named)}{', '.join(named)}): {_AGAIN}"
    )


def check_flags(library: MlxLm, config: Mapping[str, Any], folder: Path) -> None:
    """Raise ModelError where a field that is true or false has another value: answers would be those of another
    model."""
    if found := no_flags(config, library.field_types(config)):
        raise ModelError(f"{folder} can't be loaded: {_broken(found)}")


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            yield from part.items()
