"""Kernels between the matrix products of a decoder layer, one for each gap.

A decoder layer of MLX's operations is about 22 kernels, and on a small model or a small batch the time goes into
starting them. With these it is nine, four of them matrix products.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import mlx.core as mx

from ..device.cuda import CudaKernel, NewKernel, bits_of
from ..kv.paged.pool import Pool
from .norms import Norm

_LARGEST = 65504.0
"""The largest number in float16."""
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
  out[2 * i] = cosine * __int_as_float(SCALE);
  out[2 * i + 1] = sine * __int_as_float(SCALE);
"""

_ROTATE = """
  using namespace treadle;
  constexpr int E = (D + 63) / 64, HALF = ROTATED / 2, ALL = HQ + 2 * HKV, STORED = ALL - (SHARED ? HKV : 0);
  constexpr bool VECTORS = D % 64 == 0 && (E & (E - 1)) == 0 && ROTATED == D && !INTERLEAVED;
  constexpr int V = VECTORS ? E : 1;
  const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = warp / ALL, head = warp % ALL;
  if (token >= qkv_shape[0]) return;
  const int slot = slots[token];
  if (slot < 0 && head >= HQ) return;
  const int value = head >= HQ + HKV, h = value ? head - HQ - HKV : head - HQ;
  const T* from = qkv + (size_t(token) * STORED + (SHARED && value ? head - HKV : head)) * D;
  const T* weight = head < HQ ? q_norm + (NORM == 2 ? head * D : 0) : k_norm + (NORM == 2 ? h * D : 0);
  const float* turns = (const float*)cos_sin;
  // The two dimensions of pair `i`, and the pairs of a lane.
  const auto first = [](int i) { return i < HALF && !INTERLEAVED ? i : 2 * i; };
  const auto second = [](int i) { return i < HALF && !INTERLEAVED ? i + HALF : 2 * i + 1; };
  const auto pair = [&](int e) { return VECTORS ? lane * E + e : lane + 32 * e; };
  float low[E], high[E];
  if constexpr (VECTORS) {
    const Several<T, V> a = several<V>(from + lane * E), b = several<V>(from + D / 2 + lane * E);
    for (int e = 0; e < E; ++e) {
      low[e] = wide(a.of[e]);
      high[e] = wide(b.of[e]);
    }
  } else {
    for (int e = 0; e < E; ++e) {
      const bool inside = pair(e) < D / 2;
      low[e] = inside ? wide(from[first(pair(e))]) : 0.0f;
      high[e] = inside ? wide(from[second(pair(e))]) : 0.0f;
    }
  }
  if (value ? VALUE_NORM : NORM) {
    float scale;
    if (NORM == 2 && !value) {
      scale = SCALES_OF[2 * token + (head >= HQ)];
    } else {
      float sum = 0.0f;
      for (int e = 0; e < E; ++e) sum += low[e] * low[e] + high[e] * high[e];
      for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
      scale = rsqrtf(sum / D + __int_as_float(EPS));
    }
    for (int e = 0; e < E; ++e) {
      low[e] = rounded<T>(low[e] * scale);
      high[e] = rounded<T>(high[e] * scale);
    }
    if constexpr (VECTORS) {
      if (!value) {
        const Several<T, V> wa = several<V>(weight + lane * E), wb = several<V>(weight + D / 2 + lane * E);
        for (int e = 0; e < E; ++e) {
          low[e] = rounded<T>(low[e] * wide(wa.of[e]));
          high[e] = rounded<T>(high[e] * wide(wb.of[e]));
        }
      }
    } else {
      for (int e = 0; e < E; ++e) {
        if (value || pair(e) >= D / 2) continue;
        low[e] = rounded<T>(low[e] * wide(weight[first(pair(e))]));
        high[e] = rounded<T>(high[e] * wide(weight[second(pair(e))]));
      }
    }
  }
  if (ROTATED && !value) {
    Several<float, 2 * V> rotation;
    if constexpr (VECTORS) rotation = several<2 * V>(turns + size_t(token) * D + lane * 2 * E);
    for (int e = 0; e < E; ++e) {
      if constexpr (!VECTORS) {
        if (pair(e) >= HALF) continue;
        rotation = several<2 * V>(turns + size_t(token) * ROTATED + 2 * pair(e));
      }
      const int at = VECTORS ? 2 * e : 0;
      const float cosine = rotation.of[at], sine = rotation.of[at + 1], x = low[e], y = high[e];
      low[e] = x * cosine - y * sine;
      high[e] = x * sine + y * cosine;
    }
  }
  const size_t line = ((size_t(slot / PAGE) * 2 + value) * HKV + h) * PAGE + slot % PAGE;
  if (head >= HQ && sizeof(S) == 1) {
    float most = 0.0f;
    for (int e = 0; e < E; ++e) most = fmaxf(most, fmaxf(fabsf(low[e]), fabsf(high[e])));
    const float factor = factor_of(most);
    S* to = const_cast<S*>(pool) + line * D;
    for (int e = 0; e < E; ++e) {
      if (!VECTORS && pair(e) >= D / 2) continue;
      to[first(pair(e))] = S(whole(low[e], factor));
      to[second(pair(e))] = S(whole(high[e], factor));
    }
    if (lane == 0) const_cast<float*>(kv_scales)[line] = factor;
    return;
  }
  T* kept = reinterpret_cast<T*>(const_cast<S*>(pool)) + line * D;
  T* to = head < HQ ? q + (size_t(token) * HQ + head) * D : kept;
  if constexpr (VECTORS) {
    Several<T, V> c, d;
    for (int e = 0; e < E; ++e) {
      c.of[e] = narrow(low[e], T());
      d.of[e] = narrow(high[e], T());
    }
    *reinterpret_cast<Several<T, V>*>(to + lane * E) = c;
    *reinterpret_cast<Several<T, V>*>(to + D / 2 + lane * E) = d;
  } else {
    for (int e = 0; e < E; ++e) {
      if (pair(e) >= D / 2) continue;
      to[first(pair(e))] = narrow(low[e], T());
      to[second(pair(e))] = narrow(high[e], T());
    }
  }
"""

_QK_SCALES = """
  using namespace treadle;
  constexpr int WARPS = 4;
  __shared__ float sums[WARPS];
  const int token = blockIdx.x, keys = blockIdx.y, width = (keys ? HKV : HQ) * D;
  const T* from = qkv + (size_t(token) * (HQ + 2 * HKV) + (keys ? HQ : 0)) * D;
  float sum = 0.0f;
  for (int i = threadIdx.x * 8; i < width; i += WARPS * 32 * 8) {
    const Several<T, 8> eight = several<8>(from + i);
    for (int e = 0; e < 8; ++e) sum += wide(eight.of[e]) * wide(eight.of[e]);
  }
  for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x) return;
  sum = 0.0f;
  for (int i = 0; i < WARPS; ++i) sum += sums[i];
  out[2 * token + keys] = rsqrtf(sum / width + __int_as_float(EPS));
"""

_ADD_NORM = """
  using namespace treadle;
  constexpr int PER = 8, STEP = THREADS * PER, TURNS = (WIDTH + STEP - 1) / STEP, WARPS = THREADS / 32;
  constexpr bool WEIGHTS = NORM != 0, BEFORE = POST != 0;
  __shared__ float sums[4 * WARPS];
  const size_t row = size_t(blockIdx.x) * WIDTH;
  float kept[TURNS][PER];
  uint4 before[TURNS], weights[TURNS], post_weights[TURNS];
  int sums_used = 0;
  const auto over_all = [&](float sum) {
    for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    float* of_warps = sums + WARPS * sums_used++;
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int i = 0; i < WARPS; ++i) sum += of_warps[i];
    return sum;
  };
  const auto normalize = [&](bool centered, float eps) {
    float mean = 0.0f, sum = 0.0f;
    if (centered) {
#pragma unroll
      for (int i = 0; i < TURNS; ++i) {
        if (i * STEP + threadIdx.x * PER >= WIDTH) break;
        for (int e = 0; e < PER; ++e) sum += kept[i][e];
      }
      mean = over_all(sum) / WIDTH;
      sum = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      if (i * STEP + threadIdx.x * PER >= WIDTH) break;
      for (int e = 0; e < PER; ++e) sum += (kept[i][e] - mean) * (kept[i][e] - mean);
    }
    const float scale = rsqrtf(over_all(sum) / WIDTH + eps);
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      if (i * STEP + threadIdx.x * PER >= WIDTH) break;
      for (int e = 0; e < PER; ++e) kept[i][e] = rounded<T>((kept[i][e] - mean) * scale);
    }
  };
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int at = i * STEP + threadIdx.x * PER;
    if (at >= WIDTH) break;
    before[i] = *reinterpret_cast<const uint4*>(x + row + at);
    const Several<T, PER> b = several<PER>(r + row + at);
    if (WEIGHTS) weights[i] = *reinterpret_cast<const uint4*>(WEIGHT + at);
    if (BEFORE) post_weights[i] = *reinterpret_cast<const uint4*>(POST_WEIGHT + at);
    for (int e = 0; e < PER; ++e) kept[i][e] = wide(b.of[e]);
    if (PARALLEL) {
      const Several<T, PER> c = several<PER>(OTHER + row + at);
      for (int e = 0; e < PER; ++e) kept[i][e] = rounded<T>(kept[i][e] + wide(c.of[e]));
    }
    if (SCALED)
      for (int e = 0; e < PER; ++e) kept[i][e] = rounded<T>(kept[i][e] * __int_as_float(MULTIPLIER));
  }
  if (BEFORE) normalize(POST == 2, __int_as_float(POST_EPS));
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int at = i * STEP + threadIdx.x * PER;
    if (at >= WIDTH) break;
    const T *pa = reinterpret_cast<const T*>(&before[i]), *pw = reinterpret_cast<const T*>(&post_weights[i]);
    Several<T, PER> both;
    for (int e = 0; e < PER; ++e) {
      if (BEFORE) kept[i][e] = rounded<T>(kept[i][e] * wide(pw[e]));
      if (BEFORE && POST_BIASED) kept[i][e] = rounded<T>(kept[i][e] + wide(POST_BIAS[at + e]));
      float sum = wide(pa[e]) + kept[i][e];
      if (CLIPPED) sum = fminf(fmaxf(sum, -65504.0f), 65504.0f);
      both.of[e] = narrow(RESCALED ? rounded<T>(sum) * __int_as_float(OUTPUT) : sum, T());
      kept[i][e] = wide(both.of[e]);
    }
    *reinterpret_cast<Several<T, PER>*>(h + row + at) = both;
  }
  if (!WEIGHTS) return;
  normalize(NORM == 2, __int_as_float(EPS));
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int at = i * STEP + threadIdx.x * PER;
    if (at >= WIDTH) break;
    const T* pw = reinterpret_cast<const T*>(&weights[i]);
    Several<T, PER> eight;
    for (int e = 0; e < PER; ++e) {
      float v = kept[i][e] * wide(pw[e]);
      if (BIASED) v = rounded<T>(v) + wide(BIAS[at + e]);
      eight.of[e] = narrow(v, T());
    }
    *reinterpret_cast<Several<T, PER>*>(Y + row + at) = eight;
  }
"""

_ACTIVATE = """
  using namespace treadle;
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  const size_t row = i / WIDTH, at = i % WIDTH;
  if (row >= x_shape[0]) return;
  const T* from = x + row * WIDTH * (GATED ? 2 : 1) + at;
  const Several<T, 8> gate = several<8>(from), up = several<8>(from + (GATED ? WIDTH : 0));
  Several<T, 8> eight;
  for (int e = 0; e < 8; ++e) {
    const float g = wide(gate.of[e]);
    float v;
    if (ACTIVATION == 0) v = g / (1.0f + __expf(-g));
    if (ACTIVATION == 1) v = 0.5f * g * (1.0f + erff(g * 0.70710678f));
    if (ACTIVATION == 2) v = 0.5f * g * (1.0f + tanhf(0.79788456f * (g + 0.044715f * g * g * g)));
    if (ACTIVATION == 3) v = fmaxf(g, 0.0f) * fmaxf(g, 0.0f);
    eight.of[e] = narrow(GATED ? rounded<T>(v) * wide(up.of[e]) : v, T());
  }
  *reinterpret_cast<Several<T, 8>*>(out + i) = eight;
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


class Activation(IntEnum):
    """Activation functions, by their numbers in the kernel. GELU is by the error function, or its tanh form."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU_SQUARED = 3


@dataclass(frozen=True)
class Heads:
    """A layer's numbers of heads, their dimensions, and the tokens of a page. With `shared` the keys, before their norm
    and rotation, are the values, too."""

    queries: int
    kv: int
    dim: int
    page: int
    shared: bool = False

    @property
    def stored(self) -> int:
        """Heads of a product for queries, keys and values."""
        return self.queries + (1 if self.shared else 2) * self.kv


@dataclass(frozen=True)
class HeadNorms:
    """Root mean square norms of queries and keys, by weights of each dimension (D,), or of all heads' (heads * D,) if
    `whole`; None for none. With `values` values are normalized by head, without weights."""

    queries: Any | None = None
    keys: Any | None = None
    eps: float = 1e-6
    whole: bool = False
    values: bool = False


@dataclass(frozen=True)
class Residual:
    """Addition to the residual stream: of a branch times `multiplier`, or normalized by `post`. Sums are `clipped` to
    float16's range where the model does that, and then multiplied by `output`."""

    post: Norm | None = None
    multiplier: float = 1.0
    clipped: bool = False
    output: float = 1.0


_ADDED = Residual()


class LayerKernels:
    """Kernels between a layer's matrix products, made by `kernel`."""

    def __init__(self, kernel: NewKernel) -> None:
        self._new = kernel
        self._no_scales = mx.zeros(1)
        self._embed = self._made("embed", ["tokens", "table", "scales", "biases"], ["out"], _EMBED)
        self._cos_sin = kernel("cos_sin", ["positions", "inv_freq"], ["out"], _COS_SIN)
        self._qk_scales = self._made("qk_scales", ["qkv"], ["out"], _QK_SCALES)
        self._activate = self._made("activate", ["x"], ["out"], _ACTIVATE)
        self._rotations: dict[bool, CudaKernel] = {}
        self._add_norms: dict[tuple[str, ...], CudaKernel] = {}

    def _made(self, name: str, inputs: list[str], outputs: list[str], text: str) -> CudaKernel:
        return self._new(name, inputs, outputs, text, files=["device/numbers.cuh"])

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

    def cos_sin(self, positions: Any, inv_freq: Any, scale: float = 1.0) -> Any:
        """Cosines and sines (T, R / 2, 2), float32, of `positions` (T,) times `inv_freq` (R / 2,) radians, times
        `scale`."""
        shape = (positions.shape[0], inv_freq.shape[0], 2)
        return self._cos_sin(
            [positions, inv_freq],
            [("SCALE", bits_of(scale))],
            blocks=(-(-shape[0] * shape[1] // 128), 1),
            threads=128,
            shapes=[shape],
            dtypes=[mx.float32],
        )[0]

    def rotate(
        self,
        qkv: Any,
        norms: HeadNorms,
        cos_sin: Any | None,
        slots: Any,
        pool: Pool,
        heads: Heads,
        *,
        interleaved: bool = False,
    ) -> Any:
        """Queries (T, query heads, 1, D) out of `qkv` (T, stored heads * D): normalized, and their first R dimensions
        rotated by `cos_sin` (T, R / 2, 2), or not (None). Keys likewise; they and the values are written to `slots` of
        `pool`, those at -1 nowhere. Dimensions are rotated with those R / 2 further on, or, `interleaved`, with the
        next ones."""
        count = qkv.shape[0] * (heads.queries + 2 * heads.kv)
        weights = (qkv, qkv) if norms.queries is None else (norms.queries, norms.keys)
        rotation = qkv if cos_sin is None else cos_sin
        whole = norms.whole and norms.queries is not None
        scales = [self.qk_scales(qkv, norms.eps, heads)] if whole else []
        kv_scales = self._no_scales if pool.scales is None else pool.scales
        return self._rotate(whole)(
            [qkv, *weights, rotation, slots, pool.data, kv_scales, *scales],
            [
                ("T", qkv.dtype),
                ("S", pool.data.dtype),
                ("D", heads.dim),
                ("HQ", heads.queries),
                ("HKV", heads.kv),
                ("PAGE", heads.page),
                ("SHARED", heads.shared),
                ("NORM", 0 if norms.queries is None else 2 if whole else 1),
                ("VALUE_NORM", norms.values),
                ("EPS", bits_of(norms.eps)),
                ("ROTATED", 0 if cos_sin is None else 2 * cos_sin.shape[1]),
                ("INTERLEAVED", interleaved),
            ],
            blocks=(-(-count // 4), 1),
            threads=128,
            shapes=[(qkv.shape[0], heads.queries, 1, heads.dim)],
            dtypes=[qkv.dtype],
        )[0]

    def _rotate(self, whole: bool) -> CudaKernel:
        if whole not in self._rotations:
            names = ["qkv", "q_norm", "k_norm", "cos_sin", "slots", "pool", "kv_scales", *(["scales"] if whole else [])]
            text = _ROTATE.replace("SCALES_OF", "scales" if whole else "turns")
            self._rotations[whole] = self._made("rotate", names, ["q"], text)
        return self._rotations[whole]

    def qk_scales(self, qkv: Any, eps: float, heads: Heads) -> Any:
        """Factors (T, 2), float32, that normalize all queries of a token together, and all keys."""
        return self._qk_scales(
            [qkv],
            [("T", qkv.dtype), ("D", heads.dim), ("HQ", heads.queries), ("HKV", heads.kv), ("EPS", bits_of(eps))],
            blocks=(qkv.shape[0], 2),
            threads=128,
            shapes=[(qkv.shape[0], 2)],
            dtypes=[mx.float32],
        )[0]

    def add_norm(
        self, x: Any, r: Any, norm: Norm | None, residual: Residual = _ADDED, other: Any | None = None
    ) -> tuple[Any, Any]:
        """`x` plus the branch `r` (T, W), or the sum of `r` and `other`, as `residual` says; and this sum by `norm`, or
        as it is (None)."""
        if x.shape[1] % 8 or not all(one is None or one.known for one in (norm, residual.post)):
            return _added_by_mlx(x, r, norm, residual, other)
        post = residual.post
        names, inputs = ["x", "r"], [x, r]
        for name, array in (
            ("other", other),
            ("post_weight", post and post.weight),
            ("post_bias", post and post.bias),
            ("weight", norm and norm.weight),
            ("bias", norm and norm.bias),
        ):
            if array is not None:
                names.append(name)
                inputs.append(array)
        threads = min(512, -(-x.shape[1] // 256) * 32)
        outputs = 1 if norm is None else 2
        made = self._add_norm(tuple(names))(
            inputs,
            [
                ("T", x.dtype),
                ("WIDTH", x.shape[1]),
                ("THREADS", threads),
                ("PARALLEL", other is not None),
                ("SCALED", residual.multiplier != 1),
                ("MULTIPLIER", bits_of(residual.multiplier)),
                ("CLIPPED", residual.clipped and x.dtype == mx.float16),
                ("RESCALED", residual.output != 1),
                ("OUTPUT", bits_of(residual.output)),
                *_template(post, "POST", "POST_EPS", "POST_BIASED"),
                *_template(norm, "NORM", "EPS", "BIASED"),
            ],
            blocks=(x.shape[0], 1),
            threads=threads,
            shapes=[x.shape] * outputs,
            dtypes=[x.dtype] * outputs,
        )
        return made[0], made[-1]

    def _add_norm(self, names: tuple[str, ...]) -> CudaKernel:
        """The kernel with inputs of such `names`: in its text, `x` stands for those that are not there."""
        if names not in self._add_norms:
            text = _ADD_NORM
            for name in ("post_weight", "post_bias", "weight", "bias", "other"):
                text = re.sub(rf"\b{name.upper()}\b", name if name in names else "x", text)
            outputs = ["h", "y"] if "weight" in names else ["h"]
            text = re.sub(r"\bY\b", outputs[-1], text)
            self._add_norms[names] = self._made("add_norm", list(names), outputs, text)
        return self._add_norms[names]

    def activate(self, x: Any, activation: Activation, *, gated: bool = True) -> Any:
        """`activation` of `x` (T, W); or, `gated`, that of the gate times up (T, W), for `x` (T, 2 W) with gate before
        up. W is a multiple of 8."""
        rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
        return self._activate(
            [x],
            [("T", x.dtype), ("WIDTH", width), ("ACTIVATION", int(activation)), ("GATED", gated)],
            blocks=(-(-rows * width // 8 // 256), 1),
            threads=256,
            shapes=[(rows, width)],
            dtypes=[x.dtype],
        )[0]


def _template(norm: Norm | None, kind: str, eps: str, biased: str) -> list[tuple[str, Any]]:
    if norm is None:
        return [(kind, 0), (eps, 0), (biased, False)]
    return [(kind, 2 if norm.centered else 1), (eps, bits_of(norm.eps)), (biased, norm.bias is not None)]


def _added_by_mlx(x: Any, r: Any, norm: Norm | None, residual: Residual, other: Any | None) -> tuple[Any, Any]:
    r = r if other is None else r + other
    r = r if residual.multiplier == 1 else r * residual.multiplier
    h = x + (r if residual.post is None else residual.post(r))
    h = mx.clip(h, -_LARGEST, _LARGEST) if residual.clipped and h.dtype == mx.float16 else h
    h = h if residual.output == 1 else h * residual.output
    return h, h if norm is None else norm(h)
