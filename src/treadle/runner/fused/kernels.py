"""Kernels between the matrix products of a decoder layer, one for each gap.

A decoder layer of MLX's operations is about 22 kernels, and on a small model or a small batch the time goes into
starting them. With these it is nine, four of them matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..device.cuda import NewKernel, bits_of
from ..kv.paged.pool import Pool

_EMBED = """
  using namespace treadle;
  const int row = tokens[blockIdx.x];
  for (int i = threadIdx.x * 8; i < WIDTH; i += blockDim.x * 8) {
    uint4 eight;
    if (BITS == 16) {
      eight = *reinterpret_cast<const uint4*>(reinterpret_cast<const T*>(table) + size_t(row) * WIDTH + i);
    } else {
      const size_t at = size_t(row) * WIDTH + i;
      const unsigned* words = reinterpret_cast<const unsigned*>(table) + at * BITS / 32;
      const float scale = wide(scales[at / GROUP]), bias = wide(biases[at / GROUP]);
      T* to = reinterpret_cast<T*>(&eight);
      for (int e = 0; e < 8; ++e)
        to[e] = narrow((words[e * BITS / 32] >> e * BITS % 32 & (1u << BITS % 32) - 1) * scale + bias, T());
    }
    *reinterpret_cast<uint4*>(out + size_t(blockIdx.x) * WIDTH + i) = eight;
  }
"""

_COS_SIN = """
  const int i = blockIdx.x * blockDim.x + threadIdx.x, half = inv_freq_shape[0];
  if (i >= positions_shape[0] * half) return;
  float sine, cosine;
  sincosf(positions[i / half] * inv_freq[i % half], &sine, &cosine);
  out[2 * i] = cosine;
  out[2 * i + 1] = sine;
"""

_ROTATE = """
  using namespace treadle;
  constexpr int E = D / 64, ALL = HQ + 2 * HKV;
  const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = warp / ALL, head = warp % ALL;
  if (token >= qkv_shape[0]) return;
  const int slot = slots[token];
  if (slot < 0 && head >= HQ) return;
  const T *from = qkv + size_t(warp) * D + lane * E, *weight = (head < HQ ? q_norm : k_norm) + lane * E;
  const Several<T, E> a = several<E>(from), b = several<E>(from + D / 2);
  float low[E], high[E];
  for (int e = 0; e < E; ++e) {
    low[e] = wide(a.of[e]);
    high[e] = wide(b.of[e]);
  }
  if (head < HQ + HKV) {
    const Several<float, 2 * E> rotation = several<2 * E>(cos_sin + size_t(token) * D + lane * 2 * E);
    if (NORM) {
      const Several<T, E> wa = several<E>(weight), wb = several<E>(weight + D / 2);
      float sum = 0.0f;
      for (int e = 0; e < E; ++e) sum += low[e] * low[e] + high[e] * high[e];
      for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
      const float scale = rsqrtf(sum / D + __int_as_float(EPS));
      for (int e = 0; e < E; ++e) {
        low[e] = rounded<T>(rounded<T>(low[e] * scale) * wide(wa.of[e]));
        high[e] = rounded<T>(rounded<T>(high[e] * scale) * wide(wb.of[e]));
      }
    }
    for (int e = 0; e < E; ++e) {
      const float cosine = rotation.of[2 * e], sine = rotation.of[2 * e + 1], x = low[e], y = high[e];
      low[e] = x * cosine - y * sine;
      high[e] = x * sine + y * cosine;
    }
  }
  const int h = head < HQ + HKV ? head - HQ : head - HQ - HKV, value = head >= HQ + HKV;
  const size_t line = ((size_t(slot / PAGE) * 2 + value) * HKV + h) * PAGE + slot % PAGE;
  if (head >= HQ && sizeof(S) == 1) {
    float most = 0.0f;
    for (int e = 0; e < E; ++e) most = fmaxf(most, fmaxf(fabsf(low[e]), fabsf(high[e])));
    const float factor = factor_of(most);
    S* to = const_cast<S*>(pool) + line * D + lane * E;
    for (int e = 0; e < E; ++e) {
      to[e] = S(whole(low[e], factor));
      to[D / 2 + e] = S(whole(high[e], factor));
    }
    if (lane == 0) const_cast<float*>(kv_scales)[line] = factor;
    return;
  }
  T* kept = reinterpret_cast<T*>(const_cast<S*>(pool)) + line * D;
  T* to = (head < HQ ? q + (size_t(token) * HQ + head) * D : kept) + lane * E;
  Several<T, E> c, d;
  for (int e = 0; e < E; ++e) {
    c.of[e] = narrow(low[e], T());
    d.of[e] = narrow(high[e], T());
  }
  *reinterpret_cast<Several<T, E>*>(to) = c;
  *reinterpret_cast<Several<T, E>*>(to + D / 2) = d;
"""

_ADD_NORM = """
  using namespace treadle;
  constexpr int PER = 8, STEP = THREADS * PER, TURNS = (WIDTH + STEP - 1) / STEP;
  __shared__ float sums[THREADS / 32];
  const size_t row = size_t(blockIdx.x) * WIDTH;
  float kept[TURNS][PER];
  uint4 weights[TURNS];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int at = i * STEP + threadIdx.x * PER;
    if (at >= WIDTH) break;
    const uint4 a = *reinterpret_cast<const uint4*>(x + row + at), b = *reinterpret_cast<const uint4*>(r + row + at);
    weights[i] = *reinterpret_cast<const uint4*>(weight + at);
    const T *pa = reinterpret_cast<const T*>(&a), *pb = reinterpret_cast<const T*>(&b);
    uint4 both;
    T* pc = reinterpret_cast<T*>(&both);
    for (int e = 0; e < PER; ++e) {
      pc[e] = narrow(wide(pa[e]) + wide(pb[e]), T());
      kept[i][e] = wide(pc[e]);
      sum += kept[i][e] * kept[i][e];
    }
    *reinterpret_cast<uint4*>(h + row + at) = both;
  }
  for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int i = 0; i < THREADS / 32; ++i) sum += sums[i];
  const float scale = rsqrtf(sum / WIDTH + __int_as_float(EPS));
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int at = i * STEP + threadIdx.x * PER;
    if (at >= WIDTH) break;
    const T* pw = reinterpret_cast<const T*>(&weights[i]);
    uint4 four;
    T* py = reinterpret_cast<T*>(&four);
    for (int e = 0; e < PER; ++e) py[e] = narrow(rounded<T>(kept[i][e] * scale) * wide(pw[e]), T());
    *reinterpret_cast<uint4*>(y + row + at) = four;
  }
"""

_SWIGLU = """
  using namespace treadle;
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  const size_t row = i / WIDTH, at = i % WIDTH;
  if (row >= both_shape[0]) return;
  const uint4 a = *reinterpret_cast<const uint4*>(both + row * 2 * WIDTH + at);
  const uint4 b = *reinterpret_cast<const uint4*>(both + row * 2 * WIDTH + WIDTH + at);
  const T *gate = reinterpret_cast<const T*>(&a), *up = reinterpret_cast<const T*>(&b);
  uint4 four;
  T* to = reinterpret_cast<T*>(&four);
  for (int e = 0; e < 8; ++e) {
    const float g = wide(gate[e]);
    to[e] = narrow(rounded<T>(g / (1.0f + __expf(-g))) * wide(up[e]), T());
  }
  *reinterpret_cast<uint4*>(out + i) = four;
"""


@dataclass(frozen=True)
class Table:
    """Embeddings of `width` dimensions: `weight`, quantized to `bits` bits with `scales` and `biases` for every
    `group`; with 16 bits all three are the same array."""

    weight: Any
    scales: Any
    biases: Any
    width: int
    bits: int = 16
    group: int = 64


@dataclass(frozen=True)
class Heads:
    """A layer's numbers of heads, their dimensions, and the tokens of a page."""

    queries: int
    kv: int
    dim: int
    page: int


class LayerKernels:
    """Kernels between a layer's matrix products, made by `kernel`."""

    def __init__(self, kernel: NewKernel) -> None:
        numbers = ["device/numbers.cuh"]
        names = ["qkv", "q_norm", "k_norm", "cos_sin", "slots", "pool", "kv_scales"]
        self._embed = kernel("embed", ["tokens", "table", "scales", "biases"], ["out"], _EMBED, files=numbers)
        self._cos_sin = kernel("cos_sin", ["positions", "inv_freq"], ["out"], _COS_SIN)
        self._rotate = kernel("rotate", names, ["q"], _ROTATE, files=numbers)
        self._add_norm = kernel("add_norm", ["x", "r", "weight"], ["h", "y"], _ADD_NORM, files=numbers)
        self._swiglu = kernel("swiglu", ["both"], ["out"], _SWIGLU, files=numbers)

    def embed(self, tokens: Any, table: Table) -> Any:
        """Rows (T, W) of `table` for `tokens` (T,), in its type."""
        return self._embed(
            [tokens, table.weight, table.scales, table.biases],
            [("T", table.scales.dtype), ("WIDTH", table.width), ("BITS", table.bits), ("GROUP", table.group)],
            blocks=(tokens.shape[0], 1),
            threads=128,
            shapes=[(tokens.shape[0], table.width)],
            dtypes=[table.scales.dtype],
        )[0]

    def cos_sin(self, positions: Any, inv_freq: Any) -> Any:
        """Cosines and sines (T, D / 2, 2), float32, of `positions` (T,) times `inv_freq` (D / 2,) radians."""
        shape = (positions.shape[0], inv_freq.shape[0], 2)
        return self._cos_sin(
            [positions, inv_freq],
            [],
            blocks=(-(-shape[0] * shape[1] // 128), 1),
            threads=128,
            shapes=[shape],
            dtypes=[mx.float32],
        )[0]

    def rotate(
        self,
        qkv: Any,
        q_norm: Any | None,
        k_norm: Any | None,
        eps: float,
        cos_sin: Any,
        slots: Any,
        pool: Pool,
        heads: Heads,
    ) -> Any:
        """Queries (T, query heads, 1, D) out of `qkv` (T, (query + 2 kv heads) * D): normalized by `q_norm` (D,) where
        there is one, and rotated by `cos_sin` (T, D / 2, 2). Keys likewise; they and the values are written to `slots`
        of `pool`, those at -1 nowhere."""
        rows, count = qkv.shape[0], qkv.shape[0] * (heads.queries + 2 * heads.kv)
        norms = (qkv, qkv) if q_norm is None else (q_norm, k_norm)
        return self._rotate(
            [qkv, *norms, cos_sin, slots, pool.data, cos_sin if pool.scales is None else pool.scales],
            [
                ("T", qkv.dtype),
                ("S", pool.data.dtype),
                ("D", heads.dim),
                ("HQ", heads.queries),
                ("HKV", heads.kv),
                ("PAGE", heads.page),
                ("NORM", q_norm is not None),
                ("EPS", bits_of(eps)),
            ],
            blocks=(-(-count // 4), 1),
            threads=128,
            shapes=[(rows, heads.queries, 1, heads.dim)],
            dtypes=[qkv.dtype],
        )[0]

    def add_norm(self, x: Any, r: Any, weight: Any, eps: float) -> tuple[Any, Any]:
        """`x + r` (T, W) and its root mean square norm times `weight` (W,); W is a multiple of 8."""
        rows, width = x.shape
        threads = min(512, -(-width // 256) * 32)
        h, y = self._add_norm(
            [x, r, weight],
            [("T", x.dtype), ("WIDTH", width), ("THREADS", threads), ("EPS", bits_of(eps))],
            blocks=(rows, 1),
            threads=threads,
            shapes=[x.shape, x.shape],
            dtypes=[x.dtype, x.dtype],
        )
        return h, y

    def swiglu(self, both: Any) -> Any:
        """silu(gate) * up (T, W) of `both` (T, 2 W), gate then up; W is a multiple of 8."""
        rows, width = both.shape[0], both.shape[1] // 2
        return self._swiglu(
            [both],
            [("T", both.dtype), ("WIDTH", width)],
            blocks=(-(-rows * width // 8 // 256), 1),
            threads=256,
            shapes=[(rows, width)],
            dtypes=[both.dtype],
        )[0]
