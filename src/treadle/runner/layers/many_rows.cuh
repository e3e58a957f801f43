// Products of many tokens with their experts: tiles of tokens and weights in shared memory.

namespace treadle {

// Many rows: a block multiplies four tiles of weights with a chunk of 16 MT rows, DEPTH stages of 64 columns in shared memory
// or on their way. Warps are 4 tiles by 2 halves of the rows.
template <typename K, int MT, int DEPTH>
__device__ inline void many_rows(const typename K::T* x, const Experts<typename K::T>& w, const Chunk* chunks, const int* order,
                                 typename K::T* out, int top, float alpha, float limit) {
  using T = typename K::T;
  using Packed = typename K::Packed;
  constexpr int THREADS = 256, ROWS = 16 * MT, UNITS = Packed::SPAN, SLOT = 128 * UNITS * Packed::BYTES;
  constexpr int X_SLOT = ROWS * 128 * UNITS, STAGE = X_SLOT + SLOT + UNITS * K::GROUPS * 128 * K::SCALE;
  if (int(blockIdx.x) >= chunks[0].expert) return;
  extern __shared__ __align__(128) unsigned char memory[];  // [DEPTH][x, weights, scales]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const Chunk chunk = chunks[1 + blockIdx.x];
  const int tiles = K::tiles(w.rows), stages = w.columns / (64 * UNITS), first_tile = blockIdx.y * 4;
  auto tile_of = [&](int i) { return min(first_tile + i, tiles - 1); };

  const int piece = threadIdx.x & 7, row0 = threadIdx.x >> 3;  // of x, every 32 rows
  const T* from[ROWS / 32];
#pragma unroll
  for (int c = 0; c < ROWS / 32; ++c) {
    const int row = chunk.begin + min(row0 + c * 32, chunk.rows - 1);
    from[c] = x + size_t(K::TOKENS ? order[row] / top : row) * w.columns + piece * 8;
  }
  constexpr int ALL_PIECES = 128 * Packed::LINE, COPIES = (ALL_PIECES + THREADS - 1) / THREADS;
  const unsigned char* w_from[COPIES];
  int w_to[COPIES];
#pragma unroll
  for (int c = 0; c < COPIES; ++c) {
    const int own = c * THREADS + threadIdx.x, at = ALL_PIECES % THREADS ? min(own, ALL_PIECES - 1) : own;
    const int row = at / Packed::LINE, w_piece = at % Packed::LINE;
    w_from[c] = K::weights(w, chunk.expert, tile_of(row / 32), row / 16 % 2, 0) +
                size_t(row % 16) * (w.columns / 64) * Packed::BYTES + w_piece * 16;
    w_to[c] = X_SLOT + place_of<K::BITS, UNITS>(row, w_piece) * 16;
  }
  auto stage = [&](int s) {
    if (s < stages) {
      unsigned char* to = memory + s % DEPTH * STAGE;
#pragma unroll
      for (int u = 0; u < UNITS; ++u)
#pragma unroll
        for (int c = 0; c < ROWS / 32; ++c)
          copy_ahead(to + (u * ROWS * 8 + place_of<16, 1>(row0 + c * 32, piece)) * 16, from[c] + (s * UNITS + u) * 64);
#pragma unroll
      for (int c = 0; c < COPIES; ++c)
        if (ALL_PIECES % THREADS == 0 || c * THREADS + int(threadIdx.x) < ALL_PIECES)
          copy_ahead(to + w_to[c], w_from[c] + s * (UNITS * Packed::BYTES));
      constexpr int PIECES = K::PIECES, ALL = K::SCALE ? UNITS * K::GROUPS * 8 * PIECES : 0;
      for (int c = threadIdx.x; c < ALL; c += THREADS) {
        const int m = c / PIECES % 8, q = c / PIECES / 8 % K::GROUPS, u = c / PIECES / 8 / K::GROUPS;
        copy_ahead(to + X_SLOT + SLOT + c * 16,
                   K::scales(w, chunk.expert, tile_of(m / 2), m % 2, s * UNITS + u, q) + c % PIECES * 16);
      }
    }
    asm volatile("cp.async.commit_group;");
  };

  float sum[2][MT][4];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[m][i][e] = 0.0f;
#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i) stage(i);
  const int own = warp & 3, half_rows = (warp >> 2) * (8 * MT);
  for (int s = 0; s < stages; ++s) {
    asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 2));
    __syncthreads();
    stage(s + DEPTH - 1);
    const unsigned char* here = memory + s % DEPTH * STAGE;
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
      add_unit<K, UNITS, 128, MT>(sum, here + X_SLOT, here + X_SLOT + SLOT, u, own * 32, [&](int i, int half) {
        const int at = u * ROWS * 8 + place_of<16, 1>(half_rows + i * 8 + g, 2 * t + half);
        return *reinterpret_cast<const uint4*>(here + at * 16);
      });
  }
  const Results<K> results = {out, K::TOKENS ? nullptr : order, alpha, limit};
  const Chunk own_half = {chunk.expert, chunk.begin + half_rows, chunk.rows - half_rows, 0};
#pragma unroll
  for (int i = 0; i < MT; ++i) {
    float one[2][4];
#pragma unroll
    for (int e = 0; e < 8; ++e) one[e / 4][e % 4] = sum[e / 4][i][e % 4];
    results.write(one, i, w, own_half, tile_of(own));
  }
}

}  // namespace treadle
