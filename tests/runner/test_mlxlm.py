"""The adapter says at the start what of mlx-lm is missing, and keeps its habits out of this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from treadle.errors import StartFailed
from treadle.runner.mlxlm import connect
from treadle.runner.mlxlm.latent import by_heads


def test_the_installed_version_is_one_that_fits() -> None:
    assert connect().version.startswith("0.32.")


@pytest.mark.parametrize("bits", [16, 4])
def test_latent_heads_are_multiplied_for_all_tokens_at_once(bits: int) -> None:
    """To the same numbers, whichever way they come, and once however often it is asked for."""
    from mlx_lm.models.mla import MultiLinear

    heads = MultiLinear(64, 32, 3)
    heads = heads if bits == 16 else heads.to_quantized(64, bits)
    inputs = [(mx.random.normal(shape), how) for shape, how in (((5, 3, 1, 64), True), ((1, 3, 4, 64), True))]
    inputs.append((mx.random.normal((5, 3, 1, 32)), False))
    wanted = [heads(x, transpose=how) for x, how in inputs]
    assert by_heads(heads)
    assert not by_heads(heads)
    for (x, how), expected in zip(inputs, wanted, strict=True):
        assert mx.allclose(heads(x, transpose=how), expected, atol=1e-4).item()


def _modules() -> tuple[ModuleType, ModuleType]:
    import mlx_lm.models.cache
    import mlx_lm.utils

    return mlx_lm.utils, mlx_lm.models.cache


@pytest.mark.parametrize("version", ["0.31.3", "0.32.1", "0.33.0", "1.0"])
def test_another_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(StartFailed, match=r"must be at least 0\.32\.2 and below 0\.33.*install"):
        connect()


def test_a_patch_release_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.32.9")
    assert connect().version == "0.32.9"


def _without_function(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(_modules()[0], "dequantize_model")


def _without_argument(patch: pytest.MonkeyPatch) -> None:
    def load_model(model_path: Any, lazy: bool = False) -> None: ...

    patch.setattr(_modules()[0], "load_model", load_model)


def _without_class(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(_modules()[1], "BatchRotatingKVCache")


def _without_method(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(_modules()[1].BatchKVCache, "extract")


def _other_behaviour(patch: pytest.MonkeyPatch) -> None:
    real = _modules()[1].BatchKVCache.filter
    patch.setattr(_modules()[1].BatchKVCache, "filter", lambda self, rows: real(self, rows[::-1]))


CHANGES: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    _without_function: r"mlx_lm\.utils\.dequantize_model\(model\) is missing",
    _without_argument: r"load_model\(strict, trust_remote_code, model_config, get_model_classes\) is missing",
    _without_class: "BatchRotatingKVCache has no state, nbytes",
    _without_method: "BatchKVCache has no extract",
    _other_behaviour: "does not give back the rows",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_missing_is_named(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect()
    change(monkeypatch)
    with pytest.raises(StartFailed, match=CHANGES[change]):
        connect()


def test_no_mlx_lm_at_all_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm.utils", None)
    with pytest.raises(StartFailed, match=r"install .*'mlx-lm"):
        connect()


IMPORT = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(5000, hard), hard))
before = resource.getrlimit(resource.RLIMIT_NOFILE)
real = resource.setrlimit
from treadle.runner.mlxlm import connect
from treadle.runner.mlxlm.latent import by_heads
connect()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == before, resource.getrlimit(resource.RLIMIT_NOFILE)
assert resource.setrlimit is real
"""

LAYERS = """
import sys
import treadle.runner, treadle.runner.base
assert not [name for name in sys.modules if name.split(".")[0] in ("mlx", "mlx_lm", "transformers")]
"""


@pytest.mark.parametrize("code", [IMPORT, LAYERS], ids=["the limit of open files stays", "the contract needs no mlx"])
def test_in_a_fresh_process(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
