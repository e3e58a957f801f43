// What stands between products, recurrences and attention: gates and norms of heads, and latents on their way to pages.

namespace treadle {

// A warp's head of y (tokens, HEADS, D): normalized if NORM, times the gate's SiLU, in float32, or its sigmoid. The gate's
// first number is in column places[head] of `gates` (tokens, width).
template <int HEADS, int D, bool NORM, bool SILU, typename T>
__device__ inline void gate_heads(const T* y, const T* weight, const T* gates, const int* places, T* out, int tokens, int width,
                                  float epsilon) {
  constexpr int EACH = (D + 31) / 32;
  const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = warp / HEADS, head = warp % HEADS;
  if (token >= tokens) return;
  const T *from = y + size_t(warp) * D, *gate = gates + size_t(token) * width + places[head];
  float v[EACH], sum = 0.0f;
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    v[e] = lane + 32 * e < D ? wide(from[lane + 32 * e]) : 0.0f;
    sum += v[e] * v[e];
  }
  if (NORM) {
    for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    const float scale = rsqrtf(sum / D + epsilon);
#pragma unroll
    for (int e = 0; e < EACH; ++e)
      if (lane + 32 * e < D) v[e] = rounded<T>(rounded<T>(v[e] * scale) * wide(weight[lane + 32 * e]));
  }
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    if (lane + 32 * e >= D) continue;
    const float g = wide(gate[lane + 32 * e]), share = 1.0f / (1.0f + __expf(-g));
    out[size_t(warp) * D + lane + 32 * e] = narrow(v[e] * (SILU ? g * share : rounded<T>(share)), T());
  }
}

// The two dimensions of pair `i` of R.
template <int R, bool INTERLEAVED>
__device__ inline int first_of(int i) { return INTERLEAVED ? 2 * i : i; }
template <int R, bool INTERLEAVED>
__device__ inline int second_of(int i) { return INTERLEAVED ? 2 * i + 1 : i + R / 2; }

// A block's token of x (tokens, width): blocks of y = 0 normalize its latent, of LATENT numbers from column FIRST on, and put
// it into pages, with the R numbers behind it, rotated if ROTATED. Others normalize its first QUERIES numbers.
template <int QUERIES, int FIRST, int LATENT, int R, bool ROTATED, bool INTERLEAVED, int WARPS, typename T>
__device__ inline void put_latents(const T* x, const T* query_weight, const T* weight, const float* cos_sin, const int* slots, T* pool,
                                   T* queries, int width, float query_epsilon, float epsilon) {
  __shared__ float sums[WARPS];
  const int token = blockIdx.x, step = WARPS * 32;
  const bool latent = blockIdx.y == 0;
  const int slot = slots[token];
  if (latent && slot < 0) return;
  const T *row = x + size_t(token) * width, *from = latent ? row + FIRST : row, *weights = latent ? weight : query_weight;
  const int count = latent ? LATENT : QUERIES;
  T* to = latent ? pool + size_t(slot) * (LATENT + R) : queries + size_t(token) * QUERIES;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < count; i += step) sum += wide(from[i]) * wide(from[i]);
  for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int i = 0; i < WARPS; ++i) sum += sums[i];
  const float scale = rsqrtf(sum / count + (latent ? epsilon : query_epsilon));
  for (int i = threadIdx.x; i < count; i += step) to[i] = narrow(rounded<T>(wide(from[i]) * scale) * wide(weights[i]), T());
  if (!latent) return;
  for (int i = threadIdx.x; i < R / 2; i += step) {
    const int a = first_of<R, INTERLEAVED>(i), b = second_of<R, INTERLEAVED>(i);
    const float low = wide(from[LATENT + a]), high = wide(from[LATENT + b]);
    const float cosine = ROTATED ? cos_sin[(size_t(token) * (R / 2) + i) * 2] : 1.0f;
    const float sine = ROTATED ? cos_sin[(size_t(token) * (R / 2) + i) * 2 + 1] : 0.0f;
    to[LATENT + a] = narrow(low * cosine - high * sine, T());
    to[LATENT + b] = narrow(low * sine + high * cosine, T());
  }
}

// The R numbers of each head of x (tokens, width), head h's from column FIRST + h * STEP on, rotated and times `scale`: (tokens,
// HEADS, R). Of `blocks` blocks this is number `block`.
template <int HEADS, int FIRST, int STEP, int R, bool ROTATED, bool INTERLEAVED, typename T>
__device__ inline void rotate_heads(const T* x, const float* cos_sin, T* out, int tokens, int width, float scale, int block, int blocks) {
  constexpr int HALF = R / 2;
  for (int i = block * blockDim.x + threadIdx.x; i < tokens * HEADS * HALF; i += blocks * blockDim.x) {
    const int pair = i % HALF, head = i / HALF % HEADS, token = i / (HALF * HEADS);
    const int a = first_of<R, INTERLEAVED>(pair), b = second_of<R, INTERLEAVED>(pair);
    const T* from = x + size_t(token) * width + FIRST + head * STEP;
    const float low = wide(from[a]), high = wide(from[b]);
    const float cosine = ROTATED ? cos_sin[(size_t(token) * HALF + pair) * 2] : 1.0f;
    const float sine = ROTATED ? cos_sin[(size_t(token) * HALF + pair) * 2 + 1] : 0.0f;
    T* to = out + size_t(i / HALF) * R;
    to[a] = narrow(rounded<T>(low * cosine - high * sine) * scale, T());
    to[b] = narrow(rounded<T>(low * sine + high * cosine) * scale, T());
  }
}

}  // namespace treadle
