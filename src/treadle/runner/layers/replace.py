"""Replacement of a model's layers by faster ones, by their class.

A maker gets a layer and returns faster methods for it. The layer stays in the model, with its weights and attributes,
and so its own methods can be used again: for the reference logits, and where a self-test fails.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx

from ..device.owner_thread import mlx_runtime
from ..device.self_test import FAULTS

_log = logging.getLogger(__name__)

Method = Callable[..., Any]
_TOLERANCE = {mx.float32: 1e-4, mx.float16: 0.05, mx.bfloat16: 0.05}
"""Largest difference of an output, relative to the largest one. Sums of half-precision numbers differ by their order,
and MLX's may be no more exact; a wrong output is off by a quarter and more."""


@dataclass(frozen=True)
class Faster:
    """Faster `methods` of one layer by their names, which take the same arguments as its own and return the same.

    Layers of one `kind` are computed in the same way: one of them is tested, with each of the `examples`, which are
    arguments of the methods. `label` names the kind for operators. `prepare` changes the layer's arrays for them,
    `restore` changes them back for the layer's own methods. It computes by those `inside`, layers with their own
    faster methods, which are tested with it. Layers inside of those that it `takes` have no other ones, unless it is
    rejected.
    """

    methods: Mapping[str, Method]
    kind: Hashable
    label: str
    examples: Callable[[], Iterable[tuple[Any, ...]]]
    prepare: Callable[[], None] = lambda: None
    restore: Callable[[], None] = lambda: None
    inside: Sequence[tuple[Any, Faster]] = ()
    takes: Sequence[Any] = ()


Maker = Callable[[Any], Faster | None]
"""A function from a layer to its faster methods; None where its own are as fast."""
Makers = Mapping[str, Maker]
"""Makers by the full name of a layer's class, such as "mlx.nn.layers.linear.Linear": mlx-lm's own need no import."""


class ReplacedLayers:
    """The layers of `module` for which `makers` have faster methods that pass their self-tests.

    They are made and tested by the first `install`, and in use until `remove`. `rejected` are the reasons against
    others, by their labels.
    """

    def __init__(self, module: Any, makers: Makers) -> None:
        self.rejected: dict[str, str] = {}
        self.installed = False
        self._module = module
        self._makers = makers
        self._modules: Sequence[Any] = (module,)
        self._layers: list[tuple[Any, Faster]] | None = None

    def __len__(self) -> int:
        return len(self._layers or ())

    @property
    def labels(self) -> Counter[str]:
        """Labels of the replaced layers, with their numbers."""
        return Counter(faster.label for _, faster in self._layers or ())

    def restrict(self, modules: Sequence[Any] | None) -> None:
        """Replace only layers inside of `modules` from now on, or all of the model (None). They are made anew."""
        self.remove()
        for _, faster in self._layers or ():
            faster.restore()
        self.rejected.clear()
        self._modules = (self._module,) if modules is None else modules
        self._layers = None

    def install(self) -> None:
        """Use the faster methods from now on."""
        if self._layers is None:
            self._layers = self._tested([*self._made(self._modules)])
        if not self.installed:
            for layer, faster in self._layers:
                faster.prepare()
                _install(layer, faster.methods)
        self.installed = True

    def remove(self) -> None:
        """Use the layers' own methods from now on."""
        if self.installed:
            for layer, faster in self._layers or ():
                _remove(layer, faster.methods)
                faster.restore()
        self.installed = False

    def reject(self, reason: str) -> None:
        """Use the layers' own methods for good: the model gave wrong results with the faster ones."""
        self.remove()
        _reject(self.rejected, "faster layers together", reason)
        self._layers = []

    @contextmanager
    def originals(self) -> Iterator[None]:
        """Use the layers' own methods inside the block."""
        installed = self.installed
        self.remove()
        try:
            yield
        finally:
            if installed:
                self.install()

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Let a pass be traced inside the block: what layers remember of earlier passes is no part of it."""
        yield

    def _made(self, modules: Iterable[Any]) -> Iterator[tuple[Any, Faster]]:
        """Faster methods of layers inside of `modules`: of a layer before those that it takes."""
        layers, taken = (layer for module in modules for layer in module.modules()), set[int]()
        for layer in {id(one): one for one in layers}.values():
            maker = None if id(layer) in taken else self._maker_of(layer)
            faster = None if maker is None else maker(layer)
            if faster is not None:
                taken.update(id(inside) for one in faster.takes for inside in one.modules())
                yield layer, faster

    def _maker_of(self, layer: Any) -> Maker | None:
        return self._makers.get(full_name(type(layer)))

    def _tested(self, made: Sequence[tuple[Any, Faster]]) -> list[tuple[Any, Faster]]:
        """The layers whose kind passed. All are made before, as kernels reserve memory for the largest."""
        reasons: dict[Hashable, str] = {}
        for layer, faster in made:
            if faster.kind not in reasons:
                reasons[faster.kind] = self._reason_against([*faster.inside, (layer, faster)])
        passed = [(layer, faster) for layer, faster in made if not reasons[faster.kind]]
        left = [one for _, faster in made if reasons[faster.kind] for one in faster.takes]
        return [*passed, *(self._tested([*self._made(left)]) if left else [])]

    def _reason_against(self, tested: Iterable[tuple[Any, Faster]]) -> str:
        """The reason against the first ones that failed their test, which is told; empty if there are none."""
        for layer, faster in tested:
            if reason := _reason_against(layer, faster):
                _reject(self.rejected, faster.label, reason)
                return reason
        return ""


def _reject(rejected: dict[str, str], label: str, reason: str) -> None:
    _log.warning("%s failed their self-test (%s): MLX's own are used, which are slower", label, reason)
    rejected[label] = reason


def _reason_against(layer: Any, faster: Faster) -> str:
    """Return why the faster methods may not be used; empty where they give what the layer's own do."""
    try:
        with mlx_runtime(f"testing {faster.label}"):
            for arguments in faster.examples():
                for name, method in faster.methods.items():
                    own = getattr(type(layer), name)(layer, *arguments)
                    if reason := _difference(own, method(*arguments)):
                        return f"{reason}, with {_shapes(arguments)}"
    except FAULTS as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _difference(own: Any, found: Any) -> str:
    if own.shape != found.shape or own.dtype != found.dtype:
        return f"its result is {found.shape} in {found.dtype}, not {own.shape} in {own.dtype}"
    own, found, least = own.astype(mx.float32), found.astype(mx.float32), _TOLERANCE[own.dtype]
    worst = float((mx.abs(own - found).max() / mx.maximum(mx.abs(own).max(), 1e-9)).item())  # type: ignore[arg-type]
    return "" if worst <= least else f"its result is {worst:.2g} of the largest one off"


def _shapes(arguments: Iterable[Any]) -> str:
    return ", ".join(str(one.shape) if isinstance(one, mx.array) else repr(one) for one in arguments)


def full_name(kind: type) -> str:
    """The name of a class with its module's, as in `Makers`."""
    return f"{kind.__module__}.{kind.__qualname__}"


def own_call(layer: Any) -> Method:
    """The own `__call__` of a layer, for faster methods of it. It is a copy's, with the arrays that the layer has now:
    a layer whose methods have the layer is freed by the garbage collector alone."""
    return partial(type(layer).__call__, copy(layer))


def _install(layer: Any, methods: Mapping[str, Method]) -> None:
    for name, method in methods.items():
        if name == "__call__":  # Python looks it up in the class
            layer.faster_call = method
            layer.__class__ = _calling(type(layer))  # type: ignore[arg-type]
        else:
            setattr(layer, name, method)


def _remove(layer: Any, methods: Mapping[str, Method]) -> None:
    for name in methods:
        if name == "__call__":
            layer.__class__ = type(layer).own_class
            del layer.faster_call
        else:
            delattr(layer, name)


@cache
def _calling(kind: Any) -> Any:
    """A class like `kind`, in name and module, whose instances are called by their `faster_call`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.faster_call(*args, **kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**names, "__call__": call, "own_class": kind})
