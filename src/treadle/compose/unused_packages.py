"""Stand-ins for modules that mlx-lm imports and the engine's process does not use.

mlx-lm imports transformers for its tokenizers, huggingface_hub for downloads, and its own `generate` and `convert` with
the package. None of them is used here, and transformers imports PyTorch wherever that is installed. Together they would
be most of the time and of the memory of an engine's start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

UNUSED = ("transformers", "huggingface_hub", "mlx_lm.generate", "mlx_lm.convert")


def hide_unused_packages() -> None:
    """Keep this process from importing PyTorch, and give it stand-ins for the modules in UNUSED, unless it has imported
    them already."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    unused = [name for name in UNUSED if name not in sys.modules]
    if unused:
        sys.meta_path.insert(0, _StandIns(unused))


class _StandIns(MetaPathFinder, Loader):
    """Importer of the modules `names` and those below, with a class for each name that is imported from them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._below = tuple(f"{name}." for name in names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        hidden = fullname in self._names or fullname.startswith(self._below)
        return ModuleSpec(fullname, self, is_package=True) if hidden else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Unused,), {"__module__": self.__name__})


class _Unused:
    """Class to inherit from and to name in annotations. Nothing can be made of it."""

    @classmethod
    def register(cls, *args: Any, **kwargs: Any) -> None:
        """Do nothing: mlx-lm registers a tokenizer of its own when it is imported."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{cls.__module__}.{cls.__name__} is not loaded in the engine's process")
