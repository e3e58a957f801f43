"""The compute path: which KV backend and which custom kernels run a model, and the reasons why not better ones."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import msgspec

_NAMED = 2
"""Active kernels up to which a summary names them instead of counting."""


class Backend(StrEnum):
    """A KV backend, as in `docs/glossary.md`; the best first."""

    PAGED = "paged"
    CONTIGUOUS = "contiguous"
    PADDED = "padded"
    SERIAL = "serial"
    ENCODER = "encoder"


class KernelName(StrEnum):
    """Each custom kernel, the BLAS library in place of MLX's own, and launches without CUDA graphs."""

    DECODE_ATTENTION = "decode_attention"
    PREFILL_ATTENTION = "prefill_attention"
    PAGE_WRITES = "page_writes"
    FUSED_LAYERS = "fused_layers"
    REPLACED_LAYERS = "replaced_layers"
    SKINNY_GEMM = "skinny_gemm"
    PACKED_GEMM = "packed_gemm"
    SMALL_GEMM = "small_gemm"
    DEQUANTIZE = "dequantize"
    EXPERTS = "experts"
    SAMPLING = "sampling"
    TOKEN_MASKS = "token_masks"
    READBACK = "readback"
    STAGING = "staging"
    SINGLE_LAUNCHES = "single_launches"
    COMPILED_PASSES = "compiled_passes"
    BLAS = "blas"


class KernelState(StrEnum):
    """Whether a kernel is used."""

    ACTIVE = "active"
    OFF = "off"  # by --kernels off
    FAILED = "failed"  # its self-test
    NOT_APPLICABLE = "not applicable"  # nothing for it to do with this model on this device


class KernelPolicy(StrEnum):
    """The setting `--kernels`."""

    AUTO = "auto"  # what passes its self-test
    REQUIRE = "require"  # all of it, or the start fails
    OFF = "off"  # operations of MLX and mlx-lm only


class KernelStatus(msgspec.Struct, frozen=True):
    """One kernel's state. `reason` says why it is not active; of an active BLAS library, which one it is, of
    replaced layers, which ones they are, and of fused layers, which parts are not."""

    name: KernelName
    state: KernelState
    reason: str = ""


class KernelPrograms(msgspec.Struct, frozen=True):
    """Programs of custom kernels on CUDA, by their origin: `compiled` in `compile_s` seconds, `cached` on disk by an
    earlier process, or compiled by MLX, at each start. `reasons` say why MLX compiles more than the kernels that need
    it, why none are kept on disk, and why launches take the host longer than they might."""

    compiled: int = 0
    cached: int = 0
    by_mlx: int = 0
    compile_s: float = 0.0
    reasons: tuple[str, ...] = ()

    def summary(self) -> str:
        """One line for people, such as "3 compiled in 1.2 s, 20 from the cache, 2 by MLX"; empty without any."""
        parts = [
            f"{self.compiled} compiled in {self.compile_s:.1f} s",
            f"{self.cached} from the cache",
            f"{self.by_mlx} by MLX",
        ]
        counts = (self.compiled, self.cached, self.by_mlx)
        counted = ", ".join(part for part, count in zip(parts, counts, strict=True) if count)
        return "; ".join(filter(None, (counted, *self.reasons)))


class ComputePath(msgspec.Struct, frozen=True):
    """The compute path of one start.

    `best` is the best backend that the device has. `lookahead` is how many steps may be started before the oldest is
    read, and `shared_prefill` whether several prompts share a pass. `why` gives a reason for each better choice that
    was not taken, in words for an operator, such as "paged: its layers have different heads". The backend's self-test
    compared sequences of up to `tested_tokens` tokens; their logits were `deviation` times as far from mlx-lm's as
    rounding explains. `programs` are those of its custom kernels.
    """

    backend: Backend = Backend.PADDED
    best: Backend = Backend.CONTIGUOUS
    fused: bool = False
    lookahead: int = 0
    shared_prefill: bool = False
    kernels: tuple[KernelStatus, ...] = ()
    why: tuple[str, ...] = ()
    tested_tokens: int = 0
    deviation: float = 0.0
    programs: KernelPrograms = KernelPrograms()

    @property
    def serialized(self) -> bool:
        """Whether sequences decode one after the other."""
        return self.backend is Backend.SERIAL

    def named(self, state: KernelState) -> list[KernelStatus]:
        """The kernels in one state."""
        return [kernel for kernel in self.kernels if kernel.state is state]

    def summary(self) -> str:
        """One line for people, such as "paged, fused, 9 kernels, look-ahead"."""
        return ", ".join(self._parts())

    def _parts(self) -> Iterator[str]:
        reason = next((line for line in self.why if line.startswith(self.best)), "".join(self.why[:1]))
        against = f" ({reason})" if reason else ""
        yield self.backend.value if self.backend is self.best else f"{self.backend}{against}"
        if self.backend is Backend.PAGED:
            yield "fused" if self.fused else f"not fused{against}"
        active = [kernel.name.replace("_", " ") for kernel in self.named(KernelState.ACTIVE)]
        if active:
            yield f"{len(active)} kernels" if len(active) > _NAMED else " and ".join(active)
        elif any(kernel.state is KernelState.OFF for kernel in self.kernels):
            yield "kernels off"
        if failed := self.named(KernelState.FAILED):
            yield f"{len(failed)} failed ({', '.join(kernel.name.replace('_', ' ') for kernel in failed)})"
        if self.lookahead:
            yield "look-ahead"

    def shortfalls(self) -> list[str]:
        """Return the shortfalls that `--kernels require` rejects: a backend that is not the device's best, layers that
        could be fused and are not, and each kernel that failed its self-test."""
        found = list(self.why)
        if self.backend is not self.best and not found:
            found.append(f"{self.best}: not used")
        return found + [
            f"{kernel.name.replace('_', ' ')}: {kernel.reason}" for kernel in self.named(KernelState.FAILED)
        ]
