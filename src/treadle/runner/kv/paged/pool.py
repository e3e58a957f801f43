"""Pool of pages: one layer's cache for all sequences, and the kernels that write it.

A page holds keys, (kv heads, page, D), then values, (kv heads, page, DV), in the model's type or as int8 with a scale
for every token and head. A latent pool (multi-head latent attention) holds keys alone. The kernels write to it in
place, unknown to MLX, which only sees that they read it. The order is right because `write` returns a token that every
reader takes, because all run on one stream, and because nothing else ever makes a new array out of a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import mlx.core as mx

from ...device.cuda import CudaKernel

_WRITE_BODY = """
  constexpr int CHUNKS = D / 8;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i == 0) written[0] = 0;
  const int chunk = i % CHUNKS, h = i / CHUNKS % HEADS, token = i / (CHUNKS * HEADS);
  if (token >= slots_shape[0]) return;
  const int slot = slots[token];
  if (slot < 0) return;
  uint4* to = reinterpret_cast<uint4*>(const_cast<T*>(pool)) +
      (size_t(slot / PAGE) * 2 * HEADS + h) * PAGE * CHUNKS + slot % PAGE * CHUNKS + chunk;
  to[0] = reinterpret_cast<const uint4*>(k)[i];
  to[size_t(HEADS) * PAGE * CHUNKS] = reinterpret_cast<const uint4*>(v)[i];
"""
_WRITE_EACH_BODY = """
  constexpr int CHUNKS = D / 8, ALL = WIDTH / 8;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i == 0) written[0] = 0;
  const int chunk = i % ALL, h = i / ALL % HEADS, token = i / (ALL * HEADS);
  if (token >= slots_shape[0]) return;
  const int slot = slots[token];
  if (slot < 0) return;
  uint4* page = reinterpret_cast<uint4*>(const_cast<T*>(pool)) + size_t(slot / PAGE) * HEADS * PAGE * ALL;
  const int line = h * PAGE + slot % PAGE, values = ALL - CHUNKS, row = token * HEADS + h;
  if (chunk < CHUNKS)
    page[line * CHUNKS + chunk] = reinterpret_cast<const uint4*>(k)[size_t(row) * CHUNKS + chunk];
  else
    page[HEADS * PAGE * CHUNKS + line * values + chunk - CHUNKS] =
        reinterpret_cast<const uint4*>(v)[size_t(row) * values + chunk - CHUNKS];
"""
_WRITE_LATENT_BODY = """
  constexpr int ALL = D / 8, LATENT = DV / 8;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i == 0) written[0] = 0;
  const int chunk = i % ALL, row = i / ALL, h = row % HEADS, token = row / HEADS;
  if (token >= slots_shape[0]) return;
  const int slot = slots[token];
  if (slot < 0) return;
  uint4* to = reinterpret_cast<uint4*>(const_cast<T*>(pool)) +
      (size_t(slot / PAGE) * HEADS + h) * PAGE * ALL + slot % PAGE * ALL + chunk;
  *to = chunk < LATENT ? reinterpret_cast<const uint4*>(k)[size_t(row) * LATENT + chunk]
                       : reinterpret_cast<const uint4*>(v)[size_t(row) * (ALL - LATENT) + chunk - LATENT];
"""
_INT8_BODY = """
  const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0 && lane == 0) written[0] = 0;
  const int value = warp % 2, h = warp / 2 % HEADS, token = warp / (2 * HEADS);
  if (token >= slots_shape[0]) return;
  const int slot = slots[token];
  if (slot < 0) return;
  constexpr int EACH = ((D > DV ? D : DV) + 31) / 32;
  const int dim = D == DV ? D : value ? DV : D;
  const T* from = (value ? v : k) + (size_t(token) * HEADS + h) * dim;
  float x[EACH], most = 0.0f;
  for (int e = 0; e < EACH; ++e) {
    x[e] = e * 32 + lane < dim ? treadle::wide(from[e * 32 + lane]) : 0.0f;
    most = fmaxf(most, fabsf(x[e]));
  }
  const float factor = treadle::factor_of(most);
  const size_t line = ((size_t(slot / PAGE) * 2 + value) * HEADS + h) * PAGE + slot % PAGE;
  const size_t at = size_t(slot / PAGE) * HEADS * PAGE * WIDTH + value * HEADS * PAGE * D;
  unsigned char* to = const_cast<unsigned char*>(pool) + at + (h * PAGE + slot % PAGE) * dim;
  for (int e = 0; e < EACH; ++e)
    if (e * 32 + lane < dim) to[e * 32 + lane] = treadle::whole(x[e], factor);
  if (lane == 0) const_cast<float*>(kv_scales)[line] = factor;
"""
_DEQUANTIZE_BODY = """
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x, each = size_t(HEADS) * PAGE * WIDTH / 8;
  if (i == 0) done[0] = 0;
  if (i >= pages_shape[0] * each) return;
  const size_t at = pages[i / each] * each + i % each;
  const uint2 eight = reinterpret_cast<const uint2*>(pool)[at];
  constexpr int KEYS = HEADS * PAGE * (D / 8), LINES = HEADS * PAGE;
  const int within = i % each;
  const size_t line = within < KEYS ? within / (D / 8) : LINES + (within - KEYS) / (DV / 8);
  const float factor = kv_scales[pages[i / each] * size_t(2 * LINES) + line];
  const unsigned char* from = reinterpret_cast<const unsigned char*>(&eight);
  uint4 wide;
  T* to = reinterpret_cast<T*>(&wide);
  for (int e = 0; e < 8; ++e) to[e] = treadle::narrow((int(from[e]) - 128) * factor, T());
  reinterpret_cast<uint4*>(const_cast<T*>(plain))[i] = wide;
"""
_COPY_BODY = """
  const size_t each = size_t(HEADS) * PAGE * WIDTH * sizeof(S) / 16;
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i == 0 && blockIdx.y == 0) copied[0] = 0;
  if (i >= pairs_shape[0] * each) return;
  const int from = pairs[i / each * 2], to = pairs[i / each * 2 + 1];
  S* pools[] = {POOLS};
  uint4* at = reinterpret_cast<uint4*>(pools[blockIdx.y]);
  at[to * each + i % each] = at[from * each + i % each];
  constexpr int SOME = sizeof(S) == 1 ? 2 * HEADS * PAGE : 0;
  if (i % each >= SOME) return;
  float* kv_scales[] = {KV_SCALES};
  float* factor = kv_scales[blockIdx.y];
  factor[size_t(to) * SOME + i % each] = factor[size_t(from) * SOME + i % each];
"""


@dataclass
class Pool:
    """`data` (pages, ...) in the model's type, each page (2, kv heads, page, D) where keys and values are alike, else
    one line; or uint8, where (data - 128) times `scales` (pages, 2, kv heads, page), float32, are keys and values."""

    data: Any
    scales: Any | None = None

    def free(self) -> None:
        self.data = self.scales = None


@dataclass
class PoolKernels:
    """Kernels for pools of `heads` kv heads in pages of `page` tokens, which store `dtype`, or int8 with 8 `bits`.

    Keys have `dim` dimensions, values `value_dim` (0: the same). In a `latent` pool they are the first of the keys' and
    are not stored. They are compiled at their first use; a compiler's refusal is a RuntimeError at the evaluation.
    `kernel` makes them, `dtypes` are the types that they compute in, and `compile` compiles passes that use them.
    """

    kernel: ClassVar[type[CudaKernel]] = CudaKernel
    dtypes: ClassVar[tuple[Any, ...]] = (mx.bfloat16, mx.float16)
    compile: ClassVar[Callable[..., Any]] = staticmethod(mx.compile)

    heads: int
    dim: int
    page: int
    dtype: Any
    bits: int = 16
    value_dim: int = field(default=0, kw_only=True)
    latent: bool = field(default=False, kw_only=True)
    _workspace: Pool | None = field(default=None, repr=False, kw_only=True)
    _copies: dict[int, CudaKernel] = field(default_factory=dict, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        self.value_dim = self.value_dim or self.dim

    @property
    def width(self) -> int:
        """Numbers that a pool stores of a token and kv head."""
        return self.dim if self.latent else self.dim + self.value_dim

    @property
    def int8(self) -> bool:
        """Whether keys and values are stored as int8."""
        return self.bits == 8

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one layer."""
        return self.heads * self.page * (self.width + 8 if self.int8 else self.width * int(self.dtype.size))

    def new_pool(self, pages: int) -> Pool:
        """An empty pool, which takes its memory at once."""
        shape = (pages, *self._page_shape)
        pool = Pool(mx.zeros(shape, self.dtype))
        if self.int8:
            scales = mx.zeros((pages, 2, self.heads, self.page), mx.float32)
            pool = Pool(mx.zeros(shape, mx.uint8), scales)
        mx.eval(pool.data, pool.scales)
        return pool

    def keys(self, pool: Pool, pages: Any) -> Any:
        """Return the keys (kv heads, tokens, D) of all tokens of `pages` (P,), in the model's type."""
        assert pool.scales is None, "keys that are not quantized"
        wide = pool.data.reshape(pool.data.shape[0], -1).view(mx.uint64)  # fewer and longer numbers to look up
        count = self.heads * self.page * self.dim * pool.data.dtype.size // 8
        some = wide[:, :count][pages].view(pool.data.dtype)
        return some.reshape(-1, self.heads, self.page, self.dim).swapaxes(0, 1).reshape(self.heads, -1, self.dim)

    def write(self, pool: Pool, keys: Any, values: Any, slots: Any) -> Any:
        """Write `keys` and `values` (T, kv heads, 1, D or DV) to `slots` (T,) of the pool, those at -1 nowhere. A
        latent pool takes latents, and rotated keys, which are stored behind them. Returns a token that readers wait
        for."""
        kernel, inputs, threads = self._write, [keys, values, pool.data, slots], keys.size // 8
        if pool.scales is not None:
            kernel, inputs, threads = self._write_int8, [*inputs, pool.scales], keys.size // self.dim * 64
        elif self.width != 2 * self.dim:
            threads = slots.size * self.heads * self.width // 8
        return kernel(
            inputs,
            [("T", self.dtype), *self._sizes],
            blocks=(-(-threads // 256), 1),
            threads=256,
            shapes=[(1,)],
            dtypes=[mx.int32],
        )[0]

    def copy_pages(self, pools: Sequence[Pool], pairs: Any) -> Any:
        """In all of `pools`, copy each page `pairs[i, 0]` over page `pairs[i, 1]`, which is in no other pair (int32).
        Returns a token
        that is there when all are copied."""
        kept, kv_scales = [pool.data for pool in pools], [pool.scales for pool in pools if pool.scales is not None]
        kernel = self._copies.get(len(kept))
        if kernel is None:
            kernel = self._copies[len(kept)] = self._new_copy(len(kept))
        threads = pairs.shape[0] * self.heads * self.page * self.width * int(kept[0].dtype.size) // 16
        return kernel(
            [pairs, *kept, *kv_scales],
            [("S", kept[0].dtype), *self._sizes],
            blocks=(-(-threads // 256), len(kept)),
            threads=256,
            shapes=[(1,)],
            dtypes=[mx.int32],
        )[0]

    def dequantize(self, pool: Pool, pages: Any, *after: Any) -> tuple[Pool, Any]:
        """The pool's `pages` (P,) in the model's type, as the first pages of a pool that all layers use in turn, and a
        token that readers wait for. They are read once the two arrays `after`, whose making fills them, are there."""
        count = int(pages.shape[0])
        if self._workspace is None or self._workspace.data.shape[0] < count:
            self._workspace = None
            self._workspace = Pool(mx.zeros((count, *self._page_shape), self.dtype))
            mx.eval(self._workspace.data)
        done = self._dequantize_kv(
            [pool.data, pool.scales, pages, *after, self._workspace.data],
            [("T", self.dtype), *self._sizes],
            blocks=(-(-count * self.heads * self.page * self.width // 8 // 256), 1),
            threads=256,
            shapes=[(1,)],
            dtypes=[mx.int32],
        )[0]
        return self._workspace, done

    def close(self) -> None:
        """Free the memory that layers used in turn."""
        self._workspace = None

    @property
    def _page_shape(self) -> tuple[int, ...]:
        if self.width == 2 * self.dim:
            return 2, self.heads, self.page, self.dim
        return (self.heads * self.page * self.width,)

    @property
    def _sizes(self) -> list[tuple[str, int]]:
        return [
            ("D", self.dim),
            ("DV", self.value_dim),
            ("WIDTH", self.width),
            ("HEADS", self.heads),
            ("PAGE", self.page),
        ]

    @cached_property
    def _write(self) -> CudaKernel:
        body = _WRITE_LATENT_BODY if self.latent else _WRITE_EACH_BODY
        body = _WRITE_BODY if self.width == 2 * self.dim else body
        return self.kernel("write", ["k", "v", "pool", "slots"], ["written"], body)

    @cached_property
    def _write_int8(self) -> CudaKernel:
        names = ["k", "v", "pool", "slots", "kv_scales"]
        return self.kernel("write_int8", names, ["written"], _INT8_BODY, files=["device/numbers.cuh"])

    def _new_copy(self, layers: int) -> CudaKernel:
        """A kernel for all layers: a launch for each takes the host longer than the copies take the device."""
        pools = [f"pool{i}" for i in range(layers)]
        kv_scales = [f"kv_scales{i}" for i in range(layers)] if self.int8 else []
        body = _COPY_BODY.replace("POOLS", _listed("S", pools))
        body = body.replace("KV_SCALES", _listed("float", kv_scales) or "nullptr")
        return self.kernel("copy_pages", ["pairs", *pools, *kv_scales], ["copied"], body)

    @cached_property
    def _dequantize_kv(self) -> CudaKernel:
        names = ["pool", "kv_scales", "pages", "written", "queries", "plain"]
        return self.kernel("dequantize_kv", names, ["done"], _DEQUANTIZE_BODY, files=["device/numbers.cuh"])


def _listed(kind: str, names: Sequence[str]) -> str:
    """Arguments of `kind` that a kernel writes to."""
    return ", ".join(f"const_cast<{kind}*>({name})" for name in names)
