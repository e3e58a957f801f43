namespace treadle {

// Whether a condition holds in any thread of the block; a barrier.
__device__ inline bool any_of_block(bool holds) { return __syncthreads_or(holds); }

// Bytes of a row of D dimensions in shared memory: whole groups of eight 16-byte pieces, whose places are swapped.
template <int D>
constexpr int LINE_OF = (D + 63) / 64 * 128;

// The place of a 16-byte piece in row `row` of such rows.
__device__ inline unsigned place_of(int row, int piece) { return ((piece & ~7) | ((piece ^ row) & 7)) << 4; }

// How the scores of ROWS packed rows with TILE tokens are dealt out to WARPS warps: each has F fragments of 16 rows with
// N groups of 8 tokens, and ACROSS warps have other tokens of the same rows.
template <int ROWS, int TILE, int WARPS>
struct Shares {
  static constexpr int PIECES = ROWS / 16 * (TILE / 8), EACH = PIECES < WARPS ? 1 : PIECES / WARPS;
  static constexpr int F = EACH < 4 ? 1 : 2, N = EACH / F, DOWN = ROWS / (16 * F), ACROSS = TILE / (8 * N);
  static constexpr int CHAINS = F * N == 1 ? 4 : F * N == 2 ? 2 : 1;  // sums that do not wait for each other
  static_assert(N == 1 || N == 2);
};

// Scores of a warp's share. `queries` and `keys` are rows of D, of which the warp's begin with `row` and `token`; the
// products of the first SCALED dimensions are times `scale`.
template <typename T, int D, int SCALED, int F, int N, int CHAINS>
__device__ inline void score_share(float (&s)[F][N][4], unsigned queries, unsigned keys, int row, int token,
                                   float scale) {
  constexpr int LINE = LINE_OF<D>;
  const int lane = threadIdx.x & 31, low = lane & 7;
  const unsigned own = queries + (row + (lane & 15)) * LINE, own_piece = ((lane >> 4) ^ low) << 4;
  const unsigned theirs = keys + (token + (N == 2 ? low + (lane >> 4) * 8 : low)) * LINE;
  const unsigned their_piece = ((N == 2 ? lane >> 3 & 1 : lane >> 3) ^ low) << 4;
  float sums[CHAINS][F][N][4];
#pragma unroll
  for (int c = 0; c < CHAINS; ++c)
#pragma unroll
    for (int f = 0; f < F; ++f)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[c][f][n][e] = 0.0f;
#pragma unroll
  for (int i = 0; i < D / 16; i += 2) {  // 32 dimensions
    if (SCALED > 0 && i * 16 == SCALED) {
#pragma unroll
      for (int c = 0; c < CHAINS; ++c)
#pragma unroll
        for (int f = 0; f < F; ++f)
#pragma unroll
          for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[c][f][n][e] *= scale;
    }
    unsigned b[N][4];  // of two tokens' groups each 16, or of one all
#pragma unroll
    for (int k = 0; k < N; ++k) load_matrices(b[k], theirs + (i >> 2) * 128 + (their_piece ^ ((i + k & 3) << 5)));
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int f = 0; f < F; ++f) {
        unsigned a[4];
        load_matrices(a, own + f * 16 * LINE + (i >> 2) * 128 + (own_piece ^ ((i + k & 3) << 5)));
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const int which = N == 2 ? k : 0, at = N == 2 ? 2 * n : 2 * k;
          mma(sums[(i + k) % CHAINS][f][n], a[0], a[1], a[2], a[3], b[which][at], b[which][at + 1], T());
        }
      }
  }
#pragma unroll
  for (int f = 0; f < F; ++f)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[f][n][e] = sums[0][f][n][e];
#pragma unroll
        for (int c = 1; c < CHAINS; ++c) s[f][n][e] += sums[c][f][n][e];
      }
}

// GROUP tokens of a page's keys or values to shared memory: warp w has tokens w, w + WARPS, ..., its lanes the pieces.
template <int D, int GROUP, int WARPS>
__device__ inline void fetch_lines(unsigned to, const char* from, int left) {
  constexpr int PIECES = D / 8;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  to += warp * LINE_OF<D>;
  from += warp * D * 2 + lane * 16;
#pragma unroll
  for (int k = 0; k < GROUP; k += WARPS)
#pragma unroll
    for (int j = 0; j < PIECES; j += 32)
      if (PIECES - j >= 32 || lane < PIECES - j)
        fetch(to + k * LINE_OF<D> + place_of(warp + k, lane) + j * 16, from + k * D * 2 + j * 16, warp + k < left);
}

// Packed rows (ROWS a tile) of wide keys (D) and values (DV) over cached tokens, TILE of them at a time, out of a ring of
// STAGES tiles. The sums of a row
// are too many for one warp: each of the block's has DV / WARPS dimensions of all rows, and a share of the scores; the
// weights go from one to the others through shared memory. A LATENT cache has no values of its own (multi-head latent
// attention, DeepSeek-V2 2024, in its absorbed form): all heads read the same bytes once; its queries come in two arrays,
// the last D - DV dimensions of each, scaled already, in `rotated`. The maxima follow as in `weigh`.
template <typename T, int D, int DV, int REP, int PAGE, int WINDOW, int CAP, bool SINKS, bool LATENT, int ROWS, int TILE,
          int WARPS, int STAGES, bool BOUNDED>
__device__ inline void attend_wide(const T* q, const T* rotated, const T* pool, const T* sinks, const int* pages,
                                   const int* items, const int* bounds, float factor, T* out, float* partial,
                                   float* scales, int* counters, int heads) {
  using Share = Shares<ROWS, TILE, WARPS>;
  constexpr int THREADS = 32 * WARPS, F = Share::F, N = Share::N, ACROSS = Share::ACROSS, FRAGMENTS = ROWS / 16;
  constexpr int LINE = LINE_OF<D>, V_LINE = LATENT ? LINE : LINE_OF<DV>, P_LINE = TILE * 2 + 16, OWN = DV / WARPS;
  constexpr int STAGE = TILE * (LINE + (LATENT ? 0 : V_LINE)), GROUP = TILE < 32 ? TILE : 32, BATCH = 32 * GROUP / TILE;
  constexpr float SLACK = 8.0f;
  constexpr int Q = LATENT ? DV : D;  // dimensions in `q`
  static_assert(!LATENT || CAP == 0);
  static_assert(D % 32 == 0 && DV % (16 * WARPS) == 0 && ROWS <= THREADS && PAGE >= GROUP);
  extern __shared__ __align__(128) unsigned char memory[];  // queries, stages, weights, and what follows
  __shared__ int flag;
  float* tops = reinterpret_cast<float*>(memory + ROWS * LINE + STAGES * STAGE + ROWS * P_LINE);  // [ROWS][ACROSS]
  float* most = tops + ROWS * ACROSS;                                                        // [ROWS]
  float* olds = most + ROWS;                                                                 // [ROWS]
  const int linear = blockIdx.y * gridDim.x + blockIdx.x, block = linear / heads, h = linear % heads;
  const Item item(items + block * 8);
  if (item.rows == 0) return;  // there are more blocks than items, as launches come in few sizes
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, low = lane & 7;
  const unsigned queries = shared_address(memory), stages = queries + ROWS * LINE, weights = stages + STAGES * STAGE;

#pragma unroll
  for (int r = 0; r < ROWS; r += WARPS) {
    const int row = r + warp, packed = item.row0 + min(row, item.rows - 1);
    const size_t line = size_t(item.token + packed / REP) * heads * REP + h * REP + packed % REP;
#pragma unroll
    for (int j = 0; j < D / 8; j += 32) {
      const int piece = j + lane;
      const T* from = piece * 8 < Q ? q + line * Q + piece * 8 : rotated + line * (D - Q) + piece * 8 - Q;
      if (piece < D / 8) fetch(queries + row * LINE + place_of(row, lane) + j * 16, from, row < item.rows);
    }
  }
  if (threadIdx.x < ROWS)
    most[threadIdx.x] = SINKS && item.split == 0 ? sink_of<T, REP>(sinks, h, item.row0 + threadIdx.x) : LOWEST;
  const size_t stride = size_t(heads) * PAGE * (LATENT ? D : D + DV) * 2;  // bytes of a page
  const char* mine = reinterpret_cast<const char*>(pool + size_t(h) * PAGE * D);
  const char* v_mine = reinterpret_cast<const char*>(pool + size_t(heads) * PAGE * D + size_t(h) * PAGE * DV);
  const int tiles = (item.hi - item.lo + TILE - 1) / TILE;
  int known = 0;  // a page for each lane, of BATCH tiles
  auto stage = [&](int tile, int slot) {
    const int base = item.lo + tile * TILE;
    const unsigned to = stages + slot * STAGE;
    if (tile % BATCH == 0) known = pages[item.pages + min(base + lane * GROUP, item.hi - 1) / PAGE];
#pragma unroll
    for (int i = 0; i < TILE; i += GROUP) {
      const size_t page = __shfl_sync(~0u, known, tile % BATCH * (TILE / GROUP) + i / GROUP) * stride;
      const int within = PAGE > GROUP ? (base + i) % PAGE : 0, left = item.hi - base - i;
      fetch_lines<D, GROUP, WARPS>(to + i * LINE, mine + page + within * D * 2, left);
      if (!LATENT) fetch_lines<DV, GROUP, WARPS>(to + TILE * LINE + i * V_LINE, v_mine + page + within * DV * 2, left);
    }
  };

  // This warp's share of the scores, and its dimensions of the values.
  const int down = warp % Share::DOWN, across = warp / Share::DOWN;
  const bool scores = across < ACROSS;
  float s[F][N][4], l[F][2], o[FRAGMENTS][OWN / 8][4];
  int seen[F][2], first_seen[F][2];
#pragma unroll
  for (int f = 0; f < F; ++f)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (down * F + f) * 16 + half * 8 + g;
      seen[f][half] = item.position + (item.row0 + row) / REP;
      if constexpr (BOUNDED) {
        const int* own = bounds + 2 * (item.token + (item.row0 + min(row, item.rows - 1)) / REP);
        first_seen[f][half] = own[0];
        seen[f][half] = own[1];
      }
      l[f][half] = SINKS && item.split == 0 && across == 0 && t == 0 ? 1.0f : 0.0f;
    }
#pragma unroll
  for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
    for (int n = 0; n < OWN / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[f][n][e] = 0.0f;

#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < tiles) stage(i, i);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  for (int tile = 0, slot = 0; tile < tiles; ++tile, slot = slot + 1 == STAGES ? 0 : slot + 1) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    if (tile + STAGES - 1 < tiles) stage(tile + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
    asm volatile("cp.async.commit_group;" ::: "memory");
    const unsigned keys = stages + slot * STAGE;
    bool outrun = false;
    if (scores) {
      score_share<T, D, LATENT ? DV : 0, F, N, Share::CHAINS>(s, queries, keys, down * F * 16, across * N * 8, factor);
      const int base = item.lo + tile * TILE + across * N * 8 + 2 * t;
#pragma unroll
      for (int f = 0; f < F; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float top = most[(down * F + f) * 16 + half * 8 + g] + SLACK;
#pragma unroll
          for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int at = base + n * 8 + e;
              bool sees = at < item.hi && at <= seen[f][half] && (WINDOW == 0 || at > seen[f][half] - WINDOW);
              if constexpr (BOUNDED) sees = sees && at >= first_seen[f][half];
              float& one = s[f][n][2 * half + e];
              one = sees ? capped<CAP>(one * (LATENT ? LOG2_E : factor)) : NEVER;
              outrun |= one > top;
            }
        }
    }
    if (any_of_block(outrun)) {
      if (scores) {
#pragma unroll
        for (int f = 0; f < F; ++f)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float top = NEVER;
#pragma unroll
            for (int n = 0; n < N; ++n) top = fmaxf(top, fmaxf(s[f][n][2 * half], s[f][n][2 * half + 1]));
            top = quad_max(top);
            if (t == 0) tops[((down * F + f) * 16 + half * 8 + g) * ACROSS + across] = top;
          }
      }
      __syncthreads();
      if (threadIdx.x < ROWS) {
        float next = most[threadIdx.x];
        for (int i = 0; i < ACROSS; ++i) next = fmaxf(next, tops[threadIdx.x * ACROSS + i]);
        olds[threadIdx.x] = power(most[threadIdx.x] - next);
        most[threadIdx.x] = next;
      }
      __syncthreads();
#pragma unroll
      for (int f = 0; f < F; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) l[f][half] *= olds[(down * F + f) * 16 + half * 8 + g];
#pragma unroll
      for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float old = olds[f * 16 + half * 8 + g];
#pragma unroll
          for (int n = 0; n < OWN / 8; ++n) {
            o[f][n][2 * half] *= old;
            o[f][n][2 * half + 1] *= old;
          }
        }
    }
    if (scores) {
#pragma unroll
      for (int f = 0; f < F; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = (down * F + f) * 16 + half * 8 + g;
          const float top = most[row];
          unsigned char* to = memory + ROWS * LINE + STAGES * STAGE + row * P_LINE + (across * N * 8 + 2 * t) * 2;
#pragma unroll
          for (int n = 0; n < N; ++n) {
            const float x = power(s[f][n][2 * half] - top), y = power(s[f][n][2 * half + 1] - top);
            l[f][half] += x + y;
            *reinterpret_cast<unsigned*>(to + n * 16) = pack(x, y, T());
          }
        }
    }
    __syncthreads();
    const unsigned values = keys + (LATENT ? 0 : TILE * LINE) + (lane & 15) * V_LINE;
#pragma unroll
    for (int i = 0; i < TILE / 16; ++i) {
      unsigned p[FRAGMENTS][4];
#pragma unroll
      for (int f = 0; f < FRAGMENTS; ++f)
        load_matrices(p[f], weights + (f * 16 + (lane & 15)) * P_LINE + i * 32 + (lane >> 4) * 16);
#pragma unroll
      for (int n = 0; n < OWN / 8; n += 2) {
        unsigned b[4];  // two halves of 16 tokens by two groups of 8 dimensions
        load_transposed(b, values + i * 16 * V_LINE + place_of(low, warp * (OWN / 8) + n + (lane >> 4)));
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
          mma(o[f][n], p[f][0], p[f][1], p[f][2], p[f][3], b[0], b[1], T());
          mma(o[f][n + 1], p[f][0], p[f][1], p[f][2], p[f][3], b[2], b[3], T());
        }
      }
    }
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");

  if (scores) {
#pragma unroll
    for (int f = 0; f < F; ++f)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(l[f][half]);
        if (t == 0) tops[((down * F + f) * 16 + half * 8 + g) * ACROSS + across] = sum;
      }
  }
  __syncthreads();
  const size_t row0 = (size_t(block) * heads + h) * ROWS;
  if (threadIdx.x < ROWS) {
    float sum = 0.0f;
    for (int i = 0; i < ACROSS; ++i) sum += tops[threadIdx.x * ACROSS + i];
    olds[threadIdx.x] = sum > 0.0f ? 1.0f / sum : 0.0f;
    if (item.splits > 1 && threadIdx.x < item.rows)
      __stcg(reinterpret_cast<float2*>(scales + 2 * (row0 + threadIdx.x)), make_float2(most[threadIdx.x], sum));
  }
  __syncthreads();
#pragma unroll
  for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = f * 16 + half * 8 + g, packed = item.row0 + r;
      if (r >= item.rows) continue;
      const float inverse = olds[r];
      T* to = out + (size_t(item.token + packed / REP) * heads * REP + h * REP + packed % REP) * DV + warp * OWN + 2 * t;
      float* part = partial + (row0 + r) * DV + warp * OWN + 2 * t;
#pragma unroll
      for (int n = 0; n < OWN / 8; ++n) {
        const float x = o[f][n][2 * half], y = o[f][n][2 * half + 1];
        if (item.splits == 1) *reinterpret_cast<unsigned*>(to + n * 8) = pack(x * inverse, y * inverse, T());
        else __stcg(reinterpret_cast<float2*>(part + n * 8), make_float2(x, y));
      }
    }
  if (item.splits > 1 && last_of(counters + (block - item.split) * heads + h, item.splits, &flag))
    merge_parts<T, DV, REP, ROWS, THREADS, 32>(item, block, h, heads, partial, scales, out,
                                               reinterpret_cast<float*>(memory));
}

}  // namespace treadle
