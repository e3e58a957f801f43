// Linear recurrences over ragged segments. A head's state S has ROWS rows (of values) of D numbers (of keys), and a token
// with key k, query q and value v makes of it
//
//   S = S * decay + u k^T,  y = S q,   u = (v - (S * decay) k) * beta  by the delta rule (DELTA, VECTOR),
//                                      u = v * step                    in a state space model (SELECTIVE, CHANNEL),
//                                      u = v                           in lightning attention (CONSTANT).
//
// With NORMALIZED, queries and keys are first divided by their root mean squares; the factors are applied to sums.
//
// A row belongs to LANES lanes of a warp, which keep it in registers for all tokens of a segment. A block stages BLOCK
// tokens in shared memory while it computes those before them.

namespace treadle::recurrent {

// `SlotSegment`: the state after `count` tokens goes to slot `target`, that after `split` to `aside`; to none below 0.
struct Segment {
  int first, count, source, target, split, aside;
};

enum Kind { DELTA, VECTOR, SELECTIVE, CHANNEL, CONSTANT };

__device__ inline float real(float v) { return v; }
__device__ inline float real(__nv_bfloat16 v) { return wide(v); }
__device__ inline float real(__half v) { return wide(v); }
__device__ inline void put(float* to, float v) { *to = v; }
__device__ inline void put(__nv_bfloat16* to, float v) { *to = narrow(v, __nv_bfloat16()); }
__device__ inline void put(__half* to, float v) { *to = narrow(v, __half()); }

__device__ inline float softplus(float v) { return v > 20.0f ? v : log1pf(expf(v)); }
__device__ inline float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

// An array (tokens, 1, heads, elements) with strides.
template <typename T>
struct View {
  const T* data;
  long long token, head, element;
  __device__ T raw(int t, int h, int e) const { return data[t * token + h * head + e * element]; }
  __device__ float at(int t, int h, int e) const { return real(raw(t, h, e)); }
};

template <typename T, typename S>
__device__ inline View<T> heads(const T* data, const S& strides) {
  return {data, strides[0], strides[2], strides[3]};
}

// An array (tokens, 1, heads).
template <typename T, typename S>
__device__ inline View<T> scalars(const T* data, const S& strides) {
  return {data, strides[0], strides[2], 0};
}

// What the gates of a token are made of. `steps` (tokens, 1, heads[, D or ROWS]), `betas` (tokens, 1, heads);
// `logs`, `biases` and `skips` by head, or by head and element.
template <typename A, typename B, typename L, typename O, typename K>
struct Gates {
  View<A> steps;
  View<B> betas;
  const L* logs;
  const O* biases;
  const K* skips;
  float low, high;         // limits of a step; the largest beta
  bool bounded;            // the decay is exp(-low * sigmoid(..))
  float query_scale, key_scale, epsilon;
};

template <typename G>
__device__ inline float delta_decay(const G& gates, float step, int log, int bias) {
  const float x = step + real(gates.biases[bias]), rate = expf(real(gates.logs[log]));
  return gates.bounded ? expf(-gates.low * sigmoid(rate * x)) : expf(-rate * softplus(x));
}

template <Kind KIND, bool NORMALIZED, int D, int ROWS, int HEADS, int GROUPS, int LANES, int WARPS, int BLOCK, typename Q, typename V,
          typename G, typename S, typename T>
__device__ inline void scan(const View<Q>& queries, const View<Q>& keys, const View<V>& values, const G& gates,
                            const int* segments, S* states, T* out) {
  constexpr int THREADS = WARPS * 32, EACH = D / LANES, PARTS = EACH / 4, OWN = THREADS / LANES;
  constexpr int TILES = (ROWS + OWN - 1) / OWN;
  constexpr int HELD = (BLOCK * D + THREADS - 1) / THREADS, VALUES = (BLOCK * OWN + THREADS - 1) / THREADS;
  constexpr bool VECTORS = KIND == VECTOR, CHANNELS = KIND == CHANNEL;
  static_assert(D % (4 * LANES) == 0 && BLOCK <= THREADS, "");
  constexpr int FOURS = D / 4;
  __shared__ float4 key[2][BLOCK][FOURS];
  __shared__ float4 query[2][BLOCK][FOURS];
  __shared__ float4 decays[2][BLOCK][VECTORS ? FOURS : 1];
  __shared__ float value[2][BLOCK][OWN];
  __shared__ float gain[2][BLOCK][CHANNELS ? OWN : 1];
  __shared__ float decay[2][BLOCK];
  __shared__ float query_factor[2][BLOCK];
  __shared__ float key_factor[2][BLOCK];

  const int tile = blockIdx.x % TILES, head = blockIdx.y, thread = threadIdx.x;
  const Segment segment = reinterpret_cast<const Segment*>(segments)[blockIdx.x / TILES];
  const int first = segment.first, count = segment.count, source = segment.source;
  if (count <= 0) return;
  const int part = thread % LANES, local = thread / LANES, row = tile * OWN + local;
  if (source < -1) {  // padding
    for (int t = part; t < count && row < ROWS; t += LANES) put(out + (size_t(first + t) * HEADS + head) * ROWS + row, 0.0f);
    return;
  }
  const int group = head / (HEADS / GROUPS);
  const bool inside = row < ROWS;

  float state[EACH];
  float rates[CHANNELS ? EACH : 1];
  const size_t line = (size_t(head) * ROWS + row) * D, each = size_t(HEADS) * ROWS * D;
#pragma unroll
  for (int c = 0; c < PARTS; ++c) {
    Several<S, 4> four;
    const bool there = inside && source >= 0;
    if (there) four = several<4>(states + source * each + line + (c * LANES + part) * 4);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      state[c * 4 + e] = there ? real(four.of[e]) : 0.0f;
      if constexpr (CHANNELS)
        rates[c * 4 + e] = inside ? -expf(real(gates.logs[row * D + (c * LANES + part) * 4 + e])) : 0.0f;
    }
  }
  float skip = 0.0f;
  if constexpr (KIND == SELECTIVE) skip = real(gates.skips[head]);

  Q held_keys[HELD], held_queries[HELD];
  V held_values[VALUES];
  float held_steps[VECTORS ? HELD : CHANNELS ? VALUES : 1], held_beta = 0.0f;

  const auto load = [&](int begin) {
    const int some = min(BLOCK, count - begin), from = first + begin;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const int at = i * THREADS + thread, t = at / D, d = at % D;
      if (t >= some) continue;
      held_keys[i] = keys.raw(from + t, group, d);
      held_queries[i] = queries.raw(from + t, group, d);
      if constexpr (VECTORS) held_steps[i] = gates.steps.at(from + t, head, d);
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const int at = i * THREADS + thread, t = at / OWN, r = tile * OWN + at % OWN;
      if (t >= some || r >= ROWS) continue;
      held_values[i] = values.raw(from + t, head, r);
      if constexpr (CHANNELS) held_steps[i] = gates.steps.at(from + t, r, 0);
    }
    if (thread >= some) return;
    if constexpr (KIND == DELTA || KIND == SELECTIVE) held_steps[0] = gates.steps.at(from + thread, head, 0);
    if constexpr (KIND == DELTA || VECTORS) held_beta = gates.betas.at(from + thread, head, 0);
  };
  const auto store = [&](int buffer, int some) {
    float* const own_keys = reinterpret_cast<float*>(key[buffer]);
    float* const own_queries = reinterpret_cast<float*>(query[buffer]);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const int at = i * THREADS + thread, d = at % D;
      if (at / D >= some) continue;
      own_keys[at] = real(held_keys[i]);
      own_queries[at] = real(held_queries[i]);
      if constexpr (VECTORS)
        reinterpret_cast<float*>(decays[buffer])[at] = delta_decay(gates, held_steps[i], head, head * D + d);
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const int at = i * THREADS + thread, t = at / OWN, r = at % OWN;
      if (t >= some || tile * OWN + r >= ROWS) continue;
      value[buffer][t][r] = real(held_values[i]);
      if constexpr (CHANNELS) gain[buffer][t][r] = held_steps[i];
    }
    if (thread >= some) return;
    if constexpr (KIND == DELTA) decay[buffer][thread] = delta_decay(gates, held_steps[0], head, head);
    if constexpr (KIND == DELTA || VECTORS) gain[buffer][thread][0] = gates.high * sigmoid(held_beta);
    if constexpr (KIND == SELECTIVE) {
      const float step = fminf(fmaxf(softplus(held_steps[0] + real(gates.biases[head])), gates.low), gates.high);
      gain[buffer][thread][0] = step;
      decay[buffer][thread] = expf(-expf(real(gates.logs[head])) * step);
    }
    if constexpr (KIND == CONSTANT) {
      gain[buffer][thread][0] = 1.0f;
      decay[buffer][thread] = expf(real(gates.logs[head]));
    }
  };

  const auto normalize = [&](int buffer, int some) {
    for (int t = thread / 32; t < some; t += WARPS) {
      float squares[2] = {};
      for (int d = thread % 32; d < D; d += 32) {
        const float q = reinterpret_cast<const float*>(query[buffer][t])[d];
        const float k = reinterpret_cast<const float*>(key[buffer][t])[d];
        squares[0] += q * q;
        squares[1] += k * k;
      }
      for (int i = 16; i; i /= 2) {
        squares[0] += __shfl_xor_sync(~0u, squares[0], i);
        squares[1] += __shfl_xor_sync(~0u, squares[1], i);
      }
      if (thread % 32 == 0) {
        query_factor[buffer][t] = gates.query_scale * rsqrtf(squares[0] / D + gates.epsilon);
        key_factor[buffer][t] = gates.key_scale * rsqrtf(squares[1] / D + gates.epsilon);
      }
    }
  };

  const auto keep = [&](int slot) {
    if (!inside || slot < 0) return;
#pragma unroll
    for (int c = 0; c < PARTS; ++c) {
      Several<S, 4> four;
#pragma unroll
      for (int e = 0; e < 4; ++e) put(&four.of[e], state[c * 4 + e]);
      *reinterpret_cast<Several<S, 4>*>(states + slot * each + line + (c * LANES + part) * 4) = four;
    }
  };

  load(0);
  for (int begin = 0, buffer = 0; begin < count; begin += BLOCK, buffer ^= 1) {
    const int some = min(BLOCK, count - begin);
    store(buffer, some);
    __syncthreads();
    if (begin + BLOCK < count) load(begin + BLOCK);
    if constexpr (NORMALIZED) {
      normalize(buffer, some);
      __syncthreads();
    }
    for (int t = 0; t < some; ++t) {
      const float v = inside ? value[buffer][t][local] : 0.0f;
      const float beta = inside ? gain[buffer][t][CHANNELS ? local : 0] : 0.0f;
      const float of_query = NORMALIZED ? query_factor[buffer][t] : gates.query_scale;
      const float of_key = NORMALIZED ? key_factor[buffer][t] : 1.0f;
      float k[EACH], sum = 0.0f;
#pragma unroll
      for (int c = 0; c < PARTS; ++c) {
        const float4 four = key[buffer][t][c * LANES + part];
        k[c * 4] = four.x, k[c * 4 + 1] = four.y, k[c * 4 + 2] = four.z, k[c * 4 + 3] = four.w;
        if constexpr (VECTORS) {
          const float4 of = decays[buffer][t][c * LANES + part];
          state[c * 4] *= of.x, state[c * 4 + 1] *= of.y, state[c * 4 + 2] *= of.z, state[c * 4 + 3] *= of.w;
        }
      }
      if constexpr (!VECTORS) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) state[i] *= CHANNELS ? __expf(beta * rates[CHANNELS ? i : 0]) : decay[buffer][t];
      }
      float update = v * beta;
      if constexpr (KIND == DELTA || VECTORS) {
        float sums[4] = {};
#pragma unroll
        for (int i = 0; i < EACH; ++i) sums[i % 4] += state[i] * k[i];
        sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
        for (int i = 1; i < LANES; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
        update = (v - sum * of_key) * beta;
      }
      update *= of_key;
      float sums[4] = {};
#pragma unroll
      for (int c = 0; c < PARTS; ++c) {
        const float4 q = query[buffer][t][c * LANES + part];
#pragma unroll
        for (int e = 0; e < 4; ++e) state[c * 4 + e] += k[c * 4 + e] * update;
        sums[0] += state[c * 4] * q.x;
        sums[1] += state[c * 4 + 1] * q.y;
        sums[2] += state[c * 4 + 2] * q.z;
        sums[3] += state[c * 4 + 3] * q.w;
      }
      float y = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
      for (int i = 1; i < LANES; i *= 2) y += __shfl_xor_sync(~0u, y, i);
      if (part == 0 && inside) put(out + (size_t(first + begin + t) * HEADS + head) * ROWS + row, y * of_query + skip * v);
      if (begin + t + 1 == segment.split) keep(segment.aside);
    }
  }
  keep(segment.target);
}

}  // namespace treadle::recurrent
