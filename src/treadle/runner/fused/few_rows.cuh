// y = x W^T for few rows of x (8 MT at most): the weights stream from memory to the tensor cores once, in 16-byte pieces,
// and a long row of them is shared among several blocks, so that a small matrix too keeps the whole device busy. Weights are
// T, or 8 or 4 bits packed along K as MLX's affine quantization has them (w = scale * q + bias, per GROUP).
//
// A block has 64 rows of W, 16 for each of four warps, and a range of K. x comes through shared memory, KB columns at a
// time. As in the attention kernels the order of K is dealt to the threads so that what a thread loads is a fragment.
// Quantized weights enter as whole numbers (plus OFFSET, which costs one instruction to make); scale and bias
// are applied to a group's sum, the bias by way of the sum of x over the group.

namespace treadle {

__device__ inline void mma(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
                           __nv_bfloat16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline void mma(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
                           __half) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline __nv_bfloat16 narrowed(float value, __nv_bfloat16) { return __float2bfloat16(value); }
__device__ inline __half narrowed(float value, __half) { return __float2half(value); }
__device__ inline float2 widened(unsigned two, __nv_bfloat16) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&two));
}
__device__ inline float2 widened(unsigned two, __half) { return __half22float2(*reinterpret_cast<__half2*>(&two)); }
__device__ inline float widened(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float widened(__half value) { return __half2float(value); }

// Two whole numbers out of four 4-bit ones that are 16 bits apart, plus OFFSET.
__device__ inline unsigned two_of_4(unsigned word, int i, __nv_bfloat16) { return ((word >> 4 * i) & 0x000f000f) | 0x43004300; }
__device__ inline unsigned two_of_4(unsigned word, int i, __half) { return ((word >> 4 * i) & 0x000f000f) | 0x64006400; }

// Bytes 2 i and 2 i + 1 of a word, plus OFFSET.
__device__ inline unsigned two_of_8(unsigned word, int i, __nv_bfloat16) {
  const float low = __uint_as_float(__byte_perm(word, 0x4b000000, i ? 0x7542 : 0x7540)) - 8388608.0f;
  const float high = __uint_as_float(__byte_perm(word, 0x4b000000, i ? 0x7543 : 0x7541)) - 8388608.0f;
  __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<unsigned*>(&both);
}
__device__ inline unsigned two_of_8(unsigned word, int i, __half) {
  return __byte_perm(word, 0x64646464, i ? 0x4342 : 0x4140);
}

template <int BITS>
__device__ inline float offset_of(__nv_bfloat16) { return BITS == 4 ? 128.0f : 0.0f; }
template <int BITS>
__device__ inline float offset_of(__half) { return 1024.0f; }

// Where the 16-byte piece `chunk` of row m of x is kept, so that eight threads never meet in a bank.
template <int BITS>
__device__ inline int swapped(int chunk, int m) {
  if (BITS == 16) return chunk ^ ((m & 1) << 2);
  return chunk ^ (m & 1) ^ ((chunk >> 3 & 1) << 0);
}

template <typename T, int MT, int BITS, int GROUP, int KB>
__device__ inline void few_rows(const T* x, const unsigned* weight, const T* scales, const T* biases, T* out, float* partial,
                                int* counters, int M, int N, int K, int splits) {
  constexpr int THREADS = 128, CHUNKS = KB / 8, ROWS = MT * 8;
  constexpr int STAGED = (ROWS * CHUNKS + THREADS - 1) / THREADS;
  constexpr int BLOCK = BITS == 16 ? 32 : 64;               // columns that four threads' pieces of a row cover
  constexpr int WORDS = BITS == 16 ? 4 : BITS == 8 ? 4 : 2;  // of 32 bits, in such a piece
  constexpr int PIECES = KB / BLOCK, GROUPS = BITS == 16 ? 1 : KB / GROUP;
  extern __shared__ __align__(16) unsigned char memory[];
  uint4* staged = reinterpret_cast<uint4*>(memory);                             // [2][ROWS][CHUNKS]
  float* sums = reinterpret_cast<float*>(memory + 2 * ROWS * CHUNKS * 16);      // [2][GROUPS][ROWS]
  __shared__ int flag;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int n0 = blockIdx.x * 64 + warp * 16 + g, n1 = n0 + 8;
  const T kind = T();
  const int stages = K / KB, each = (stages + splits - 1) / splits;
  const int first = blockIdx.y * each, last = min(stages, first + each);
  const size_t line = size_t(K) * BITS / 32;  // words of a row
  const unsigned *w0 = weight + size_t(min(n0, N - 1)) * line, *w1 = weight + size_t(min(n1, N - 1)) * line;

  uint4 coming[STAGED];
  auto load_x = [&](int stage) {
#pragma unroll
    for (int i = 0; i < STAGED; ++i) {
      const int at = i * THREADS + threadIdx.x, m = at / CHUNKS, chunk = at % CHUNKS;
      coming[i] = make_uint4(0, 0, 0, 0);
      if (m < M && at < ROWS * CHUNKS)
        coming[i] = *reinterpret_cast<const uint4*>(x + size_t(m) * K + stage * KB + chunk * 8);
    }
  };
  auto keep_x = [&](int buffer) {
#pragma unroll
    for (int i = 0; i < STAGED; ++i) {
      const int at = i * THREADS + threadIdx.x, m = at / CHUNKS, chunk = at % CHUNKS;
      uint4 four = coming[i];
      if (BITS != 16) {
        const float2 a = widened(four.x, kind), b = widened(four.y, kind), c = widened(four.z, kind), d = widened(four.w, kind);
        float sum = a.x + a.y + b.x + b.y + c.x + c.y + d.x + d.y;
#pragma unroll
        for (int step = 1; step < GROUP / 8; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (at < ROWS * CHUNKS && chunk % (GROUP / 8) == 0) sums[(buffer * GROUPS + chunk / (GROUP / 8)) * ROWS + m] = sum;
      }
      if (BITS == 4)
        four = make_uint4(__byte_perm(four.x, four.z, 0x5410), __byte_perm(four.x, four.z, 0x7632),
                          __byte_perm(four.y, four.w, 0x5410), __byte_perm(four.y, four.w, 0x7632));
      if (at < ROWS * CHUNKS) staged[(buffer * ROWS + m) * CHUNKS + swapped<BITS>(chunk, m)] = four;
    }
  };
  constexpr int PER_LINE = BITS == 16 ? 1 : GROUPS;
  T next_scale[2][PER_LINE], next_bias[2][PER_LINE];
  auto load_scales = [&](int stage) {
    struct alignas(2 * PER_LINE) Line { T of[PER_LINE]; };
    const size_t line = K / GROUP, at = size_t(stage) * GROUPS;
    auto get = [&](const T* from, int n) { return *reinterpret_cast<const Line*>(from + min(n, N - 1) * line + at); };
    const Line s0 = get(scales, n0), s1 = get(scales, n1), b0 = get(biases, n0), b1 = get(biases, n1);
#pragma unroll
    for (int i = 0; i < PER_LINE; ++i) {
      next_scale[0][i] = s0.of[i];
      next_scale[1][i] = s1.of[i];
      next_bias[0][i] = b0.of[i];
      next_bias[1][i] = b1.of[i];
    }
  };
  unsigned next[2][PIECES][WORDS];
  auto load_weights = [&](int stage) {
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
      const size_t at = (size_t(stage) * KB + p * BLOCK) * BITS / 32 + t * WORDS;
      if (WORDS == 4) {
        *reinterpret_cast<uint4*>(next[0][p]) = __ldcs(reinterpret_cast<const uint4*>(w0 + at));
        *reinterpret_cast<uint4*>(next[1][p]) = __ldcs(reinterpret_cast<const uint4*>(w1 + at));
      } else {
        *reinterpret_cast<uint2*>(next[0][p]) = __ldcs(reinterpret_cast<const uint2*>(w0 + at));
        *reinterpret_cast<uint2*>(next[1][p]) = __ldcs(reinterpret_cast<const uint2*>(w1 + at));
      }
    }
  };

  float sum[MT][4];
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[i][e] = 0.0f;
  if (first < last) {
    load_weights(first);
    if (BITS != 16) load_scales(first);
    load_x(first);
    keep_x(0);
  }
  __syncthreads();
  for (int stage = first; stage < last; ++stage) {
    const int buffer = (stage - first) & 1;
    unsigned w[2][PIECES][WORDS];
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int p = 0; p < PIECES; ++p)
#pragma unroll
        for (int i = 0; i < WORDS; ++i) w[r][p][i] = next[r][p][i];
    T scale[2][PER_LINE], bias[2][PER_LINE];
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < PER_LINE; ++i) {
        scale[r][i] = next_scale[r][i];
        bias[r][i] = next_bias[r][i];
      }
    if (stage + 1 < last) {
      load_weights(stage + 1);
      if (BITS != 16) load_scales(stage + 1);
      load_x(stage + 1);
    }
    const uint4* rows = staged + size_t(buffer) * ROWS * CHUNKS;
    if (BITS == 16) {
#pragma unroll
      for (int p = 0; p < PIECES; ++p)
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          const int m = i * 8 + g;
          const uint4 b = rows[m * CHUNKS + swapped<BITS>(p * 4 + t, m)];
          mma(sum[i], w[0][p][0], w[1][p][0], w[0][p][1], w[1][p][1], b.x, b.y, kind);
          mma(sum[i], w[0][p][2], w[1][p][2], w[0][p][3], w[1][p][3], b.z, b.w, kind);
        }
    } else {
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        float part[MT][4];
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) part[i][e] = 0.0f;
#pragma unroll
        for (int q = 0; q < GROUP / BLOCK; ++q) {
          const int p = group * (GROUP / BLOCK) + q;
#pragma unroll
          for (int half = 0; half < 2; ++half) {  // 8 columns of each of the four threads
            unsigned a[2][4];
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
              for (int i = 0; i < 4; ++i)
                a[r][i] = BITS == 4 ? two_of_4(w[r][p][half], i, kind)
                                    : two_of_8(w[r][p][(half * 2 + (i >> 1)) % WORDS], i & 1, kind);
#pragma unroll
            for (int i = 0; i < MT; ++i) {
              const int m = i * 8 + g;
              const uint4 b = rows[m * CHUNKS + swapped<BITS>(p * 8 + t * 2 + half, m)];
              mma(part[i], a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y, kind);
              mma(part[i], a[0][2], a[1][2], a[0][3], a[1][3], b.z, b.w, kind);
            }
          }
        }
        const float scale0 = widened(scale[0][group]), scale1 = widened(scale[1][group]);
        const float bias0 = widened(bias[0][group]) - offset_of<BITS>(kind) * scale0;
        const float bias1 = widened(bias[1][group]) - offset_of<BITS>(kind) * scale1;
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          const float2 total = *reinterpret_cast<const float2*>(sums + (buffer * GROUPS + group) * ROWS + i * 8 + 2 * t);
          sum[i][0] += scale0 * part[i][0] + bias0 * total.x;
          sum[i][1] += scale0 * part[i][1] + bias0 * total.y;
          sum[i][2] += scale1 * part[i][2] + bias1 * total.x;
          sum[i][3] += scale1 * part[i][3] + bias1 * total.y;
        }
      }
    }
    if (stage + 1 < last) keep_x(buffer ^ 1);
    __syncthreads();
  }

  auto place = [&](int i, int e) { return size_t(i * 8 + 2 * t + (e & 1)) * N + (e < 2 ? n0 : n1); };
  auto real = [&](int i, int e) { return i * 8 + 2 * t + (e & 1) < M && (e < 2 ? n0 : n1) < N; };
  if (splits == 1) {
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (real(i, e)) out[place(i, e)] = narrowed(sum[i][e], kind);
    return;
  }
  float* mine = partial + size_t(blockIdx.y) * M * N;
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (real(i, e)) __stcg(mine + place(i, e), sum[i][e]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    flag = atomicAdd(counters + blockIdx.x, 1) == splits - 1;
    if (flag) counters[blockIdx.x] = 0;
  }
  __syncthreads();
  if (!flag) return;
  __threadfence();
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (real(i, e)) {
        float total = 0.0f;
        for (int s = 0; s < splits; ++s) total += __ldcg(partial + size_t(s) * M * N + place(i, e));
        out[place(i, e)] = narrowed(total, kind);
      }
}

}  // namespace treadle
