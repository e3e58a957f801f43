// y = x W^T for few rows of x (M, K) and weights W (N, K) of 2 to 8 bits in any of MLX's modes; K is a multiple of 64.
//
// A block makes TILES tiles of 16 rows of W over all of K, with four warps for each tile: of a stage's 256 columns, each has 64.
// Stages of W and x come to shared memory DEPTH - 1 ahead; a line is 16 bytes longer than its numbers, so that eight lines meet
// in no bank. Weights become numbers of x's type in registers, with scale and bias. The order of K is dealt to the threads so
// that what a thread reads is a fragment of a matrix: of 64 columns, thread t of four has 16. A row of x stays in its own column
// of every product, so whatever is in a missing one harms nothing.

namespace treadle {

// Two floats whose bits are those of 16-bit floats.
__device__ inline void from_halves(unsigned bits, float (&two)[2]) {
  const __half* both = reinterpret_cast<const __half*>(&bits);
  two[0] = __half2float(both[0]), two[1] = __half2float(both[1]);
}

// Number `i` of sixteen, in the highest bits of the mantissa of a float from 1 to 2.
template <int BITS>
__device__ inline float one_and(const unsigned (&words)[(BITS + 1) / 2], int i) {
  const int bit = i * BITS, word = bit / 32, shift = bit % 32;
  unsigned v = words[word] >> shift;
  if (shift + BITS > 32) v |= words[word + 1] << (32 - shift);
  return __uint_as_float(0x3f800000u | (v & ((1u << BITS) - 1)) << (23 - BITS));
}

// Pair `p` of eight out of sixteen weights. Those of 4 bits are pairs of numbers four apart, others are neighbours.
template <int MODE, int BITS, typename T>
__device__ inline unsigned two_of(const unsigned (&words)[(BITS + 1) / 2], int p, float scale, float bias, T kind) {
  float two[2];
  if constexpr (MODE == AFFINE) {
    const int first = BITS == 4 ? p / 4 * 8 + p % 4 : 2 * p, second = BITS == 4 ? first + 4 : first + 1;
    two[0] = fmaf(scale, one_and<BITS>(words, first), bias), two[1] = fmaf(scale, one_and<BITS>(words, second), bias);
    return pack(two[0], two[1], kind);
  } else if constexpr (MODE == MXFP8) {
    const unsigned high = __byte_perm(words[p / 2], 0, p % 2 ? 0x3424 : 0x1404);
    from_halves((high & 0x80008000u) | (high & 0x7f007f00u) >> 1, two);
  } else {
    const unsigned v = words[p / 4] >> 4 * (p % 4);
    from_halves((v << 9 & 0x0e000e00u) | (v << 12 & 0x80008000u), two);
  }
  return pack(two[0] * scale, two[1] * scale, kind);
}

// What the numbers of `two_of` are times, and what is added.
template <int MODE, int BITS>
__device__ inline void prepare(float& scale, float& bias) {
  if constexpr (MODE == AFFINE) {
    scale *= 1 << BITS, bias -= scale;
  } else {
    scale *= MODE == MXFP8 ? 256.0f : 16384.0f;  // the exponents of 16-bit floats are larger by 8, and by 14
  }
}

template <int BITS>
__device__ inline void read_codes(const unsigned char* from, unsigned (&words)[(BITS + 1) / 2]) {
  if constexpr (BITS % 2) {
    const unsigned short* parts = reinterpret_cast<const unsigned short*>(from);
#pragma unroll
    for (int i = 0; i < (BITS + 1) / 2; ++i) words[i] = parts[2 * i] | (2 * i + 1 < BITS ? unsigned(parts[2 * i + 1]) << 16 : 0);
  } else {
#pragma unroll
    for (int i = 0; i < BITS / 2; ++i) words[i] = reinterpret_cast<const unsigned*>(from)[i];
  }
}

template <typename T, typename S, int MODE, int BITS, int GROUP, int ROWS, int TILES, int DEPTH, bool BIASED>
__device__ inline void packed_gemm(const T* x, const unsigned char* weight, const S* scales, const T* biases, const T* added, T* out,
                                   int M, int N, int K) {
  constexpr int MT = ROWS / 8, TILE = 16, STAGE = 256, PARTS = 4, THREADS = TILES * PARTS * 32;
  constexpr int PIECES = 2 * BITS, LINE = (PIECES + 1) * 16, X_PIECES = STAGE / 8, X_LINE = (X_PIECES + 1) * 16;  // lines in bytes
  constexpr int SLOT = TILES * TILE * LINE + ROWS * X_LINE;
  extern __shared__ __align__(16) unsigned char memory[];  // [DEPTH][W, x]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int own = warp / PARTS, part = warp % PARTS, first_row = blockIdx.x * TILES * TILE, stages = (K + STAGE - 1) / STAGE;
  const size_t line = size_t(K) * BITS / 8;
  const T kind = T();

  auto copy = [&](int stage) {
    if (stage < stages) {
      const unsigned to = shared_address(memory) + stage % DEPTH * SLOT;
      for (int i = threadIdx.x; i < TILES * TILE * PIECES; i += THREADS) {
        const size_t at = (size_t(stage) * PIECES + i % PIECES) * 16;
        const int row = i / PIECES;
        if (at < line) fetch(to + row * LINE + i % PIECES * 16, weight + min(first_row + row, N - 1) * line + at, true);
      }
      for (int i = threadIdx.x; i < ROWS * X_PIECES; i += THREADS) {
        const int row = i / X_PIECES, column = stage * STAGE + i % X_PIECES * 8;
        if (row < M && column < K)
          fetch(to + TILES * TILE * LINE + row * X_LINE + i % X_PIECES * 16, x + size_t(row) * K + column, true);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  float next_scale[2] = {0.0f, 0.0f}, next_bias[2] = {0.0f, 0.0f};
  auto read_scales = [&](int stage) {
    const int column = stage * STAGE + part * 64 + t * 16;
    if (column >= K) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(first_row + own * TILE + h * 8 + g, N - 1);
      const size_t at = size_t(row) * (K / GROUP) + column / GROUP;
      next_scale[h] = factor<MODE>(scales[at]);
      if constexpr (MODE == AFFINE) next_bias[h] = wide(biases[at]);
    }
  };

  float sum[MT][4];
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[i][e] = 0.0f;
#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i) copy(i);
  read_scales(0);
  for (int stage = 0; stage < stages; ++stage) {
    asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 2) : "memory");
    __syncthreads();
    copy(stage + DEPTH - 1);
    float scale[2] = {next_scale[0], next_scale[1]}, bias[2] = {next_bias[0], next_bias[1]};
    read_scales(stage + 1);
    if (stage * STAGE + part * 64 >= K) continue;
    const unsigned char* slot = memory + stage % DEPTH * SLOT;
    unsigned a[4][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      unsigned words[(BITS + 1) / 2];
      read_codes<BITS>(slot + (own * TILE + h * 8 + g) * LINE + (part * 4 + t) * 2 * BITS, words);
      prepare<MODE, BITS>(scale[h], bias[h]);
#pragma unroll
      for (int p = 0; p < 8; ++p) a[p / 2][h + p % 2 * 2] = two_of<MODE, BITS>(words, p, scale[h], bias[h], kind);
    }
    const unsigned char* xs = slot + TILES * TILE * LINE + part * 128 + t * 32;
#pragma unroll
    for (int i = 0; i < MT; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 v = *reinterpret_cast<const uint4*>(xs + (i * 8 + g) * X_LINE + half * 16);
        if (BITS == 4)
          v = make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                         __byte_perm(v.y, v.w, 0x7632));
        mma(sum[i], a[2 * half][0], a[2 * half][1], a[2 * half][2], a[2 * half][3], v.x, v.y, kind);
        mma(sum[i], a[2 * half + 1][0], a[2 * half + 1][1], a[2 * half + 1][2], a[2 * half + 1][3], v.z, v.w, kind);
      }
    }
  }

  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  float4* joint = reinterpret_cast<float4*>(memory);  // [PARTS - 1][TILES][MT][lane]
  if (part > 0)
#pragma unroll
    for (int i = 0; i < MT; ++i)
      joint[(((part - 1) * TILES + own) * MT + i) * 32 + lane] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
  __syncthreads();
  if (part > 0) return;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int other = 0; other < PARTS - 1; ++other) {
      const float4 v = joint[((other * TILES + own) * MT + i) * 32 + lane];
      sum[i][0] += v.x, sum[i][1] += v.y, sum[i][2] += v.z, sum[i][3] += v.w;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int m = i * 8 + 2 * t + (e & 1), n = first_row + own * TILE + (e >> 1) * 8 + g;
      if (m < M && n < N) out[size_t(m) * N + n] = narrow(sum[i][e] + (BIASED ? wide(added[n]) : 0.0f), kind);
    }
  }
}

}  // namespace treadle
