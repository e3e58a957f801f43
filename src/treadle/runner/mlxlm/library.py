"""Adapter to mlx-lm: the only module that imports it."""

from __future__ import annotations

import importlib
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import mlx.core as mx

from ...errors import StartFailed
from ...installation import pip_install, requirement
from ..weight_files import tensors_to_load
from .caches import Caches
from .compatibility import problems
from .eagle import EagleShape, load_eagle
from .expert_scales import without_expert_scales
from .fp8 import dequantizing, is_scaled
from .hooks import Selection, reading_others, routed, select, without_head
from .latent import by_heads
from .mtp import load_head
from .older_fields import reading_later_fields
from .output_heads import is_said, is_stored, is_untied, tied, without_copy
from .own_attention import route
from .recurrent import RecurrentState, recurrent_states
from .scaled_rotations import ignored, leaving, scaling
from .text_types import classes

MODULES = ("mlx_lm.utils", "mlx_lm.models.cache", "mlx_lm.models.base", "mlx_lm.models.rope_utils")
_INPUTS = "quantize_input"


class MlxLm:
    """The functions of mlx-lm that this server uses. Build it with `connect`."""

    def __init__(self, utils: ModuleType, cache: ModuleType, base: ModuleType, version: str) -> None:
        self.version = version
        self._utils = utils
        self._cache = cache
        self._base = base

    def load(self, folder: Path, *, headless: bool = False) -> tuple[Any, dict[str, Any]]:
        """The model, its weights not yet read, and its config. Loads no tokenizer and runs no code of the folder. With
        `headless` the weights are those of the decoder without its output head; its embeddings stand for the head.
        Activations are never quantized: layers that do so are of a class of their own, which CPUs have no code for."""
        (stored, others), changed = tensors_to_load(folder), dict[str, Any]()
        said = self._utils.load_config(folder)
        if headless:
            changed["tie_word_embeddings"] = True
        elif is_stored(stored) and not is_said(said):
            changed["tie_word_embeddings"] = False
        if asked := said.get("quantize_activations"):
            changed["quantize_activations"] = False
        if _quantizes_inputs(said):
            asked, changed["quantization"] = True, _without_inputs(said["quantization"])
        more: dict[str, Any] = {"model_config": changed} if changed else {}
        untied = folder if is_untied(said) and not headless else None
        more["get_model_classes"] = partial(self._classes_of, stored, others=others, headless=headless, untied=untied)
        model, config = self._utils.load_model(folder, lazy=True, strict=True, trust_remote_code=False, **more)
        return model, {**config, "quantize_activations": asked} if asked else dict(config)

    def load_head(self, folder: Path, target: Any, config: Mapping[str, Any]) -> Any:
        """The MTP head in `folder` for the model `target`, to be finished by `finish_head`. Raises NoHead."""
        return load_head(self._utils, folder, target, config)

    def load_eagle(self, folder: Path, config: Mapping[str, Any], shape: EagleShape) -> tuple[Any, Any | None]:
        """The EAGLE-3 head in `folder` with its `config`, to be finished by `finish_eagle`, and the model's ids of the
        tokens that it drafts. Raises NoHead."""
        return load_eagle(self._utils, folder, config, shape)

    def _classes(self, config: dict[str, Any]) -> tuple[Any, Any]:
        model, arguments = classes(self._utils, config)
        return model, reading_later_fields(leaving(arguments))

    def _classes_of(
        self, stored: Mapping[str, Any], config: dict[str, Any], *, others: bool, headless: bool, untied: Path | None
    ) -> tuple[type, type]:
        """The classes of a model, for the `stored` tensors of its folder, which may be `others` than mlx-lm reads. The
        configuration of the folder `untied` says that the output head is not the embedding."""
        if config.get("text_config", ...) is None:
            del config["text_config"]  # in which mlx-lm's load_model, whose own it is, looks for a quantization
        model, arguments = self._classes(config)
        model = scaling(model, config)
        if headless:
            model, arguments = without_head(model), tied(arguments)
        if is_stored(stored):
            model = without_copy(model, untied)
        if is_scaled(stored):
            model = dequantizing(model, config)
        return reading_others(model, stored) if others else model, arguments

    def field_types(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The types of the fields that the architecture of `config` and its language model read, as far as they are
        annotated; empty where the architecture is not known."""
        found: dict[str, Any] = {}
        for _, arguments in self._arguments(config):
            with suppress(NameError, TypeError):  # of annotations
                found |= get_type_hints(arguments)
        return found

    def default_numbers(self, config: Mapping[str, Any]) -> dict[str, int]:
        """The whole numbers that the architecture of `config` and its language model take for fields that are not
        given."""
        return {
            field.name: field.default
            for part, arguments in self._arguments(config)
            if is_dataclass(arguments)
            for field in fields(arguments)
            if type(field.default) is int and field.name not in part
        }

    def _arguments(self, config: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Any]]:
        """The config and its language model's part, each with the class of its fields, where it names an architecture
        whose module can be imported."""
        text = config.get("text_config")
        for part in (config, text if isinstance(text, Mapping) else {}):
            with suppress(Exception):
                yield part, self._classes(dict(part))[1]

    def ignored_scaling(self, model: Any, config: Mapping[str, Any]) -> str:
        """The kind of scaled rotary positions that `config` asks for and `model` lacks; empty where it lacks none."""
        return ignored(model, config)

    def without_expert_scales(self, model: Any) -> Any:
        """`model` with experts dequantized that have a scale each, for devices without code for these."""
        return without_expert_scales(model)

    def dequantize(self, model: Any) -> Any:
        """`model`, `without_expert_scales`, with its quantized layers dequantized."""
        return self._utils.dequantize_model(model)

    def parameters(self, model: Any) -> int:
        """Number of the model's parameters, quantized ones counted as before quantization."""
        return int(self._utils.get_total_parameters(model))

    def new_caches(self, model: Any) -> Caches:
        """Empty caches for one sequence. They keep what the model's masks show: those of mlx-lm's PLaMo 3 keep a token
        less, so that it would see less where it decodes than in prompts."""
        caches = list(self._cache.make_prompt_cache(model))
        sliding = self._sliding(caches)
        if sliding and all(cache.max_size > 0 for cache in sliding):  # else the load names the window
            shown = vars(model).get("shown_windows")
            if shown is None:
                shown = vars(model)["shown_windows"] = self._shown(model)
            for cache in sliding:
                cache.max_size = shown.get(cache.max_size, cache.max_size)
        return caches

    def _sliding(self, caches: Caches) -> list[Any]:
        return [leaf for leaf in self.leaves(caches) if type(leaf) is self._cache.RotatingKVCache and not leaf.keep]

    def _shown(self, model: Any) -> dict[int, int]:
        """The window that masks of sliding layers show, by that which the layers' caches keep, where a model asks for a
        window."""
        caches, shown = list(self._cache.make_prompt_cache(model)), dict[int, int]()
        sliding = self._sliding(caches)

        def recorded(cache: Any, *args: Any, window_size: int | None = None, **named: Any) -> Any:
            shown[int(cache.max_size)] = int(window_size or cache.max_size)
            return type(cache).make_mask(cache, *args, window_size=window_size, **named)

        for cache in sliding:
            cache.make_mask = partial(recorded, cache)
        try:
            model(mx.zeros((1, 1), mx.int32), cache=caches)  # is not evaluated: the masks are asked for without
        finally:
            for cache in sliding:
                del cache.make_mask  # which refers to the cache: the pass would stay until cycles are collected
        return shown

    def can_merge(self, caches: Caches) -> bool:
        """Whether sequences with such caches can be merged into one batch without loss."""
        return all(self._mergeable(cache) for cache in caches)

    def _mergeable(self, cache: Any) -> bool:
        if isinstance(cache, self._cache.CacheList):
            return all(self._mergeable(child) for child in cache.caches)
        if getattr(cache, "keep", 0):
            return False  # a batch of rotating caches forgets which first tokens it had to keep
        return hasattr(cache, "merge")

    def windows(self, model: Any) -> list[int] | None:
        """The window of each layer of `model`, 0 for none; None where a cache holds more than keys and values, or is in
        a list."""
        found = self.layer_windows(model)
        if found is None or any(self.list_sizes(model)):
            return None
        windows = [window for window in found if window is not None]
        return windows if len(windows) == len(found) else None

    def layer_windows(self, model: Any) -> list[int | None] | None:
        """The window of each cache of `model`, as `leaves` has them: 0 for none, None for recurrent states. One that is
        for attention within chunks has a chunk's. None where a cache holds something else."""
        found: list[int | None] = []
        for cache in self.leaves(self.new_caches(model)):
            if type(cache) is self._cache.ArraysCache:
                found.append(None)
            elif type(cache) is self._cache.KVCache:
                found.append(0)
            elif type(cache) is self._cache.RotatingKVCache and not cache.keep:
                found.append(int(cache.max_size))
            elif type(cache) is self._cache.ChunkedKVCache:
                found.append(int(cache.chunk_size))
            else:
                return None
        return found

    def chunked(self, model: Any) -> list[bool]:
        """Whether each cache of `model`, as `leaves` has them, is for attention within chunks: windows that begin at
        multiples of their length."""
        return [type(cache) is self._cache.ChunkedKVCache for cache in self.leaves(self.new_caches(model))]

    def list_sizes(self, model: Any) -> list[int]:
        """The number of caches in each of `model`'s lists of caches; 0 for a cache that is in none."""
        caches = self.new_caches(model)
        return [len(cache.caches) if isinstance(cache, self._cache.CacheList) else 0 for cache in caches]

    def route_attention(self, model: Any) -> bool:
        """Route the attention of `model`'s layers to caches that have an `attend` method; others are served as before.
        False where the model's attention does not go through mlx-lm's function. Raises NotImplementedError where mlx-lm
        computes it wrongly."""
        shared = self._base.scaled_dot_product_attention
        through = False
        for module in {sys.modules[type(layer).__module__] for layer in model.modules()}:
            found = getattr(module, "scaled_dot_product_attention", None)
            if found is not None and found is shared:
                module.scaled_dot_product_attention = routed(shared)  # type: ignore[attr-defined]
            through = through or found is shared or hasattr(found, "routes")
        layers = model.modules()
        for layer in layers:
            by_heads(layer)
        routes = [route(layer) for layer in layers]
        return through or any(routes)

    def recurrent_states(self, model: Any) -> list[list[RecurrentState] | None]:
        """The recurrent states of each of `model`'s caches, as `leaves` has them; None for a cache of another kind.
        Routes the model's recurrent layers to states in slots; others are served as before. Raises NotImplementedError
        where a layer keeps states that are not known."""
        return recurrent_states(model, self.leaves(self.traced(model)))

    def traced(self, model: Any) -> Caches:
        """`model`'s caches behind a token that is not evaluated: they have their shapes, and no weight is read. Raises
        what the model's code or MLX does where shapes, types or settings do not fit."""
        caches = self.new_caches(model)
        model(mx.zeros((1, 1), mx.int32), cache=caches)
        return caches

    def selection(self, model: Any) -> Selection | None:
        """The selection of tokens that the model's head sees; None where the module before the head is not known."""
        return select(model)

    def leaves(self, caches: Caches) -> list[Any]:
        """The caches, with lists of caches flattened."""
        flat: list[Any] = []
        for cache in caches:
            inside = isinstance(cache, self._cache.CacheList)
            flat.extend(self.leaves(list(cache.caches)) if inside else [cache])
        return flat

    def windows_of_caches(self, model: Any) -> list[int]:
        """The lengths of the model's windows, sliding ones and chunks, each once, whatever else its layers keep."""
        caches = self.new_caches(model)
        found = {int(leaf.max_size) for leaf in self._sliding(caches)}
        chunks = {int(leaf.chunk_size) for leaf in self.leaves(caches) if type(leaf) is self._cache.ChunkedKVCache}
        return sorted(found | chunks)

    def keys_and_values(self, leaf: Any) -> tuple[Any, Any] | None:
        """Keys and values (1, heads, n, D) of the tokens that a cache of one sequence holds, at most its window's; None
        for a cache of another kind."""
        if type(leaf) is self._cache.ChunkedKVCache and leaf.keys is not None:
            return tuple(leaf.keys_and_values())
        if type(leaf) not in (self._cache.KVCache, self._cache.RotatingKVCache) or leaf.keys is None:
            return None
        count = leaf.size()
        return leaf.keys[..., :count, :], leaf.values[..., :count, :]

    def zero_states(self, leaf: Any) -> list[Any] | None:
        """Zeros in the place of the states that a recurrent layer's cache holds; None for a cache of another kind."""
        if type(leaf) is not self._cache.ArraysCache:
            return None
        return [None if state is None else mx.zeros_like(state) for state in leaf.cache]

    def detach(self, caches: Caches) -> None:
        """Give one sequence's caches arrays of their own, not evaluated yet, without capacity to grow: arrays that they
        were a part of, or shared, can be freed or written to."""
        for cache in self.leaves(caches):
            if type(cache) is self._cache.KVCache and cache.keys is not None:
                cache.keys, cache.values = cache.keys_and_values()
            for name, value in vars(cache).items():
                setattr(cache, name, _copied(value))


def connect() -> MlxLm:
    """mlx-lm, imported and checked. Raises StartFailed naming what is missing or different."""
    try:
        version = metadata.version("mlx-lm")
        with _file_limit_kept():
            modules = {name: importlib.import_module(name) for name in MODULES}
    except metadata.PackageNotFoundError as error:
        raise StartFailed(f"mlx-lm is not installed: {_install()}") from error
    except Exception as error:  # packages that do not fit each other raise anything at import
        line = " ".join(str(error).split())[:300]
        raise StartFailed(f"mlx-lm can't be imported ({type(error).__name__}: {line}): {_install()}") from error
    if found := problems(version, modules):
        raise StartFailed(
            f"mlx-lm {version} is not one this server can use: {'; '.join(found)}. Install one that fits: {_install()}"
        )
    utils, cache, base, _ = (modules[name] for name in MODULES)
    return MlxLm(utils, cache, base, version)


def _quantizes_inputs(config: Mapping[str, Any]) -> bool:
    """Whether entries of single layers ask for quantized activations."""
    stored = config.get("quantization")
    entries = stored.values() if isinstance(stored, Mapping) else ()
    return any(isinstance(own, Mapping) and own.get(_INPUTS) for own in entries)


def _without_inputs(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a quantization whose layers quantize their weights alone."""
    return {
        name: {key: value for key, value in own.items() if key != _INPUTS} if isinstance(own, Mapping) else own
        for name, own in stored.items()
    }


def _install() -> str:
    """The command that installs an mlx-lm that this server can use."""
    return pip_install(requirement("mlx-lm"))


def _copied(value: Any) -> Any:
    """Copies of arrays, also in lists: a slice would keep the whole array alive."""
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(one) for one in value)
    return value * 1 if isinstance(value, mx.array) else value


@contextmanager
def _file_limit_kept() -> Iterator[None]:
    """Keep the limit of open files: importing mlx_lm.utils sets it to 2048, also where it was higher."""
    real = resource.setrlimit

    def setrlimit(which: int, limits: tuple[int, int]) -> None:
        if which != resource.RLIMIT_NOFILE:
            real(which, limits)

    resource.setrlimit = setrlimit
    try:
        yield
    finally:
        resource.setrlimit = real
