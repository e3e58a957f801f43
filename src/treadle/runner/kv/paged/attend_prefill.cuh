namespace treadle {

__device__ inline float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float quad_sum(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

__device__ inline float power(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// Sums a tile's partial results (ROWS x DV, with ROWS x {maximum, sum}) and writes the tile's rows. All weights come
// first, into `weights` (splits x ROWS in shared memory); LOADS pieces are on their way to a thread at once.
template <typename T, int DV, int REP, int ROWS, int THREADS, int LOADS>
__device__ inline void merge_parts(const Item& item, int block, int h, int heads, const float* partial,
                                    const float* scales, T* out, float* weights) {
  constexpr int SHARE = THREADS / ROWS, PIECES = DV / 4, EACH = ROWS * PIECES / THREADS;
  constexpr int WIDTH = EACH < LOADS / 2 ? EACH : LOADS / 2, DEPTH = LOADS / WIDTH;
  const size_t start = (size_t(block - item.split) * heads + h) * ROWS, stride = size_t(heads) * ROWS;
  const int r = threadIdx.x / SHARE, last = item.splits - 1;
  const float2* scale = reinterpret_cast<const float2*>(scales) + start + min(r, item.rows - 1);
  float most = LOWEST, sum = 0.0f;
  for (int s0 = threadIdx.x % SHARE; s0 <= last; s0 += 8 * SHARE) {
    float2 part[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) part[j] = __ldcg(scale + min(s0 + j * SHARE, last) * stride);
    float next = most;
#pragma unroll
    for (int j = 0; j < 8; ++j) next = fmaxf(next, part[j].x);
    sum *= power(most - next);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (s0 + j * SHARE <= last) {
        sum += part[j].y * power(part[j].x - next);
        weights[(s0 + j * SHARE) * ROWS + r] = part[j].x;
      }
    most = next;
  }
#pragma unroll
  for (int i = 1; i < SHARE; i *= 2) {
    const float other = __shfl_xor_sync(~0u, most, i), next = fmaxf(most, other);
    sum = sum * power(most - next) + __shfl_xor_sync(~0u, sum, i) * power(other - next);
    most = next;
  }
  const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
  for (int s = threadIdx.x % SHARE; s <= last; s += SHARE)
    weights[s * ROWS + r] = power(weights[s * ROWS + r] - most) * inverse;
  __syncthreads();

  const float4* from = reinterpret_cast<const float4*>(partial) + start * PIECES;
  const int all = item.rows * PIECES;
  for (int i0 = threadIdx.x; i0 < all; i0 += WIDTH * THREADS) {
    float4 value[WIDTH];
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) value[w] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int s0 = 0; s0 <= last; s0 += DEPTH) {
      float4 part[DEPTH][WIDTH];
#pragma unroll
      for (int j = 0; j < DEPTH; ++j)
#pragma unroll
        for (int w = 0; w < WIDTH; ++w)
          part[j][w] = __ldcg(from + min(s0 + j, last) * stride * PIECES + min(i0 + w * THREADS, all - 1));
#pragma unroll
      for (int j = 0; j < DEPTH; ++j)
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
          const int row = min(i0 + w * THREADS, all - 1) / PIECES;
          const float weight = s0 + j <= last ? weights[(s0 + j) * ROWS + row] : 0.0f;
          value[w].x += part[j][w].x * weight;
          value[w].y += part[j][w].y * weight;
          value[w].z += part[j][w].z * weight;
          value[w].w += part[j][w].w * weight;
        }
    }
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) {
      const int i = i0 + w * THREADS, packed = item.row0 + i / PIECES;
      if (i >= all) continue;
      T* to = out + (size_t(item.token + packed / REP) * heads * REP + h * REP + packed % REP) * DV + i % PIECES * 4;
      *reinterpret_cast<uint2*>(to) =
          make_uint2(pack(value[w].x, value[w].y, T()), pack(value[w].z, value[w].w, T()));
    }
  }
}

// 16 bytes of every STEP-th row below END, FROM bytes apart, to shared memory, TO bytes apart; zeros for those that are
// not `left`. The distances are in the instructions.
template <int ROW, int END, int STEP, int TO, int FROM>
__device__ inline void fetch_rows(unsigned to, const char* from, int left) {
  if constexpr (ROW < END) {
    asm volatile("cp.async.cg.shared.global [%0 + %3], [%1 + %4], 16, %2;" ::"r"(to), "l"(from),
                 "r"(ROW < left ? 16 : 0), "n"(ROW * TO), "n"(ROW * FROM)
                 : "memory");
    fetch_rows<ROW + STEP, END, STEP, TO, FROM>(to, from, left);
  }
}

// Scores of a warp's F fragments of 16 rows with N groups of 8 tokens. Both lie in shared memory in rows of ROW_OF<D>, the
// 16-byte pieces of row r at their place ^ (r & 7); `queries` and `keys` are this thread's piece of the first matrices.
template <typename T, int D, int F, int N>
__device__ inline void score(float (&s)[F][N][4], unsigned queries, unsigned keys) {
#pragma unroll
  for (int f = 0; f < F; ++f)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[f][n][e] = 0.0f;
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    unsigned a[F][4];
#pragma unroll
    for (int f = 0; f < F; ++f) load_matrices(a[f], (queries ^ (i << 5)) + f * 16 * ROW_OF<D> * 2);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      unsigned b[4];  // two groups of 8 tokens by two halves of 16 dimensions
      load_matrices(b, (keys ^ (i << 5)) + n * 8 * ROW_OF<D> * 2);
#pragma unroll
      for (int f = 0; f < F; ++f) {
        mma(s[f][n], a[f][0], a[f][1], a[f][2], a[f][3], b[0], b[1], T());
        mma(s[f][n + 1], a[f][0], a[f][1], a[f][2], a[f][3], b[2], b[3], T());
      }
    }
  }
}

// Scores to weights. The sums stay in units of 2^m, and m follows the largest score only where it is outrun by more
// than SLACK (2^SLACK is as exact a weight as 1): nearly always nothing is to be scaled, and no lane asks another.
template <int F, int N, int CHUNKS>
__device__ inline void weigh(float (&s)[F][N][4], float (&o)[F][CHUNKS][4], float (&m)[F][2], float (&l)[F][2],
                             float factor) {
  constexpr float SLACK = 8.0f;
  float most[F][2];
  bool outrun = false;
#pragma unroll
  for (int f = 0; f < F; ++f)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& top = most[f][half];
      top = fmaxf(s[f][0][2 * half], s[f][0][2 * half + 1]);
#pragma unroll
      for (int n = 1; n < N; ++n) top = fmaxf(top, fmaxf(s[f][n][2 * half], s[f][n][2 * half + 1]));
      top *= factor;
      outrun |= top > m[f][half] + SLACK;
    }
  if (__any_sync(~0u, outrun)) {
#pragma unroll
    for (int f = 0; f < F; ++f)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(m[f][half], quad_max(most[f][half])), old = power(m[f][half] - next);
        m[f][half] = next;
        l[f][half] *= old;
#pragma unroll
        for (int n = 0; n < CHUNKS; ++n) {
          o[f][n][2 * half] *= old;
          o[f][n][2 * half + 1] *= old;
        }
      }
  }
#pragma unroll
  for (int f = 0; f < F; ++f)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[f][n][e] = power(fmaf(s[f][n][e], factor, -m[f][e >> 1]));
        l[f][e >> 1] += s[f][n][e];
      }
}

// Adds values by weight; `values` points to this thread's piece of the first matrices.
template <typename T, int DV, int F, int N>
__device__ inline void gather(float (&o)[F][DV / 8][4], const float (&s)[F][N][4], unsigned values) {
  const T kind = T();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    unsigned p[F][4];
#pragma unroll
    for (int f = 0; f < F; ++f) {
      p[f][0] = pack(s[f][2 * i][0], s[f][2 * i][1], kind);
      p[f][1] = pack(s[f][2 * i][2], s[f][2 * i][3], kind);
      p[f][2] = pack(s[f][2 * i + 1][0], s[f][2 * i + 1][1], kind);
      p[f][3] = pack(s[f][2 * i + 1][2], s[f][2 * i + 1][3], kind);
    }
#pragma unroll
    for (int n = 0; n < DV / 8; n += 2) {
      unsigned b[4];  // two halves of 16 tokens by two groups of 8 dimensions
      load_transposed(b, (values ^ (n << 4)) + i * 16 * ROW_OF<DV> * 2);
#pragma unroll
      for (int f = 0; f < F; ++f) {
        mma(o[f][n], p[f][0], p[f][1], p[f][2], p[f][3], b[0], b[1], kind);
        mma(o[f][n + 1], p[f][0], p[f][1], p[f][2], p[f][3], b[2], b[3], kind);
      }
    }
  }
}

// Writes what the fragments of a tile of 128 rows come to: the tile's rows, or its part of them.
template <typename T, int DV, int REP, int F, int THREADS>
__device__ inline void leave(const Item& item, const float (&o)[F][DV / 8][4], const float (&m)[F][2],
                             const float (&l)[F][2], int block, int h, int heads, T* out, float* partial,
                             float* scales, int* counters, float* weights) {
  constexpr int ROWS = 128;
  __shared__ int flag;
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  const size_t row0 = (size_t(block) * heads + h) * ROWS;
#pragma unroll
  for (int f = 0; f < F; ++f)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = (warp * F + f) * 16 + half * 8 + g;
      const float sum = quad_sum(l[f][half]), inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
      if (r >= item.rows) continue;
      const int packed = item.row0 + r;
      T* to = out + (size_t(item.token + packed / REP) * heads * REP + h * REP + packed % REP) * DV + 2 * t;
      float* part = partial + (row0 + r) * DV + 2 * t;
      if (item.splits > 1 && t == 0)
        __stcg(reinterpret_cast<float2*>(scales + 2 * (row0 + r)), make_float2(m[f][half], sum));
#pragma unroll
      for (int n = 0; n < DV / 8; ++n) {
        const float x = o[f][n][2 * half], y = o[f][n][2 * half + 1];
        if (item.splits == 1) *reinterpret_cast<unsigned*>(to + n * 8) = pack(x * inverse, y * inverse, T());
        else __stcg(reinterpret_cast<float2*>(part + n * 8), make_float2(x, y));
      }
    }
  if (item.splits > 1 && last_of(counters + (block - item.split) * heads + h, item.splits, &flag))
    merge_parts<T, DV, REP, ROWS, THREADS, (DV > 64 ? 32 : 16)>(item, block, h, heads, partial, scales, out, weights);
}

// Many packed rows (128 a tile) over cached tokens, TILE of them at a time in shared memory, the next ones on their way
// meanwhile (FlashAttention-2, Dao 2023). A warp has 32 rows, so that all it reads from shared memory serves two mma;
// of 256 dimensions its registers hold the sums of 16. Blocks have 128 threads (256 at D > 128) and
// ((128 + 2 * TILE) * ROW_OF<D> + 2 * TILE * ROW_OF<DV>) * 2 bytes. They start in the order of the items, all heads of one
// after another: the longest items should come first.
template <typename T, int D, int DV, int REP, int PAGE, int WINDOW, int CAP, bool SINKS, int TILE, bool BOUNDED>
__device__ inline void attend_prefill(const T* q, const T* pool, const T* sinks, const int* pages, const int* items,
                                      const int* bounds, float factor, T* out, float* partial, float* scales,
                                      int* counters, int heads) {
  constexpr int ROWS = 128, F = D > 128 || DV > 128 ? 1 : 2, OWN = 16 * F, THREADS = 32 * ROWS / OWN;
  constexpr int CHUNKS = ROW_OF<D> / 8, STEP = THREADS / CHUNKS, WIDE = ROW_OF<D> * 2;  // tokens that all threads fetch
  constexpr int V_CHUNKS = ROW_OF<DV> / 8, V_STEP = THREADS / V_CHUNKS, V_WIDE = ROW_OF<DV> * 2;  // at once, row's bytes
  constexpr int BYTES = D * 2, V_BYTES = DV * 2;                                                  // of a token in a page
  constexpr int GROUP = TILE < 32 ? TILE : 32;  // tokens that surely share a page
  constexpr int BATCH = 32 * GROUP / TILE;      // tiles whose pages a warp knows
  extern __shared__ __align__(1024) unsigned char memory[];  // queries [ROWS], keys [2][TILE], values [2][TILE]
  constexpr unsigned VALUES = (ROWS + 2 * TILE) * WIDE;
  const int linear = blockIdx.y * gridDim.x + blockIdx.x, block = linear / heads, h = linear % heads;
  const Item item(items + block * 8);
  if (item.rows == 0) return;  // there are more blocks than items, as launches come in few sizes
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

  // What this thread fetches is the same piece of every STEP-th row; STEP is a multiple of 8.
  const int token = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
  const bool fetches = D == ROW_OF<D> || chunk * 8 < D;
  const unsigned start = shared_address(memory);
  unsigned piece = start + token * WIDE + ((chunk ^ (token & 7)) << 4);
#pragma unroll
  for (int r = 0; r < ROWS; r += STEP) {
    const int packed = item.row0 + min(r + token, item.rows - 1);
    const T* from = q + (size_t(item.token + packed / REP) * heads * REP + h * REP + packed % REP) * D + chunk * 8;
    if (fetches) fetch(piece + r * WIDE, from, r + token < item.rows);
  }
  const char* mine = reinterpret_cast<const char*>(pool + (size_t(h) * PAGE + token) * D + chunk * 8);
  asm volatile("" : "+l"(mine), "+r"(piece));  // not to be worked out again for every tile
  const unsigned stride = 2 * heads * PAGE * (D + DV), plane = 2 * heads * PAGE * D;  // bytes of a page, of its keys
  const int v_token = threadIdx.x / V_CHUNKS, v_chunk = threadIdx.x % V_CHUNKS;       // of values that are less wide
  const bool v_fetches = DV == ROW_OF<DV> || v_chunk * 8 < DV;
  const char* v_mine = reinterpret_cast<const char*>(pool + (size_t(h) * PAGE + v_token) * DV + v_chunk * 8);
  const unsigned v_piece = start + VALUES + v_token * V_WIDE + ((v_chunk ^ (v_token & 7)) << 4);
  const int tiles = (item.hi - item.lo + TILE - 1) / TILE;
  int known = 0;  // a page for each lane, of BATCH tiles
  auto stage = [&](int tile) {
    const int base = item.lo + tile * TILE, left = item.hi - base - token;
    const unsigned to = piece + (ROWS + (tile & 1) * TILE) * WIDE;
    if (tile % BATCH == 0) known = pages[item.pages + min(base + lane * GROUP, item.hi - 1) / PAGE];
#pragma unroll
    for (int i = 0; i < TILE; i += GROUP) {
      const unsigned page = __shfl_sync(~0u, known, tile % BATCH * (TILE / GROUP) + i / GROUP);
      const char* from = mine + size_t(page) * stride + (PAGE > GROUP ? unsigned(base + i) % PAGE * BYTES : 0);
      if (fetches) fetch_rows<0, GROUP, STEP, WIDE, BYTES>(to + i * WIDE, from, left - i);
      if constexpr (D == DV) {
        if (fetches) fetch_rows<0, GROUP, STEP, WIDE, BYTES>(to + (2 * TILE + i) * WIDE, from + stride / 2, left - i);
      } else if (v_fetches) {
        const char* v_from = v_mine + size_t(page) * stride + plane + (PAGE > GROUP ? unsigned(base + i) % PAGE * V_BYTES : 0);
        fetch_rows<0, GROUP, V_STEP, V_WIDE, V_BYTES>(v_piece + ((tile & 1) * TILE + i) * V_WIDE, v_from,
                                                      item.hi - base - v_token - i);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  // The same, of what this thread reads for the tensor cores.
  const int low = lane & 7, second = (lane >> 3) & 1, third = lane >> 4;
  unsigned queries = start + (warp * OWN + low + second * 8) * WIDE + ((third ^ low) << 4);
  unsigned keys = start + (ROWS + low + third * 8) * WIDE + ((second ^ low) << 4);
  unsigned values = start + VALUES + (low + second * 8) * V_WIDE + ((third ^ low) << 4);
  asm volatile("" : "+r"(queries), "+r"(keys), "+r"(values));
  float o[F][DV / 8][4], m[F][2], l[F][2];
#pragma unroll
  for (int f = 0; f < F; ++f)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      m[f][half] = LOWEST;
      l[f][half] = 0.0f;
      if (SINKS && item.split == 0) {  // once, however the cached tokens are split
        m[f][half] = sink_of<T, REP>(sinks, h, item.row0 + warp * OWN + f * 16 + half * 8 + g);
        l[f][half] = t == 0 ? 1.0f : 0.0f;
      }
#pragma unroll
      for (int n = 0; n < DV / 8; ++n) o[f][n][2 * half] = o[f][n][2 * half + 1] = 0.0f;
    }
  int begins[F][2], ends[F][2];  // of what each row sees, where its token says so
  if constexpr (BOUNDED) {
#pragma unroll
    for (int f = 0; f < F; ++f)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = item.row0 + min(warp * OWN + f * 16 + half * 8 + g, item.rows - 1);
        const int* own = bounds + 2 * (item.token + row / REP);
        begins[f][half] = own[0];
        ends[f][half] = own[1] + 1;
      }
  }
  const int first = item.position + (item.row0 + warp * OWN) / REP;
  const int last = BOUNDED ? item.hi : item.position + (item.row0 + min(warp * OWN + OWN, item.rows) - 1) / REP;
  const bool idle = warp * OWN >= item.rows;
  if (tiles > 0) stage(0);
  for (int tile = 0; tile < tiles; ++tile) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    if (tile + 1 < tiles) stage(tile + 1);
    const int base = item.lo + tile * TILE;
    if (idle || base > last || (WINDOW > 0 && base + TILE <= first - WINDOW + 1)) continue;
    float s[F][TILE / 8][4];
    score<T, D>(s, queries, keys + (tile & 1) * TILE * WIDE);
    if constexpr (CAP != 0) {
#pragma unroll
      for (int f = 0; f < F; ++f)
#pragma unroll
        for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[f][n][e] = capped<CAP>(s[f][n][e] * factor);
    }
    if constexpr (BOUNDED) {
#pragma unroll
      for (int f = 0; f < F; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int begin = begins[f][half] - base - 2 * t, end = min(item.hi, ends[f][half]) - base - 2 * t;
#pragma unroll
          for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (n * 8 + e >= end || n * 8 + e < begin) s[f][n][2 * half + e] = NEVER;
        }
    } else if (base + TILE > item.hi || base + TILE - 1 > first || (WINDOW > 0 && base <= last - WINDOW)) {
#pragma unroll
      for (int f = 0; f < F; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = item.row0 + warp * OWN + f * 16 + half * 8 + g;
          const int own = item.position + row / REP - base - 2 * t;
          const int end = min(item.hi - base - 2 * t, own + 1), begin = own - WINDOW;
#pragma unroll
          for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (n * 8 + e >= end || (WINDOW > 0 && n * 8 + e <= begin)) s[f][n][2 * half + e] = NEVER;
        }
    }
    weigh(s, o, m, l, CAP ? 1.0f : factor);
    gather<T, DV>(o, s, values + (tile & 1) * TILE * V_WIDE);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  leave<T, DV, REP, F, THREADS>(Item(items + block * 8), o, m, l, block, h, heads, out, partial, scales, counters,
                               reinterpret_cast<float*>(memory));
}

}  // namespace treadle
