"""What lies between the matrix products of a decoder layer, one kernel for each gap.

A decoder layer of plain operations is about 22 kernels, and on a small model or a small batch the time goes into
starting them. With these it is nine, four of them matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..cuda import NewKernel

_TYPES = """
namespace treadle {
__device__ inline float wide(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline float wide(__half v) { return __half2float(v); }
__device__ inline __nv_bfloat16 narrow(float v, __nv_bfloat16) { return __float2bfloat16(v); }
__device__ inline __half narrow(float v, __half) { return __float2half(v); }
template <typename T>
__device__ inline float rounded(float v) { return wide(narrow(v, T())); }
}
"""

_ROTATE = """
  using namespace treadle;
  constexpr int E = D / 64, ALL = HQ + 2 * HKV;
  const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = warp / ALL, head = warp % ALL;
  if (token >= qkv_shape[0]) return;
  const T* from = qkv + size_t(warp) * D;
  float low[E], high[E];
  for (int e = 0; e < E; ++e) {
    low[e] = wide(from[lane * E + e]);
    high[e] = wide(from[D / 2 + lane * E + e]);
  }
  T* to;
  if (head < HQ + HKV) {
    if (NORM) {
      const T* weight = head < HQ ? q_norm : k_norm;
      float sum = 0.0f;
      for (int e = 0; e < E; ++e) sum += low[e] * low[e] + high[e] * high[e];
      for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
      const float scale = rsqrtf(sum / D + *eps);
      for (int e = 0; e < E; ++e) {
        low[e] = rounded<T>(rounded<T>(low[e] * scale) * wide(weight[lane * E + e]));
        high[e] = rounded<T>(rounded<T>(high[e] * scale) * wide(weight[D / 2 + lane * E + e]));
      }
    }
    for (int e = 0; e < E; ++e) {
      float sine, cosine;
      sincosf(positions[token] * turns[lane * E + e], &sine, &cosine);
      const float a = low[e], b = high[e];
      low[e] = a * cosine - b * sine;
      high[e] = a * sine + b * cosine;
    }
  }
  if (head < HQ) {
    to = q + (size_t(token) * HQ + head) * D;
  } else {
    const int slot = slots[token], h = head < HQ + HKV ? head - HQ : head - HQ - HKV, value = head >= HQ + HKV;
    to = const_cast<T*>(pool) +
        (((size_t(slot / PAGE) * 2 + value) * HKV + h) * PAGE + slot % PAGE) * D;
  }
  for (int e = 0; e < E; ++e) {
    to[lane * E + e] = narrow(low[e], T());
    to[D / 2 + lane * E + e] = narrow(high[e], T());
  }
"""

_ADD_NORM = """
  using namespace treadle;
  constexpr int PER = 8, STEP = THREADS * PER, TURNS = (WIDTH + STEP - 1) / STEP;
  __shared__ float sums[THREADS / 32];
  const size_t row = size_t(blockIdx.x) * WIDTH;
  float kept[TURNS][PER];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int at = i * STEP + threadIdx.x * PER;
    if (at >= WIDTH) break;
    const uint4 a = *reinterpret_cast<const uint4*>(x + row + at), b = *reinterpret_cast<const uint4*>(r + row + at);
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
  const float scale = rsqrtf(sum / WIDTH + *eps);
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int at = i * STEP + threadIdx.x * PER;
    if (at >= WIDTH) break;
    const uint4 w = *reinterpret_cast<const uint4*>(weight + at);
    const T* pw = reinterpret_cast<const T*>(&w);
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
class Heads:
    """A layer's heads and where their keys and values go."""

    queries: int
    kv: int
    dim: int
    page: int


class Between:
    """The kernels between a layer's matrix products, made by `kernel`."""

    def __init__(self, kernel: NewKernel) -> None:
        names = ["qkv", "q_norm", "k_norm", "eps", "positions", "turns", "slots", "pool"]
        self._rotate = kernel("rotate", names, ["q"], _ROTATE, header=_TYPES)
        self._add_norm = kernel("add_norm", ["x", "r", "weight", "eps"], ["h", "y"], _ADD_NORM, header=_TYPES)
        self._swiglu = kernel("swiglu", ["both"], ["out"], _SWIGLU, header=_TYPES)

    def rotate(
        self, qkv: Any, q_norm: Any | None, k_norm: Any | None, eps: Any, turns: Any, step: Any, pool: Any, heads: Heads
    ) -> Any:
        """Queries (T, query heads, 1, D) out of `qkv` (T, (query + 2 kv heads) * D): normed by `q_norm` (D,) where
        there is one, and turned by their positions times `turns` (D / 2,); keys likewise, and with the values put into
        `pool`."""
        rows, count = qkv.shape[0], qkv.shape[0] * (heads.queries + 2 * heads.kv)
        norms = (qkv, qkv) if q_norm is None else (q_norm, k_norm)
        return self._rotate(
            [qkv, norms[0], norms[1], eps, step.positions, turns, step.slots, pool],
            [
                ("T", qkv.dtype),
                ("D", heads.dim),
                ("HQ", heads.queries),
                ("HKV", heads.kv),
                ("PAGE", heads.page),
                ("NORM", q_norm is not None),
            ],
            blocks=(-(-count // 4), 1),
            threads=128,
            shapes=[(rows, heads.queries, 1, heads.dim)],
            dtypes=[qkv.dtype],
        )[0]

    def add_norm(self, x: Any, r: Any, weight: Any, eps: Any) -> tuple[Any, Any]:
        """`x + r` (T, W) and its root mean square norm times `weight` (W,); W is a multiple of 8."""
        rows, width = x.shape
        threads = min(512, -(-width // 256) * 32)
        h, y = self._add_norm(
            [x, r, weight, eps],
            [("T", x.dtype), ("WIDTH", width), ("THREADS", threads)],
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


def constant(value: float) -> Any:
    """One number on the device, float32."""
    return mx.array([value], mx.float32)
