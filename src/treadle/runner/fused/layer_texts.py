"""Texts of the kernels between the matrix products of a decoder layer."""

EMBED = """
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
    if (SCALED) {
      T* to = reinterpret_cast<T*>(&eight);
      for (int e = 0; e < 8; ++e) to[e] = narrow(wide(to[e]) * __int_as_float(SCALE), T());
    }
    *reinterpret_cast<uint4*>(out + size_t(blockIdx.x) * WIDTH + i) = eight;
  }
"""

COS_SIN = """
  const int i = blockIdx.x * blockDim.x + threadIdx.x, half = inv_freq_shape[0];
  if (i >= positions_shape[0] * half) return;
  float sine, cosine;
  sincosf(positions[i / half] * inv_freq[i % half], &sine, &cosine);
  out[2 * i] = cosine * __int_as_float(SCALE);
  out[2 * i + 1] = sine * __int_as_float(SCALE);
"""

ROTATE = """
  using namespace treadle;
  constexpr int E = (D + 63) / 64, HALF = ROTATED / 2, ALL = HQ + 2 * HKV;
  constexpr int STORED = HQ * STEP + (SHARED ? 1 : 2) * HKV;
  constexpr bool VECTORS = D % 64 == 0 && (E & (E - 1)) == 0 && ROTATED == D && !INTERLEAVED;
  constexpr int V = VECTORS ? E : 1;
  const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = warp / ALL, head = warp % ALL;
  if (token >= qkv_shape[0]) return;
  const int slot = slots[token];
  if (slot < 0 && head >= HQ) return;
  const int value = head >= HQ + HKV, h = value ? head - HQ - HKV : head - HQ;
  const int place = head < HQ ? head * STEP : HQ * STEP + h + (value && !SHARED ? HKV : 0);
  const T* from = qkv + (size_t(token) * STORED + place) * D;
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

QK_SCALES = """
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

ADD_NORM = """
  using namespace treadle;
  constexpr int PER = 8, STEP = THREADS * PER, TURNS = (WIDTH + STEP - 1) / STEP, WARPS = THREADS / 32;
  constexpr bool WEIGHTS = NORM != 0, BEFORE = POST != 0, ASIDE = OTHER_NORMED;
  __shared__ float sums[6 * WARPS];
  const size_t token = blockIdx.x, row = token * WIDTH;
  float kept[TURNS][PER], aside[ASIDE ? TURNS : 1][PER];
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
  const auto normalize = [&](auto& kept, bool centered, float eps) {
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
  // What is normalized, times a weight.
  const auto weigh = [&](auto& kept, const T* weight) {
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const int at = i * STEP + threadIdx.x * PER;
      if (at >= WIDTH) break;
      const Several<T, PER> eight = several<PER>(weight + at);
      for (int e = 0; e < PER; ++e) kept[i][e] = rounded<T>(kept[i][e] * wide(eight.of[e]));
    }
  };
  // Eight numbers of a branch: of the only line of a token, or of the sum of its experts' lines, weighted by `shares`.
  const auto read = [&](float (&to)[PER], const T* from, const float* shares, int lines, int at) {
    if (lines == 0) {
      const Several<T, PER> eight = several<PER>(from + row + at);
      for (int e = 0; e < PER; ++e) to[e] = wide(eight.of[e]);
      return;
    }
    for (int e = 0; e < PER; ++e) to[e] = 0.0f;
#pragma unroll
    for (int line = 0; line < lines; ++line) {
      const float share = shares[token * lines + line];
      const Several<T, PER> eight = several<PER>(from + (token * lines + line) * WIDTH + at);
      for (int e = 0; e < PER; ++e) to[e] += share * wide(eight.of[e]);
    }
    for (int e = 0; e < PER; ++e) to[e] = rounded<T>(to[e]);
  };
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int at = i * STEP + threadIdx.x * PER;
    if (at >= WIDTH) break;
    before[i] = *reinterpret_cast<const uint4*>(x + row + at);
    if (WEIGHTS) weights[i] = *reinterpret_cast<const uint4*>(WEIGHT + at);
    if (BEFORE) post_weights[i] = *reinterpret_cast<const uint4*>(POST_WEIGHT + at);
    read(kept[i], r, SHARES, LINES, at);
    if (ASIDE) read(aside[i], OTHER, OTHER_SHARES, OTHER_LINES, at);
  }
  if (NORMED) {
    normalize(kept, false, __int_as_float(BRANCH_EPS));
    weigh(kept, BRANCH_WEIGHT);
  }
  if constexpr (ASIDE) {
    normalize(aside, false, __int_as_float(OTHER_EPS));
    weigh(aside, OTHER_WEIGHT);
  }
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int at = i * STEP + threadIdx.x * PER;
    if (at >= WIDTH) break;
    if (PARALLEL) {
      float (&second)[PER] = aside[ASIDE ? i : 0];
      if (!ASIDE) read(second, OTHER, OTHER_SHARES, OTHER_LINES, at);
      for (int e = 0; e < PER; ++e) kept[i][e] = rounded<T>(kept[i][e] + second[e]);
    }
    if (SCALED)
      for (int e = 0; e < PER; ++e) kept[i][e] = rounded<T>(kept[i][e] * __int_as_float(MULTIPLIER));
  }
  if (BEFORE) normalize(kept, POST == 2, __int_as_float(POST_EPS));
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
  normalize(kept, NORM == 2, __int_as_float(EPS));
  const T* const more_weights[] = {MORE_WEIGHTS};
  T* const more_outputs[] = {MORE_OUTPUTS};
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
#pragma unroll
    for (int m = 0; m < MORE; ++m) {
      const Several<T, PER> own = several<PER>(more_weights[m] + at);
      for (int e = 0; e < PER; ++e) eight.of[e] = narrow(kept[i][e] * wide(own.of[e]), T());
      *reinterpret_cast<Several<T, PER>*>(more_outputs[m] + row + at) = eight;
    }
  }
"""

ACTIVATE = """
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
