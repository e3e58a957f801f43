"""Stand-ins for mlx-vlm's processors while its models are imported: none is used here, as pixels come from elsewhere.

Importing one patches transformers, which the engine's process does not load.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODELS = "mlx_vlm.models."
_PROCESSORS = ("processing_", "image_processing_")


class _Processors(MetaPathFinder, Loader):
    """Importer of empty modules for processors. A class is there for each name that is imported from them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        inside = fullname.startswith(_MODELS) and fullname.rpartition(".")[2].startswith(_PROCESSORS)
        return ModuleSpec(fullname, self) if inside else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Processor(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Processor(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def without_processors() -> Iterator[None]:
    """Import mlx-vlm's models without their processors inside the block. Those are imported as ever behind it. Raises
    what importing mlx-vlm raises."""
    base: Any = importlib.import_module(f"{_MODELS}base")
    finder, before, patch = _Processors(), set(sys.modules), base.install_auto_processor_patch
    sys.meta_path.insert(0, finder)
    base.install_auto_processor_patch = lambda *arguments: None
    try:
        yield
    finally:
        base.install_auto_processor_patch = patch
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if isinstance(sys.modules[name], _Processor):
                del sys.modules[name]
