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
// pages begin in `pages`, and (index of the split << 16 | number of splits); a tile's items lie side by side. Where
// tiles are of few rows they begin with row 0, and the third number is where the tile's partial results are.

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

__device__ inline float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float quad_sum(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

__device__ inline void add(float4& to, const float4& value, float weight) {
  to.x += value.x * weight;
  to.y += value.y * weight;
  to.z += value.z * weight;
  to.w += value.w * weight;
}

// Four dimensions from `d` on of a tile's packed row r, divided by the sum of weights.
template <typename T, int D, int REP>
__device__ inline void put_row(T* out, const Item& item, int packed, int h, int heads, int d, float4 value, float sum) {
  const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
  const size_t row = size_t(item.token + packed / REP) * heads * REP + h * REP + packed % REP;
  uint2 four;
  four.x = pack(value.x * inverse, value.y * inverse, T());
  four.y = pack(value.z * inverse, value.w * inverse, T());
  *reinterpret_cast<uint2*>(out + row * D + d) = four;
}

// True in every thread of the block that is the last one to come here of those which share `counter`.
__device__ inline bool last_of(int* counter, int count, int* flag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    *flag = atomicAdd(counter, 1) == count - 1;
    if (*flag) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  return *flag;
}

// Sums a tile's partial results (ROWS x D each, with ROWS x {maximum, sum}; the first is `slot`, and packed row `row0` its
// first row) and writes the tile's rows.
template <typename T, int D, int REP, int ROWS>
__device__ inline void merge_splits(const Item& item, int slot, int row0, int rows, int h, int heads, const float* partial,
                                    const float* scales, T* out) {
  constexpr int AT_ONCE = 8;
  for (int i = threadIdx.x; i < rows * (D / 4); i += blockDim.x) {
    const int r = i / (D / 4), d = i % (D / 4) * 4;
    float most = LOWEST, sum = 0.0f;
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int s = 0; s < item.splits; s += AT_ONCE) {
      float2 weighs[AT_ONCE];
      float4 parts[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {  // all on their way at once
        const size_t row = (size_t(slot + min(s + k, item.splits - 1)) * heads + h) * ROWS + r;
        weighs[k] = __ldcg(reinterpret_cast<const float2*>(scales + 2 * row));
        parts[k] = __ldcg(reinterpret_cast<const float4*>(partial + row * D + d));
        if (s + k >= item.splits) weighs[k] = make_float2(NEVER, 0.0f);
      }
      float next = most;
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) next = fmaxf(next, weighs[k].x);
      const float old = exp2f(most - next);
      sum *= old;
      value = make_float4(value.x * old, value.y * old, value.z * old, value.w * old);
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        const float weight = exp2f(weighs[k].x - next);
        sum += weighs[k].y * weight;
        add(value, parts[k], weight);
      }
      most = next;
    }
    put_row<T, D, REP>(out, item, row0 + r, h, heads, d, value, sum);
  }
}

// Stages of a ring for tiles of 16 tokens of so many bytes.
__device__ constexpr int few_stages(int bytes) { return bytes >= 512 ? 2 : bytes >= 256 ? 3 : 5; }

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

__device__ inline unsigned swap_halves(unsigned value) {  // transposes an 8 x 8 matrix that lies over the warp
  unsigned turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(value));
  return turned;
}

// Bytes (0, 1), (2, 3), (0, 2) or (1, 3) of a word, less 128, as two halves.
template <int WHICH>
__device__ inline unsigned halves_of(unsigned word) {
  constexpr unsigned pick = WHICH == 0 ? 0x4140 : WHICH == 1 ? 0x4342 : WHICH == 2 ? 0x4240 : 0x4341;
  const unsigned biased = __byte_perm(word, 0x64646464, pick);
  const __half2 two = __hsub2(*reinterpret_cast<const __half2*>(&biased), __half2half2(__ushort_as_half(0x6480)));
  return *reinterpret_cast<const unsigned*>(&two);
}

__device__ inline unsigned halved(unsigned two, __half) { return two; }
__device__ inline unsigned halved(unsigned two, __nv_bfloat16) {
  const float2 wide = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&two));
  return pack(wide.x, wide.y, __half());
}

// Few packed rows (ROWS is 8 or 16) over many cached tokens. A block goes through the items `starts[b]` to `starts[b + 1]`,
// which the host made alike in tokens for all blocks, its warps taking turns at 16 tokens; each warp has its own ring in shared
// memory, filled ahead by asynchronous copies over the ends of items, so that memory is never waited for twice, and its own
// running softmax. Tokens are the tensor cores' rows and packed rows their columns: eight rows fill a fragment.
template <typename T, typename S, int D, int REP, int PAGE, int WINDOW, int ROWS>
__device__ inline void attend_few(const T* q, const S* pool, const float* factors, const int* pages, const int* items,
                                  const int* starts, const float* scale, T* out, float* partial, float* scales,
                                  int* counters, int heads) {
  constexpr bool SMALL = sizeof(S) == 1;
  constexpr int WARPS = 4, TILE = 16, STEPS = D / 16, GROUPS = ROWS / 8, LINE = D + 4;
  constexpr int STAGES = few_stages(D * sizeof(S)), BYTES = D * sizeof(S), CHUNKS = BYTES / 16;
  constexpr int STAGE = 2 * TILE * (BYTES + (SMALL ? 4 : 0));
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ float shared_m[WARPS][8], shared_l[WARPS][8];
  __shared__ int flag;
  const int h = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  unsigned char* ring = memory + warp * STAGES * STAGE;
  float* shared_o = reinterpret_cast<float*>(memory + WARPS * STAGES * STAGE);  // [WARPS][8][LINE]
  const int first = starts[blockIdx.x], last = starts[blockIdx.x + 1];
  const float factor = *scale;
  const size_t plane = size_t(heads) * PAGE * D;  // from a page's keys to its values
  auto swapped = [](int chunk, int token) { return chunk ^ (CHUNKS < 8 ? token >> 1 & 3 : token & 7); };

  int ahead = first, tile_ahead = warp, tiles_ahead = 0, lo_ahead = 0, hi_ahead = 0, pages_ahead = 0, page_ahead = 0;
  auto look_ahead = [&](bool next) {
    while (ahead < last) {
      if (next) {
        const Item item(items + ahead * 8);
        lo_ahead = item.lo;
        hi_ahead = item.hi;
        pages_ahead = item.pages;
        tiles_ahead = (hi_ahead - lo_ahead + TILE - 1) / TILE;
      }
      if (tile_ahead < tiles_ahead) {
        page_ahead = pages[pages_ahead + (lo_ahead + tile_ahead * TILE) / PAGE];
        return;
      }
      tile_ahead = warp;
      next = true;
      ++ahead;
    }
  };
  auto produce = [&](int stage) {
    if (ahead < last) {
      const int base = lo_ahead + tile_ahead * TILE;
      const size_t at = size_t(page_ahead) * 2 * heads * PAGE + size_t(h) * PAGE + base % PAGE;
      const unsigned char* from = reinterpret_cast<const unsigned char*>(pool + at * D);
      const unsigned to = shared_address(ring + stage * STAGE);
#pragma unroll
      for (int i = 0; i < TILE * CHUNKS / 32; ++i) {
        const int token = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
        const bool inside = base + token < hi_ahead;
        const unsigned place = to + token * BYTES + swapped(chunk, token) * 16;
        fetch(place, from + token * BYTES + chunk * 16, inside);
        fetch(place + TILE * BYTES, from + plane * sizeof(S) + token * BYTES + chunk * 16, inside);
      }
      if (SMALL && lane < 8)  // factors of 16 keys, then of 16 values
        fetch(to + 2 * TILE * BYTES + lane * 16, factors + at + (lane >> 2) * (plane / D) + (lane & 3) * 4, true);
      tile_ahead += WARPS;
      look_ahead(false);
    }
    asm volatile("cp.async.commit_group;");
  };
  look_ahead(true);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) produce(i);

  int stage = 0;
  for (int which = first; which < last; ++which) {
    const Item item(items + which * 8);
    unsigned query[GROUPS][STEPS][2];
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      const int r = n * 8 + g;
      const T* from = q + (size_t(item.token + r / REP) * heads * REP + h * REP + r % REP) * D;
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        query[n][i][0] = query[n][i][1] = 0;
        if (r >= item.rows) continue;
        if constexpr (SMALL) {  // in the order in which bytes come
          const uint2 four = *reinterpret_cast<const uint2*>(from + i * 16 + 4 * t);
          query[n][i][0] = halved(four.x, T());
          query[n][i][1] = halved(four.y, T());
        } else {
          query[n][i][0] = *reinterpret_cast<const unsigned*>(from + i * 16 + 2 * t);
          query[n][i][1] = *reinterpret_cast<const unsigned*>(from + i * 16 + 8 + 2 * t);
        }
      }
    }
    float o[GROUPS][STEPS][4], m[GROUPS][2], l[GROUPS][2];
    int seen[GROUPS][2];
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
      for (int i = 0; i < STEPS; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][i][e] = 0.0f;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        m[n][c] = LOWEST;
        l[n][c] = 0.0f;
        seen[n][c] = item.position + (n * 8 + 2 * t + c) / REP;
      }
    }
    const int tiles = (item.hi - item.lo + TILE - 1) / TILE;
    for (int tile = warp; tile < tiles; tile += WARPS) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
      __syncwarp();
      produce(stage == 0 ? STAGES - 1 : stage - 1);
      const unsigned keys = shared_address(ring + stage * STAGE), values = keys + TILE * BYTES;
      const float* kept = reinterpret_cast<const float*>(ring + stage * STAGE + 2 * TILE * BYTES);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      float s[GROUPS][4];
#pragma unroll
      for (int n = 0; n < GROUPS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = 0.0f;
#pragma unroll
      for (int i = 0; i < CHUNKS; i += 2) {
        unsigned a[4];
        const int token = lane & 15, chunk = i + (lane >> 4);
        load_matrices(a, keys + token * BYTES + swapped(chunk, token) * 16);
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
          if constexpr (SMALL) {
            mma(s[n], halves_of<0>(a[0]), halves_of<0>(a[1]), halves_of<1>(a[0]), halves_of<1>(a[1]), query[n][i][0],
                query[n][i][1], __half());
            mma(s[n], halves_of<0>(a[2]), halves_of<0>(a[3]), halves_of<1>(a[2]), halves_of<1>(a[3]),
                query[n][i + 1][0], query[n][i + 1][1], __half());
          } else {
            mma(s[n], a[0], a[1], a[2], a[3], query[n][i / 2][0], query[n][i / 2][1], T());
          }
        }
      }
      const int base = item.lo + tile * TILE + g;
      unsigned p[GROUPS][2];
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) {
        float old[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float most = m[n][c];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int at = base + 8 * half;
            const bool sees = at < item.hi && at <= seen[n][c] && (WINDOW == 0 || at > seen[n][c] - WINDOW);
            float& score = s[n][2 * half + c];
            score = sees ? score * (SMALL ? factor * kept[g + 8 * half] : factor) : NEVER;
            most = fmaxf(most, score);
          }
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 4));
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
          old[c] = exp2f(m[n][c] - most);
          m[n][c] = most;
          s[n][c] = exp2f(s[n][c] - most);
          s[n][2 + c] = exp2f(s[n][2 + c] - most);
          l[n][c] = l[n][c] * old[c] + s[n][c] + s[n][2 + c];
        }
        if (SMALL) {
          const float low = kept[TILE + g], high = kept[TILE + g + 8];
          p[n][0] = swap_halves(pack(s[n][0] * low, s[n][1] * low, __half()));
          p[n][1] = swap_halves(pack(s[n][2] * high, s[n][3] * high, __half()));
        } else {
          p[n][0] = swap_halves(pack(s[n][0], s[n][1], T()));
          p[n][1] = swap_halves(pack(s[n][2], s[n][3], T()));
        }
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[n][i][e] *= old[e & 1];
      }
#pragma unroll
      for (int i = 0; i < CHUNKS; i += 2) {
        unsigned a[4];
        const int token = (lane & 7) + (SMALL ? lane & 8 : lane >> 1 & 8), chunk = i + (SMALL ? lane >> 4 : lane >> 3 & 1);
        load_transposed(a, values + token * BYTES + swapped(chunk, token) * 16);
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
          if constexpr (SMALL) {
            mma(o[n][i], halves_of<2>(a[0]), halves_of<3>(a[0]), halves_of<2>(a[1]), halves_of<3>(a[1]), p[n][0], p[n][1],
                __half());
            mma(o[n][i + 1], halves_of<2>(a[2]), halves_of<3>(a[2]), halves_of<2>(a[3]), halves_of<3>(a[3]), p[n][0],
                p[n][1], __half());
          } else {
            mma(o[n][i / 2], a[0], a[1], a[2], a[3], p[n][0], p[n][1], T());
          }
        }
      }
    }

    const size_t slot = (size_t(item.row0 + item.split) * heads + h) * ROWS;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      if (n * 8 >= item.rows) break;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float sum = l[n][c];
        sum += __shfl_xor_sync(~0u, sum, 4);
        sum += __shfl_xor_sync(~0u, sum, 8);
        sum += __shfl_xor_sync(~0u, sum, 16);
        if (g == 0) {
          shared_m[warp][2 * t + c] = m[n][c];
          shared_l[warp][2 * t + c] = sum;
        }
        float* line = shared_o + (warp * 8 + 2 * t + c) * LINE;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
          line[i * 16 + (SMALL ? 2 * g : g)] = o[n][i][c];
          line[i * 16 + (SMALL ? 2 * g + 1 : g + 8)] = o[n][i][2 + c];
        }
      }
      __syncthreads();
      for (int i = threadIdx.x; i < min(8, item.rows - n * 8) * (D / 4); i += WARPS * 32) {
        const int r = i / (D / 4), d = i % (D / 4) * 4;
        float most = LOWEST, sum = 0.0f;
        float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) most = fmaxf(most, shared_m[w][r]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
          const float weight = exp2f(shared_m[w][r] - most);
          sum += shared_l[w][r] * weight;
          add(value, *reinterpret_cast<const float4*>(shared_o + (w * 8 + r) * LINE + d), weight);
        }
        if (item.splits == 1) {
          put_row<T, D, REP>(out, item, n * 8 + r, h, heads, d, value, sum);
        } else {
          __stcg(reinterpret_cast<float4*>(partial + (slot + n * 8 + r) * D + d), value);
          if (d == 0) __stcg(reinterpret_cast<float2*>(scales + 2 * (slot + n * 8 + r)), make_float2(most, sum));
        }
      }
      __syncthreads();
    }
    if (item.splits > 1 && last_of(counters + item.row0 * heads + h, item.splits, &flag))
      merge_splits<T, D, REP, ROWS>(item, item.row0, 0, item.rows, h, heads, partial, scales, out);
  }
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
    merge_splits<T, D, REP, ROWS>(item, blockIdx.x - item.split, item.row0, item.rows, h, heads, partial, scales, out);
}

}  // namespace treadle
