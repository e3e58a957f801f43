"""Stand-ins for packages that mlx-lm imports and the engine's process does not use.

mlx-lm imports transformers for its tokenizers, which are not used here, and transformers imports PyTorch wherever that
is installed. Together they would be most of the time and of the memory of an engine's start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "transformers"


def hide_unused_packages() -> None:
    """Keep this process from importing PyTorch, and give it a stand-in for transformers, unless it has imported them
    already."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    if PACKAGE not in sys.modules:
        sys.meta_path.insert(0, _StandIns())


class _StandIns(MetaPathFinder, Loader):
    """Importer of modules of transformers, with a class for each name that is imported from them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == PACKAGE else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Unused,), {})


class _Unused:
    """Class to inherit from and to name in annotations. Nothing can be made of it."""

    @classmethod
    def register(cls, *args: Any, **kwargs: Any) -> None:
        """Do nothing: mlx-lm registers a tokenizer of its own when it is imported."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{cls.__name__} of {PACKAGE} is not loaded in the engine's process")
