// Attention of a step's tokens over keys and values in pages, for tensor cores of compute capability 8.0 and later.
//
// A pool holds one layer's cache: [pages][2: keys, values][kv heads][PAGE tokens][D]. The queries of one kv head are
// packed: packed row r of a segment is token r / REP and head h * REP + r % REP, so that grouped heads share every byte
// that is read. A work item is a tile of packed rows over a range of cached tokens; where a tile's range is split
// over several items, each leaves a partial sum, and the last one to finish merges them (flash-decoding, Dao et al.
// 2023, without its second launch; the counters are left at zero for the next launch).
//
// Items are 8 ints: first token of the segment, packed rows of the tile, first packed row of the tile, position of the
// segment's first token, first cached token (a multiple of 16), end of the cached tokens, where the segment's
// pages begin in `pages`, and (index of the split << 16 | number of splits); a tile's items lie side by side.

namespace treadle {

constexpr float LOWEST = -1e30f;  // finite: a difference of two is 0, not a NaN
constexpr float NEVER = -3e38f;   // weighs nothing beside LOWEST

struct Item {
  int token, rows, row0, position, lo, hi, pages, split, splits;

  __device__ explicit Item(const int* from) {
    token = from[0];
    rows = from[1];
    row0 = from[2];
    position = from[3];
    lo = from[4];
    hi = from[5];
    pages = from[6];
    split = from[7] >> 16;
    splits = from[7] & 0xffff;
  }
};

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

__device__ inline unsigned pack(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<unsigned*>(&both);
}

__device__ inline unsigned pack(float low, float high, __half) {
  __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<unsigned*>(&both);
}

template <typename T>
__device__ inline T narrowed(float value);
template <>
__device__ inline __nv_bfloat16 narrowed(float value) { return __float2bfloat16(value); }
template <>
__device__ inline __half narrowed(float value) { return __float2half(value); }

__device__ inline unsigned part_of(const uint4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

__device__ inline float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float quad_sum(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// True in every thread of the block that is the last one to come here of those which share `counter`.
__device__ inline bool last_of(int* counter, int count, int* flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *flag = atomicAdd(counter, 1) == count - 1;
    if (*flag) *counter = 0;
  }
  __syncthreads();
  __threadfence();
  return *flag;
}

// Sums a tile's partial results (ROWS x D, with ROWS x {maximum, sum}) and writes the tile's rows.
template <typename T, int D, int REP, int ROWS>
__device__ inline void merge_splits(const Item& item, int block, int h, int heads, const float* partial,
                                    const float* scales, T* out) {
  const int first = block - item.split;
  for (int i = threadIdx.x; i < item.rows * D; i += blockDim.x) {
    const int r = i / D, d = i % D;
    float most = LOWEST, sum = 0.0f, value = 0.0f;
    for (int s = 0; s < item.splits; ++s) {
      const size_t row = (size_t(first + s) * heads + h) * ROWS + r;
      const float m = __ldcg(scales + 2 * row), next = fmaxf(most, m);
      const float old = exp2f(most - next), now = exp2f(m - next);
      sum = sum * old + __ldcg(scales + 2 * row + 1) * now;
      value = value * old + __ldcg(partial + row * D + d) * now;
      most = next;
    }
    const int packed = item.row0 + r;
    out[(size_t(item.token + packed / REP) * heads * REP + h * REP + packed % REP) * D + d] =
        narrowed<T>(sum > 0.0f ? value / sum : 0.0f);
  }
}

// Few packed rows (ROWS is 8 or 16) over many cached tokens. Keys and values go from memory to registers in 16-byte
// pieces, once: four warps take turns at tiles of 16 tokens, each with its own running softmax. A dot product does not
// mind the order of its terms, nor a sum of values which column is called first, so the dimensions are dealt to the
// threads in the order that makes such pieces the tensor cores' fragments.
template <typename T, int D, int REP, int PAGE, int WINDOW, int ROWS>
__device__ inline void attend_few(const T* q, const T* pool, const int* pages, const int* items, const float* scale,
                                  T* out, float* partial, float* scales, int* counters, int heads) {
  constexpr int WARPS = 4, KC = D / 32, VC = D / 64;
  extern __shared__ float shared[];
  float* shared_o = shared;                       // [WARPS][ROWS][D]
  float* shared_m = shared + WARPS * ROWS * D;    // [WARPS][ROWS]
  float* shared_l = shared_m + WARPS * ROWS;
  __shared__ int flag;
  const Item item(items + blockIdx.x * 8);
  const int h = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const float factor = *scale;
  const T kind = T();

  uint4 qa[KC], qb[KC];
#pragma unroll
  for (int half = 0; half < ROWS / 8; ++half) {
    const int r = g + 8 * half, packed = item.row0 + r;
    const T* from = q + (size_t(item.token + packed / REP) * heads * REP + h * REP + packed % REP) * D + t * 8;
#pragma unroll
    for (int j = 0; j < KC; ++j) {
      uint4 value = make_uint4(0, 0, 0, 0);
      if (r < item.rows) value = *reinterpret_cast<const uint4*>(from + j * 32);
      if (half) qb[j] = value;
      else qa[j] = value;
    }
  }
  if (ROWS == 8) {
#pragma unroll
    for (int j = 0; j < KC; ++j) qb[j] = make_uint4(0, 0, 0, 0);
  }
  const int at0 = item.position + (item.row0 + g) / REP, at1 = item.position + (item.row0 + g + 8) / REP;

  float o[VC][8][4];
#pragma unroll
  for (int c = 0; c < VC; ++c)
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[c][j][e] = 0.0f;
  float m0 = LOWEST, m1 = LOWEST, l0 = 0.0f, l1 = 0.0f;

  const int tiles = (item.hi - item.lo + 15) >> 4;
  const size_t plane = size_t(heads) * PAGE * D;  // from a page's keys to its values
  auto page_of = [&](int tile) {
    const int base = item.lo + tile * 16;
    return pool + size_t(pages[item.pages + base / PAGE]) * 2 * plane + (size_t(h) * PAGE + base % PAGE) * D;
  };
  uint4 k[2][KC];
  const T* here = pool;
  auto load_keys = [&](const T* page, int base) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const bool inside = base + n * 8 + g < item.hi;
#pragma unroll
      for (int j = 0; j < KC; ++j) {
        k[n][j] = make_uint4(0, 0, 0, 0);
        if (inside) k[n][j] = *reinterpret_cast<const uint4*>(page + (n * 8 + g) * D + j * 32 + t * 8);
      }
    }
  };
  if (warp < tiles) {
    here = page_of(warp);
    load_keys(here, item.lo + warp * 16);
  }
  for (int tile = warp; tile < tiles; tile += WARPS) {
    const int base = item.lo + tile * 16;
    uint4 v[4][VC];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 2 * t + (i & 1) + 8 * (i >> 1);
      const bool inside = base + token < item.hi;
#pragma unroll
      for (int c = 0; c < VC; ++c) {
        v[i][c] = make_uint4(0, 0, 0, 0);
        if (inside) v[i][c] = *reinterpret_cast<const uint4*>(here + plane + token * D + c * 64 + g * 8);
      }
    }
    float s[2][4] = {};
#pragma unroll
    for (int j = 0; j < KC; ++j)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma(s[n], qa[j].x, qb[j].x, qa[j].y, qb[j].y, k[n][j].x, k[n][j].y, kind);
        mma(s[n], qa[j].z, qb[j].z, qa[j].w, qb[j].w, k[n][j].z, k[n][j].w, kind);
      }
    if (tile + WARPS < tiles) {
      here = page_of(tile + WARPS);
      load_keys(here, base + WARPS * 16);
    }
    float most0 = LOWEST, most1 = LOWEST;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = base + n * 8 + 2 * t + e;
        const bool sees0 = at < item.hi && at <= at0 && (WINDOW == 0 || at > at0 - WINDOW);
        const bool sees1 = at < item.hi && at <= at1 && (WINDOW == 0 || at > at1 - WINDOW);
        s[n][e] = sees0 ? s[n][e] * factor : NEVER;
        s[n][2 + e] = sees1 ? s[n][2 + e] * factor : NEVER;
        most0 = fmaxf(most0, s[n][e]);
        most1 = fmaxf(most1, s[n][2 + e]);
      }
    most0 = fmaxf(m0, quad_max(most0));
    const float old0 = exp2f(m0 - most0);
    m0 = most0;
    float old1 = 1.0f;
    if (ROWS > 8) {
      most1 = fmaxf(m1, quad_max(most1));
      old1 = exp2f(m1 - most1);
      m1 = most1;
    }
    float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        s[n][e] = exp2f(s[n][e] - m0);
        sum0 += s[n][e];
        s[n][2 + e] = ROWS > 8 ? exp2f(s[n][2 + e] - m1) : 0.0f;
        sum1 += s[n][2 + e];
      }
    l0 = l0 * old0 + sum0;
    l1 = l1 * old1 + sum1;
    const unsigned a0 = pack(s[0][0], s[0][1], kind), a1 = pack(s[0][2], s[0][3], kind);
    const unsigned a2 = pack(s[1][0], s[1][1], kind), a3 = pack(s[1][2], s[1][3], kind);
#pragma unroll
    for (int c = 0; c < VC; ++c)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        o[c][j][0] *= old0;
        o[c][j][1] *= old0;
        o[c][j][2] *= old1;
        o[c][j][3] *= old1;
        const unsigned pick = j & 1 ? 0x7632 : 0x5410;
        const unsigned b0 = __byte_perm(part_of(v[0][c], j >> 1), part_of(v[1][c], j >> 1), pick);
        const unsigned b1 = __byte_perm(part_of(v[2][c], j >> 1), part_of(v[3][c], j >> 1), pick);
        mma(o[c][j], a0, a1, a2, a3, b0, b1, kind);
      }
  }
  l0 = quad_sum(l0);
  l1 = quad_sum(l1);
  if (t == 0) {
    shared_m[warp * ROWS + g] = m0;
    shared_l[warp * ROWS + g] = l0;
    if (ROWS > 8) {
      shared_m[warp * ROWS + g + 8] = m1;
      shared_l[warp * ROWS + g + 8] = l1;
    }
  }
  float* mine = shared_o + warp * ROWS * D;
#pragma unroll
  for (int c = 0; c < VC; ++c)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      mine[g * D + c * 64 + (2 * t) * 8 + j] = o[c][j][0];
      mine[g * D + c * 64 + (2 * t + 1) * 8 + j] = o[c][j][1];
      if (ROWS > 8) {
        mine[(g + 8) * D + c * 64 + (2 * t) * 8 + j] = o[c][j][2];
        mine[(g + 8) * D + c * 64 + (2 * t + 1) * 8 + j] = o[c][j][3];
      }
    }
  __syncthreads();
  const size_t row0 = (size_t(blockIdx.x) * heads + h) * ROWS;
  for (int i = threadIdx.x; i < item.rows * D; i += WARPS * 32) {
    const int r = i / D, d = i % D;
    float most = LOWEST, sum = 0.0f, value = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) most = fmaxf(most, shared_m[w * ROWS + r]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float weight = exp2f(shared_m[w * ROWS + r] - most);
      sum += shared_l[w * ROWS + r] * weight;
      value += shared_o[(w * ROWS + r) * D + d] * weight;
    }
    if (item.splits == 1) {
      const int packed = item.row0 + r;
      out[(size_t(item.token + packed / REP) * heads * REP + h * REP + packed % REP) * D + d] =
          narrowed<T>(sum > 0.0f ? value / sum : 0.0f);
    } else {
      __stcg(partial + (row0 + r) * D + d, value);
      if (d == 0) {
        __stcg(scales + 2 * (row0 + r), most);
        __stcg(scales + 2 * (row0 + r) + 1, sum);
      }
    }
  }
  if (item.splits > 1 && last_of(counters + (blockIdx.x - item.split) * heads + h, item.splits, &flag))
    merge_splits<T, D, REP, ROWS>(item, blockIdx.x, h, heads, partial, scales, out);
}

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ inline void load_matrices(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ inline void load_transposed(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// 16 bytes from global to shared memory, or zeros.
__device__ inline void fetch(unsigned to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0));
}

// Many packed rows (128 a tile, 16 for each of eight warps) over cached tokens, TILE of them at a time in shared memory,
// the next ones on their way meanwhile (FlashAttention-2, Dao 2023).
template <typename T, int D, int REP, int PAGE, int WINDOW, int TILE>
__device__ inline void attend_many(const T* q, const T* pool, const int* pages, const int* items, const float* scale,
                                   T* out, float* partial, float* scales, int* counters, int heads) {
  constexpr int ROWS = 128, THREADS = 256, CHUNKS = D / 8, STEPS = D / 16;
  extern __shared__ __align__(16) unsigned char memory[];
  T* keys = reinterpret_cast<T*>(memory);  // [2][TILE][D], the 16-byte pieces of a token swapped about
  T* values = keys + 2 * TILE * D;
  __shared__ int flag;
  const Item item(items + blockIdx.x * 8);
  const int h = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const float factor = *scale;
  const T kind = T();
  const size_t plane = size_t(heads) * PAGE * D;

  const int r0 = warp * 16 + g, r1 = r0 + 8;
  const int at0 = item.position + (item.row0 + r0) / REP, at1 = item.position + (item.row0 + r1) / REP;
  auto query = [&](int r) {
    const int packed = item.row0 + min(r, item.rows - 1);
    return q + (size_t(item.token + packed / REP) * heads * REP + h * REP + packed % REP) * D + 2 * t;
  };
  const T *q0 = query(r0), *q1 = query(r1);
  unsigned a[STEPS][4];
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    a[i][0] = *reinterpret_cast<const unsigned*>(q0 + i * 16);
    a[i][1] = *reinterpret_cast<const unsigned*>(q1 + i * 16);
    a[i][2] = *reinterpret_cast<const unsigned*>(q0 + i * 16 + 8);
    a[i][3] = *reinterpret_cast<const unsigned*>(q1 + i * 16 + 8);
  }
  auto stage = [&](int tile, int buffer) {
#pragma unroll
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += THREADS) {
      const int token = i / CHUNKS, chunk = i % CHUNKS, at = item.lo + tile * TILE + token;
      const bool inside = at < item.hi;
      const int safe = inside ? at : item.lo;
      const T* from = pool + size_t(pages[item.pages + safe / PAGE]) * 2 * plane + (size_t(h) * PAGE + safe % PAGE) * D +
                      chunk * 8;
      const int to = (buffer * TILE + token) * D + ((chunk ^ (token & 7)) * 8);
      fetch(shared_address(keys + to), from, inside);
      fetch(shared_address(values + to), from + plane, inside);
    }
    asm volatile("cp.async.commit_group;");
  };

  float o[CHUNKS][4];
#pragma unroll
  for (int n = 0; n < CHUNKS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) o[n][e] = 0.0f;
  float m0 = LOWEST, m1 = LOWEST, l0 = 0.0f, l1 = 0.0f;
  const int tiles = (item.hi - item.lo + TILE - 1) / TILE;
  stage(0, 0);
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) {
      stage(tile + 1, (tile + 1) & 1);
      asm volatile("cp.async.wait_group 1;");
    } else {
      asm volatile("cp.async.wait_group 0;");
    }
    __syncthreads();
    const int base = item.lo + tile * TILE, buffer = (tile & 1) * TILE;
    float s[TILE / 8][4];
#pragma unroll
    for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = 0.0f;
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
      for (int n = 0; n < TILE / 8; n += 2) {
        unsigned b[4];  // two groups of 8 tokens by two halves of 16 dimensions
        const int token = n * 8 + (lane & 7) + ((lane >> 4) << 3), chunk = i * 2 + ((lane >> 3) & 1);
        load_matrices(b, shared_address(keys + (buffer + token) * D + ((chunk ^ (token & 7)) * 8)));
        mma(s[n], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1], kind);
        mma(s[n + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3], kind);
      }
    const int first = item.position + (item.row0 + warp * 16) / REP;
    const int last = item.position + (item.row0 + warp * 16 + 15) / REP;
    const bool masked =
        base + TILE > item.hi || base + TILE - 1 > first || (WINDOW > 0 && base <= last - WINDOW);
    float most0 = LOWEST, most1 = LOWEST;
#pragma unroll
    for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        s[n][e] *= factor;
        s[n][2 + e] *= factor;
        if (masked) {
          const int at = base + n * 8 + 2 * t + e;
          if (!(at < item.hi && at <= at0 && (WINDOW == 0 || at > at0 - WINDOW))) s[n][e] = NEVER;
          if (!(at < item.hi && at <= at1 && (WINDOW == 0 || at > at1 - WINDOW))) s[n][2 + e] = NEVER;
        }
        most0 = fmaxf(most0, s[n][e]);
        most1 = fmaxf(most1, s[n][2 + e]);
      }
    most0 = fmaxf(m0, quad_max(most0));
    most1 = fmaxf(m1, quad_max(most1));
    const float old0 = exp2f(m0 - most0), old1 = exp2f(m1 - most1);
    m0 = most0;
    m1 = most1;
    float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
    for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        s[n][e] = exp2f(s[n][e] - m0);
        s[n][2 + e] = exp2f(s[n][2 + e] - m1);
        sum0 += s[n][e];
        sum1 += s[n][2 + e];
      }
    l0 = l0 * old0 + sum0;
    l1 = l1 * old1 + sum1;
#pragma unroll
    for (int n = 0; n < CHUNKS; ++n) {
      o[n][0] *= old0;
      o[n][1] *= old0;
      o[n][2] *= old1;
      o[n][3] *= old1;
    }
#pragma unroll
    for (int i = 0; i < TILE / 16; ++i) {
      const unsigned p0 = pack(s[2 * i][0], s[2 * i][1], kind), p1 = pack(s[2 * i][2], s[2 * i][3], kind);
      const unsigned p2 = pack(s[2 * i + 1][0], s[2 * i + 1][1], kind);
      const unsigned p3 = pack(s[2 * i + 1][2], s[2 * i + 1][3], kind);
#pragma unroll
      for (int n = 0; n < CHUNKS; n += 2) {
        unsigned b[4];  // two halves of 16 tokens by two groups of 8 dimensions
        const int token = i * 16 + (lane & 7) + (((lane >> 3) & 1) << 3), chunk = n + (lane >> 4);
        load_transposed(b, shared_address(values + (buffer + token) * D + ((chunk ^ (token & 7)) * 8)));
        mma(o[n], p0, p1, p2, p3, b[0], b[1], kind);
        mma(o[n + 1], p0, p1, p2, p3, b[2], b[3], kind);
      }
    }
    __syncthreads();
  }
  l0 = quad_sum(l0);
  l1 = quad_sum(l1);
  const size_t row0 = (size_t(blockIdx.x) * heads + h) * ROWS;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = half ? r1 : r0;
    if (r >= item.rows) continue;
    const float m = half ? m1 : m0, l = half ? l1 : l0, inverse = l > 0.0f ? 1.0f / l : 0.0f;
    const int packed = item.row0 + r;
    T* to = out + (size_t(item.token + packed / REP) * heads * REP + h * REP + packed % REP) * D + 2 * t;
    float* part = partial + (row0 + r) * D + 2 * t;
#pragma unroll
    for (int n = 0; n < CHUNKS; ++n) {
      const float x = o[n][2 * half], y = o[n][2 * half + 1];
      if (item.splits == 1) *reinterpret_cast<unsigned*>(to + n * 8) = pack(x * inverse, y * inverse, kind);
      else __stcg(reinterpret_cast<float2*>(part + n * 8), make_float2(x, y));
    }
    if (item.splits > 1 && t == 0) __stcg(reinterpret_cast<float2*>(scales + 2 * (row0 + r)), make_float2(m, l));
  }
  if (item.splits > 1 && last_of(counters + (blockIdx.x - item.split) * heads + h, item.splits, &flag))
    merge_splits<T, D, REP, ROWS>(item, blockIdx.x, h, heads, partial, scales, out);
}

}  // namespace treadle
