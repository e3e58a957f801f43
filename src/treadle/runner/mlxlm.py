"""The one module that touches mlx-lm: what of it is used, checked at the start, and called from nowhere else.

mlx-lm changes its inner names in each minor version, so `connect` looks for every name, argument and behaviour that
this server relies on, and a start fails by name instead of a request failing later. Two habits of mlx-lm are kept
out: importing it lowers this process's limit of open files, and its generators set a wired limit (none are used).
"""

from __future__ import annotations

import copy
import importlib
import inspect
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import StartFailed

SUPPORTED = ((0, 32, 2), (0, 33))
Caches = list[Any]
"""One cache per layer: of one row, or of a batch of rows along each array's first axis."""

_NORMS = (
    "model.norm",
    "language_model.model.norm",
    "model.final_layernorm",
    "model.embedding_norm",
    "transformer.ln_f",
)


@dataclass(frozen=True)
class Window:
    """Stands for a mask where a layer's cache attends itself: each token sees the last `size` up to itself."""

    size: int


@dataclass
class Selection:
    """The tokens of a pass (T, 1, D) that go on to the model's head: those at `rows`, or all."""

    rows: Any | None = None


class SelectingNorm(nn.Module):  # type: ignore[misc]
    """A model's last norm, which lets only a selection through: the head behind it is the largest layer, and most
    tokens of a prompt need nothing of it."""

    def __init__(self, norm: Any, selection: Selection) -> None:
        super().__init__()
        self.norm = norm
        self._selection = selection

    def __call__(self, x: Any) -> Any:
        x, rows = self.norm(x), self._selection.rows
        return x if rows is None else x[rows]

    @property
    def selection(self) -> Selection:
        return self._selection


_FUNCTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "mlx_lm.utils": {
        "load_model": ("model_path", "lazy", "strict", "trust_remote_code"),
        "get_total_parameters": ("model",),
        "dequantize_model": ("model",),
    },
    "mlx_lm.models.cache": {"make_prompt_cache": ("model",)},
    "mlx_lm.models.base": {
        "scaled_dot_product_attention": ("queries", "keys", "values", "cache", "scale", "mask", "sinks")
    },
}
_BATCHED = ("state", "nbytes", "merge", "extend", "filter", "extract", "prepare", "finalize")
_CLASSES: dict[str, tuple[str, ...]] = {
    "KVCache": ("state", "nbytes", "merge", "size", "is_trimmable", "trim"),
    "RotatingKVCache": ("state", "nbytes", "merge", "size"),
    "BatchKVCache": _BATCHED,
    "BatchRotatingKVCache": _BATCHED,
    "ArraysCache": _BATCHED,
    "CacheList": _BATCHED,
}


class MlxLm:
    """What this server uses of mlx-lm. Build it with `connect`."""

    def __init__(self, utils: ModuleType, cache: ModuleType, base: ModuleType, version: str) -> None:
        self.version = version
        self._utils = utils
        self._cache = cache
        self._base = base

    def load(self, folder: Path) -> tuple[Any, dict[str, Any]]:
        """The model, its weights not yet read, and its config. Loads no tokenizer and runs no code of the folder."""
        model, config = self._utils.load_model(folder, lazy=True, strict=True, trust_remote_code=False)
        return model, dict(config)

    def dequantize(self, model: Any) -> Any:
        """`model` with plain layers in place of quantized ones."""
        return self._utils.dequantize_model(model)

    def parameters(self, model: Any) -> int:
        """How many parameters the model has, quantized ones counted as what they stand for."""
        return int(self._utils.get_total_parameters(model))

    def new_caches(self, model: Any) -> Caches:
        """Empty caches for one row."""
        return list(self._cache.make_prompt_cache(model))

    def can_merge(self, caches: Caches) -> bool:
        """Whether rows with such caches can be put into one batch without losing anything."""
        return all(self._mergeable(cache) for cache in caches)

    def _mergeable(self, cache: Any) -> bool:
        if isinstance(cache, self._cache.CacheList):
            return all(self._mergeable(child) for child in cache.caches)
        if getattr(cache, "keep", 0):
            return False  # a batch of rotating caches forgets which first tokens it had to keep
        return hasattr(cache, "merge")

    def windows(self, model: Any) -> list[int] | None:
        """How far back each layer of `model` sees, 0 for everything; None where it keeps more than keys and values."""
        found = []
        for cache in self.new_caches(model):
            if type(cache) is self._cache.KVCache:
                found.append(0)
            elif type(cache) is self._cache.RotatingKVCache and not cache.keep:
                found.append(int(cache.max_size))
            else:
                return None
        return found

    def route_attention(self, model: Any) -> bool:
        """Let caches that have an `attend` of their own do the attention of `model`'s layers; others are served as
        before. False where the model's attention does not go through mlx-lm's function."""
        shared = self._base.scaled_dot_product_attention
        routed = False
        for module in {sys.modules[type(layer).__module__] for layer in model.modules()}:
            found = getattr(module, "scaled_dot_product_attention", None)
            if found is not None and found is shared:
                module.scaled_dot_product_attention = _routed(shared)  # type: ignore[attr-defined]
            routed = routed or found is shared or hasattr(found, "routes")
        return routed

    def selection(self, model: Any) -> Selection | None:
        """What chooses the tokens that the model's head sees; None where it is not known what comes before the head."""
        for path in _NORMS:
            *parents, name = path.split(".")
            parent = model
            for part in parents:
                parent = getattr(parent, part, None)
            norm = getattr(parent, name, None)
            if isinstance(norm, SelectingNorm):
                return norm.selection
            if isinstance(norm, nn.Module):
                selection = Selection()
                setattr(parent, name, SelectingNorm(norm, selection))
                return selection
        return None

    def leaves(self, caches: Caches) -> list[Any]:
        """The caches with lists of caches opened."""
        flat: list[Any] = []
        for cache in caches:
            inside = isinstance(cache, self._cache.CacheList)
            flat.extend(self.leaves(list(cache.caches)) if inside else [cache])
        return flat

    def detach(self, caches: Caches) -> None:
        """Let one row's caches have arrays of their own, not evaluated yet, without room to grow: what they were a part
        of, or shared with others, can go or be written to."""
        for cache in self.leaves(caches):
            if type(cache) is self._cache.KVCache and cache.keys is not None:
                cache.keys, cache.values = cache.keys_and_values()
            for name, value in vars(cache).items():
                setattr(cache, name, _copied(value))


def merge(rows: Sequence[Caches]) -> Caches:
    """One batch out of the caches of single rows, in their order. Copies."""
    return [layer[0].merge(list(layer)) for layer in zip(*rows, strict=True)]


def extend(batch: Caches, other: Caches) -> None:
    """Append the rows of batch `other` to `batch`. Copies both."""
    for mine, theirs in zip(batch, other, strict=True):
        mine.extend(theirs)


def keep_rows(batch: Caches, rows: Sequence[int]) -> None:
    """Keep only these rows of `batch`, in this order."""
    for cache in batch:
        cache.filter(list(rows))


def extract(batch: Caches, row: int) -> Caches:
    """The caches of one row of `batch`, lazily: they hold on to the batch until they are evaluated."""
    return [cache.extract(row) for cache in batch]


def begin_padded(batch: Caches, lengths: Sequence[int], padding: Sequence[int]) -> None:
    """Tell the caches that the next tokens are right-padded; `end_padded` takes the padding out again."""
    if any(padding):
        for cache in batch:
            cache.prepare(lengths=list(lengths), right_padding=list(padding))


def end_padded(batch: Caches, padding: Sequence[int]) -> None:
    """Take the right padding out of the caches."""
    if any(padding):
        for cache in batch:
            cache.finalize()


def can_trim(caches: Caches) -> bool:
    """Whether the last tokens can be taken out of each cache again. Sliding windows are left alone: what a token pushed
    out of them does not come back."""
    return all(not getattr(cache, "max_size", 0) and cache.is_trimmable() for cache in caches)


def trim(caches: Caches, tokens: int) -> None:
    """Forget the last `tokens` tokens."""
    for cache in caches:
        cache.trim(tokens)


def twins(caches: Caches) -> Caches:
    """Caches that hold the same, evaluated, arrays: which of both is written to first copies what it writes to."""
    return copy.deepcopy(caches)


def states(caches: Caches) -> list[Any]:
    """Everything in the caches that may wait to be evaluated."""
    return [cache.state for cache in caches]


def kv_bytes(caches: Caches) -> int:
    """Bytes that the caches hold."""
    return sum(int(cache.nbytes) for cache in caches)


def connect() -> MlxLm:
    """mlx-lm, imported and checked. Raises StartFailed naming what is missing or different."""
    try:
        version = metadata.version("mlx-lm")
        with _file_limit_kept():
            names = ("mlx_lm.utils", "mlx_lm.models.cache", "mlx_lm.models.base")
            utils, cache, base = (importlib.import_module(name) for name in names)
    except (ImportError, metadata.PackageNotFoundError) as error:
        raise StartFailed(f"mlx-lm can't be imported ({error}): pip install 'mlx-lm>=0.32.2,<0.33'") from error
    problems = [*_version_problems(version), *_missing(dict(zip(names, (utils, cache, base), strict=True)))]
    problems += [] if problems else _wrong_behaviour(cache)
    if problems:
        raise StartFailed(
            f"mlx-lm {version} is not one this server can use: {'; '.join(problems)}. "
            "Install one that fits: pip install 'mlx-lm>=0.32.2,<0.33'"
        )
    return MlxLm(utils, cache, base, version)


def _copied(value: Any) -> Any:
    """Arrays, in lists or not, copied: a slice would keep all that it is a part of."""
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(one) for one in value)
    return value * 1 if isinstance(value, mx.array) else value


def _routed(shared: Callable[..., Any]) -> Callable[..., Any]:
    """mlx-lm's attention function, for caches that do not attend themselves; the others are asked."""

    def attention(
        queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any | None = None
    ) -> Any:
        attend = getattr(cache, "attend", None)
        if attend is None:
            return shared(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        if mask is not None and not isinstance(mask, Window):
            raise NotImplementedError("the model makes a mask of its own")
        return attend(queries, scale, mask.size if mask is not None else 0, sinks)

    attention.routes = True  # type: ignore[attr-defined]
    return attention


@contextmanager
def _file_limit_kept() -> Iterator[None]:
    """Importing mlx_lm.utils sets the limit of open files to 2048, also where it was higher, and for good."""
    real = resource.setrlimit

    def setrlimit(which: int, limits: tuple[int, int]) -> None:
        if which != resource.RLIMIT_NOFILE:
            real(which, limits)

    resource.setrlimit = setrlimit
    try:
        yield
    finally:
        resource.setrlimit = real


def _version_problems(version: str) -> list[str]:
    parts = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    low, high = SUPPORTED
    return [] if low <= parts < high else ["the version must be at least 0.32.2 and below 0.33"]


def _missing(modules: dict[str, ModuleType]) -> list[str]:
    problems = []
    for module, functions in _FUNCTIONS.items():
        for name, arguments in functions.items():
            function = getattr(modules[module], name, None)
            known = inspect.signature(function).parameters if callable(function) else {}
            lost = [argument for argument in arguments if argument not in known]
            if lost:
                problems.append(f"{module}.{name}({', '.join(lost)}) is missing")
    for name, members in _CLASSES.items():
        found = getattr(modules["mlx_lm.models.cache"], name, None)
        lost = [member for member in members if not hasattr(found, member)]
        if lost:
            problems.append(f"mlx_lm.models.cache.{name} has no {', '.join(lost)}")
    return problems


def _wrong_behaviour(cache: ModuleType) -> list[str]:
    """Whether rows of different lengths survive a batch: merged, extended, filtered and taken out again."""
    rows = [_filled(cache.KVCache(), length) for length in (3, 1, 2)]
    batch = merge(rows[:2])
    extend(batch, merge(rows[2:]))
    keep_rows(batch, [0, 2])
    for place, row in ((0, rows[0]), (1, rows[2])):
        back = extract(batch, place)[0]
        if back.size() != row[0].size() or not mx.array_equal(back.keys, row[0].keys[..., : back.size(), :]).item():
            return ["mlx_lm.models.cache.BatchKVCache does not give back the rows that were put into it"]
    return []


def _filled(cache: Any, length: int) -> Caches:
    values = mx.arange(length, dtype=mx.float32).reshape(1, 1, length, 1) + length
    cache.update_and_fetch(values, values)
    return [cache]
