"""Checks of a model folder before anything is loaded: it contains data only, and it is complete.

Code from a model repository never runs. `model_file` and `auto_map` request it and pickles contain it, so they are
refused by name. Weight headers are checked against file sizes, which detects interrupted copies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from ..errors import ModelError
from ..units import size
from ..weight_names import INDEX, MODEL, indexed, merged, weight_files
from . import architectures, config_checks, safetensors_file
from .eagle_heads import is_eagle_head

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_LAYERS = re.compile(r"(num|n)_(\w+_)?layers?")
"""Names of fields that are numbers of layers: `num_hidden_layers`, `n_layer`, `num_transformer_layers` and others."""
_CONFIGS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_MOST_BYTES = 16 << 20
"""Of a configuration. A list of ten million empty lists takes half a minute to read, many times, and gigabytes."""


def check(folder: Path) -> dict[str, Any]:
    """Check the folder and return its config.json. Raises ModelError when it is incomplete or contains code, is no
    model by itself, or can't be read."""
    try:
        return _check(folder)
    except OSError as error:  # of the folder itself: those of its files name their cause
        raise ModelError(f"can't read {error.filename or folder}: {error.strerror or error}") from error


def _check(folder: Path) -> dict[str, Any]:
    _refuse_adapter(folder)
    config = _read_object(folder / "config.json")
    if is_eagle_head(config):
        raise ModelError(
            f"{folder} is an EAGLE-3 head, which drafts tokens of another model: give it as `draft` of the model that "
            "it was trained for"
        )
    refuse_code(folder)
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise ModelError(f"{folder / 'config.json'} names no model_type: it is not a language model's folder")
    _check_architecture(folder, config)
    if faults := config_checks.faults(config):
        raise ModelError(
            f"{folder / 'config.json'} is broken: {'; '.join(faults)}: download it again, or use another model"
        )
    _check_layers(folder, config, _check_weights(folder))
    _check_tokenizer(folder)
    return config


def _refuse_adapter(folder: Path) -> None:
    """Raise ModelError where the folder holds an adapter (LoRA) of another model, without that model's weights."""
    path = folder / "adapter_config.json"
    if not path.is_file() or any(folder.glob(MODEL)):
        return
    config = _read_object(path)
    base = next((config[name] for name in ("base_model_name_or_path", "model") if config.get(name)), "another model")
    raise ModelError(
        f"{folder} is an adapter of {_short(base)}, not a model: fuse both into one folder with `mlx_lm.fuse`, or "
        "merge them with PEFT (`merge_and_unload`), and serve that"
    )


def is_head(folder: Path) -> bool:
    """Return whether the folder holds an EAGLE-3 head in place of a model. Raises ModelError when its config.json can't
    be read."""
    return is_eagle_head(_read_object(folder / "config.json"))


def check_head(folder: Path) -> dict[str, Any]:
    """Check the folder of an EAGLE-3 head, which has no tokenizer, and return its config.json. Raises ModelError."""
    config = _read_object(folder / "config.json")
    refuse_code(folder)
    _check_layers(folder, config, _check_weights(folder))
    return config


def check_any(folder: Path) -> None:
    """Check the folder of a model or of a head. Raises ModelError."""
    if is_head(folder):
        check_head(folder)
    else:
        check(folder)


def _read_object(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        raise ModelError(f"can't read {path}: it is not a regular file")
    try:
        if path.name in _CONFIGS and (length := path.stat().st_size) > _MOST_BYTES:
            raise ModelError(f"{path} has {size(length)}, which no configuration has: download it again")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} is not a model folder: {path.name} is missing") from None
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is torn or not JSON: download it again ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def refuse_code(folder: Path) -> None:
    """Raise ModelError when a JSON file of the folder requests code from the repository. Of EAGLE-3 heads tensors alone
    are read, by names that are known: the `auto_map` that Speculators writes into each is of no use."""
    for name in _CONFIGS:
        path = folder / name
        if not path.is_file():
            continue
        config = _read_object(path)
        is_mapped = not (name == "config.json" and is_eagle_head(config))
        for key, value in _entries(config):
            if (key == "auto_map" and is_mapped) or (key == "model_file" and name == "config.json"):
                raise ModelError(
                    f"{path} asks to run code from the model's repository ({key}: {_short(value)}), and Treadle never "
                    f"does: use a model without it, or remove '{key}' if the code is not needed"
                )


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all keys with a truthy value, at any depth."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield from ((key, inner) for key, inner in item.items() if inner)
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_architecture(folder: Path, config: Mapping[str, Any]) -> None:
    if architectures.is_known(config) is False:
        raise ModelError(
            f"{folder / 'config.json'}: mlx-lm has no model {_short(config['model_type'])} (model_type): use another "
            "model, or a newer mlx-lm"
        )


def _check_layers(folder: Path, config: Mapping[str, Any], tensors: int) -> None:
    """Refuse more layers than tensors: building a million layers would take minutes and gigabytes."""
    for part in (config, config.get("text_config"), config.get("transformer_layer_config")):
        for name, layers in part.items() if isinstance(part, Mapping) else ():
            if _LAYERS.fullmatch(name) and isinstance(layers, (int, float)) and layers > tensors:
                raise ModelError(
                    f"{folder / 'config.json'} is broken or of another model: {name} is {_short(layers)}, and the "
                    f"weights have {tensors} tensors; download it again"
                )


def _check_weights(folder: Path) -> int:
    """Check the weight files; returns the number of tensors."""
    if not any(folder.glob(MODEL)):
        refuse_formats(str(folder), sorted(path.name for path in folder.iterdir() if path.is_file()))
    _check_index(folder)
    headers = ((path, safetensors_file.read_header(path)) for path in weight_files(folder))
    tensors, _ = merged(headers, indexed(folder))
    if not tensors:
        raise ModelError(f"{folder}: the safetensors files hold no tensors: download the model again")
    return len(tensors)


def refuse_formats(model: str, names: list[str]) -> None:
    """Raise ModelError when no file of `names` holds weights in a supported format, naming the format found."""
    if any(PurePath(name).match(MODEL) and "/" not in name for name in names):
        return
    if found := [name for name in names if name.endswith(".safetensors")]:
        raise ModelError(f"{model} has no {MODEL}, only {found[0]}: use a model in MLX's layout")
    if found := [name for name in names if name.lower().endswith(".gguf")]:
        raise ModelError(
            f"{model} has its weights as GGUF only ({found[0]}), not as safetensors: use a version in MLX's layout, "
            "such as one of mlx-community"
        )
    if found := [name for name in names if name.lower().endswith(_PICKLES)]:
        raise ModelError(
            f"{model} has its weights as a pickle ({found[0]}), which can run code when it is read, so Treadle "
            "refuses it: use a safetensors version of the model"
        )
    raise ModelError(f"{model} has no weights: no {MODEL}")


def _check_index(folder: Path) -> None:
    path = folder / INDEX
    if not path.is_file():
        return
    places = _read_object(path).get("weight_map", {})
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ModelError(f"{path} is broken: weight_map does not give a file for each tensor: download the model again")
    for name in sorted(set(places.values())):
        if not _is_inside(name):
            raise ModelError(f"{path} names a weight file outside the folder: {name!r}")
        if not (folder / name).is_file():
            raise ModelError(f"{folder} is incomplete: {name}, named by {INDEX}, is missing; download it again")


def _is_inside(name: str) -> bool:
    path = PurePath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name


def _check_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    if path.exists() and not path.is_file():
        raise ModelError(f"can't read {path}: it is not a regular file")
    if not path.is_file():
        hint = ", only tokenizer.model" if (folder / "tokenizer.model").is_file() else ""
        raise ModelError(f"{folder} has no tokenizer.json{hint}: use a model that ships one")
    try:
        with path.open("rb") as file:
            head = file.read(1)
            file.seek(-min(64, path.stat().st_size), 2)
            tail = file.read().rstrip()
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}") from error
    if head != b"{" or not tail.endswith(b"}"):
        raise ModelError(f"{path} is torn: download it again")
