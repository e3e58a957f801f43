// y = x W^T, plus `added` (N,) if BIASED, for some dozens or hundreds of rows of x (M, K) and plain weights W (N, K); K is a multiple of DEEP.
//
// A block makes a tile of 64 rows and 64 columns of y: STAGES slices of DEEP columns of x and W are in shared memory or on their
// way, and each of four warps multiplies a quarter of the tile. The 16-byte pieces of line r lie at their place ^ (r & 7), so
// that eight lines' pieces never meet in a bank.

namespace treadle {

template <typename T, int STAGES, bool BIASED>
__device__ inline void small_gemm(const T* x, const T* weight, const T* added, T* out, int M, int N, int K) {
  constexpr int SIDE = 64, DEEP = 64, WIDE = DEEP * 2, PIECES = DEEP / 8, THREADS = 128;  // WIDE: bytes of a line
  constexpr int SLICE = 2 * SIDE * WIDE, STEP = THREADS / PIECES;
  extern __shared__ __align__(1024) unsigned char memory[];  // [STAGES][x, W][SIDE][DEEP]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int row0 = blockIdx.x * SIDE, column0 = blockIdx.y * SIDE, slices = K / DEEP;
  const unsigned start = shared_address(memory);

  const int line = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;  // of what this thread copies, every STEP lines
  const unsigned own = start + line * WIDE + ((piece ^ (line & 7)) << 4);
  auto stage = [&](int slice) {
    if (slice < slices) {
      const unsigned to = own + slice % STAGES * SLICE;
      const size_t at = size_t(slice) * DEEP + piece * 8;
#pragma unroll
      for (int r = 0; r < SIDE; r += STEP) {
        const int row = row0 + line + r, column = column0 + line + r;
        fetch(to + r * WIDE, x + size_t(min(row, M - 1)) * K + at, row < M);
        fetch(to + (SIDE + r) * WIDE, weight + size_t(min(column, N - 1)) * K + at, column < N);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  const int low = lane & 7, second = (lane >> 3) & 1, third = lane >> 4;
  const unsigned rows = start + (warp / 2 * 32 + low + second * 8) * WIDE + ((third ^ low) << 4);
  const unsigned columns = start + (SIDE + warp % 2 * 32 + low + third * 8) * WIDE + ((second ^ low) << 4);
  float sum[2][4][4];
#pragma unroll
  for (int f = 0; f < 2; ++f)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[f][n][e] = 0.0f;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) stage(i);
  for (int slice = 0; slice < slices; ++slice) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    stage(slice + STAGES - 1);
    const unsigned here = slice % STAGES * SLICE;
#pragma unroll
    for (int i = 0; i < DEEP / 16; ++i) {
      unsigned a[2][4], b[2][4];  // 16 rows; two groups of 8 columns by two halves of what is summed over
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        load_matrices(a[f], (rows ^ (i << 5)) + here + f * 16 * WIDE);
        load_matrices(b[f], (columns ^ (i << 5)) + here + f * 16 * WIDE);
      }
#pragma unroll
      for (int f = 0; f < 2; ++f)
#pragma unroll
        for (int n = 0; n < 4; ++n)
          mma(sum[f][n], a[f][0], a[f][1], a[f][2], a[f][3], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1], T());
    }
  }

#pragma unroll
  for (int f = 0; f < 2; ++f)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + warp / 2 * 32 + f * 16 + half * 8 + g;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int column = column0 + warp % 2 * 32 + n * 8 + 2 * t;
        if (row >= M || column >= N) continue;
        const float low = sum[f][n][2 * half] + (BIASED ? wide(added[column]) : 0.0f);
        const float high = sum[f][n][2 * half + 1] + (BIASED ? wide(added[column + 1]) : 0.0f);
        *reinterpret_cast<unsigned*>(out + size_t(row) * N + column) = pack(low, high, T());
      }
    }
}

}  // namespace treadle
