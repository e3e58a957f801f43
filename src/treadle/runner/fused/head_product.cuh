// y[m, h] = W[h] x[m, h] for few rows m, with a weight (N, K) for each head h: plain (BITS 16), or in any of MLX's modes. K is a
// multiple of 64.
//
// A warp makes 16 rows of a head's W; PARTS of a block's four warps share them, each with every PARTS-th unit of 64 columns. W
// and x go from memory to registers: of 64 columns, thread t of four has 16, in both. A row of x stays in its own column of
// every product, and a missing one is another's copy.

namespace treadle {

template <int MODE, int BITS, int GROUP, int ROWS, int HEADS, int K, int FIRST, int STEP, int PARTS, typename T, typename S>
__device__ inline void head_product(const T* x, const unsigned char* weight, const S* scales, const T* biases, T* out, int M, int N,
                                    int width) {
  constexpr int MT = ROWS / 8, WARPS = 4, TILES = WARPS / PARTS;
  constexpr size_t LINE = size_t(K) * BITS / 8;
  __shared__ float4 joint[PARTS > 1 ? WARPS : 1][MT][32];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int part = warp % PARTS, head = blockIdx.y, first_row = (blockIdx.x * TILES + warp / PARTS) * 16;
  const T* own = x + FIRST + head * STEP + t * 16;
  const T kind = T();
  size_t rows[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) rows[h] = size_t(head) * N + min(first_row + h * 8 + g, N - 1);
  float sum[MT][4];
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[i][e] = 0.0f;
#pragma unroll 2
  for (int column = part * 64; column < K; column += PARTS * 64) {
    unsigned a[4][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned char* from = weight + rows[h] * LINE + (column + t * 16) * BITS / 8;
      if constexpr (BITS == 16) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 w = reinterpret_cast<const uint4*>(from)[half];
          a[2 * half][h] = w.x, a[2 * half][h + 2] = w.y;
          a[2 * half + 1][h] = w.z, a[2 * half + 1][h + 2] = w.w;
        }
      } else {
        unsigned words[(BITS + 1) / 2];
        read_codes<BITS>(from, words);
        const size_t at = rows[h] * (K / GROUP) + (column + t * 16) / GROUP;
        float scale = factor<MODE>(scales[at]), bias = 0.0f;
        if constexpr (MODE == AFFINE) bias = wide(biases[at]);
        prepare<MODE, BITS>(scale, bias);
#pragma unroll
        for (int p = 0; p < 8; ++p) a[p / 2][h + p % 2 * 2] = two_of<MODE, BITS>(words, p, scale, bias, kind);
      }
    }
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      const uint4* from = reinterpret_cast<const uint4*>(own + size_t(min(i * 8 + g, M - 1)) * width + column);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 v = from[half];
        if (BITS == 4)
          v = make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                         __byte_perm(v.y, v.w, 0x7632));
        mma(sum[i], a[2 * half][0], a[2 * half][1], a[2 * half][2], a[2 * half][3], v.x, v.y, kind);
        mma(sum[i], a[2 * half + 1][0], a[2 * half + 1][1], a[2 * half + 1][2], a[2 * half + 1][3], v.z, v.w, kind);
      }
    }
  }
  if constexpr (PARTS > 1) {
#pragma unroll
    for (int i = 0; i < MT; ++i)
      if (part > 0) joint[warp][i][lane] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    __syncthreads();
    if (part > 0) return;
#pragma unroll
    for (int other = 1; other < PARTS; ++other)
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        const float4 v = joint[warp + other][i][lane];
        sum[i][0] += v.x, sum[i][1] += v.y, sum[i][2] += v.z, sum[i][3] += v.w;
      }
  }
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int m = i * 8 + 2 * t + (e & 1), n = first_row + (e >> 1) * 8 + g;
      if (m < M && n < N) out[(size_t(m) * HEADS + head) * N + n] = narrow(sum[i][e], kind);
    }
}

}  // namespace treadle
