namespace treadle {

__device__ inline void add(float4& to, const float4& value, float weight) {
  to.x += value.x * weight;
  to.y += value.y * weight;
  to.z += value.z * weight;
  to.w += value.w * weight;
}

// Four dimensions from `d` on of a tile's packed row r, divided by the sum of weights.
template <typename T, int DV, int REP>
__device__ inline void put_row(T* out, const Item& item, int packed, int h, int heads, int d, float4 value, float sum) {
  const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
  const size_t row = size_t(item.token + packed / REP) * heads * REP + h * REP + packed % REP;
  uint2 four;
  four.x = pack(value.x * inverse, value.y * inverse, T());
  four.y = pack(value.z * inverse, value.w * inverse, T());
  *reinterpret_cast<uint2*>(out + row * DV + d) = four;
}

// Sums a tile's partial results (ROWS x DV each, with ROWS x {maximum, sum}) and writes the tile's rows.
template <typename T, int DV, int REP, int ROWS>
__device__ inline void merge_splits(const Item& item, int h, int heads, const float* partial, const float* scales,
                                    T* out) {
  constexpr int AT_ONCE = 8;
  for (int i = threadIdx.x; i < item.rows * (DV / 4); i += blockDim.x) {
    const int r = i / (DV / 4), d = i % (DV / 4) * 4;
    float most = LOWEST, sum = 0.0f;
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int s = 0; s < item.splits; s += AT_ONCE) {
      float2 weighs[AT_ONCE];
      float4 parts[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {  // all on their way at once
        const size_t row = (size_t(item.row0 + min(s + k, item.splits - 1)) * heads + h) * ROWS + r;
        weighs[k] = __ldcg(reinterpret_cast<const float2*>(scales + 2 * row));
        parts[k] = __ldcg(reinterpret_cast<const float4*>(partial + row * DV + d));
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
    put_row<T, DV, REP>(out, item, r, h, heads, d, value, sum);
  }
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
template <typename T, typename S, int D, int DV, int REP, int PAGE, int WINDOW, int CAP, bool SINKS, int ROWS, int STAGES,
          int WARPS, bool BOUNDED>
__device__ inline void attend_decode(const T* q, const S* pool, const float* kv_scales, const T* sinks, const int* pages,
                                     const int* items, const int* starts, const int* bounds, float factor, T* out,
                                     float* partial, float* scales, int* counters, int heads) {
  constexpr bool SMALL = sizeof(S) == 1;
  constexpr float RAISED = 1024.0f;
  constexpr int TILE = 16, GROUPS = ROWS / 8, LINE = DV + 4;
  constexpr int BYTES = D * sizeof(S), WIDE = ROW_OF<D> * sizeof(S), CHUNKS = (BYTES + 31) / 32 * 2;  // in pairs
  constexpr int V_BYTES = DV * sizeof(S), V_WIDE = ROW_OF<DV> * sizeof(S), V_CHUNKS = (V_BYTES + 31) / 32 * 2;
  constexpr int WHOLE = D / 16, STEPS = SMALL ? CHUNKS : WHOLE;  // of 16 dimensions
  constexpr int V_WHOLE = DV / 16, V_STEPS = SMALL ? V_CHUNKS : V_WHOLE;
  constexpr int STAGE = TILE * (WIDE + V_WIDE + (SMALL ? 8 : 0));
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ float shared_m[WARPS][8], shared_l[WARPS][8];
  __shared__ int flag;
  const int h = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  unsigned char* ring = memory + warp * STAGES * STAGE;
  float* shared_o = reinterpret_cast<float*>(memory + WARPS * STAGES * STAGE);  // [WARPS][8][LINE]
  const int first = starts[blockIdx.x], last = starts[blockIdx.x + 1];
  const size_t plane = size_t(heads) * PAGE * D;  // from a page's keys to its values
  auto swapped = [](int chunk, int token) { return chunk ^ (WIDE < 128 ? token >> 1 & 3 : token & 7); };
  auto v_swapped = [](int chunk, int token) { return chunk ^ (V_WIDE < 128 ? token >> 1 & 3 : token & 7); };

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
      const size_t line = size_t(h) * PAGE + base % PAGE, at = size_t(page_ahead) * 2 * heads * PAGE + line;
      const unsigned char* from = reinterpret_cast<const unsigned char*>(pool + at * D);
      const unsigned char* v_from = from + plane * sizeof(S);
      if (D != DV) {
        const S* page = pool + size_t(page_ahead) * heads * PAGE * (D + DV);
        from = reinterpret_cast<const unsigned char*>(page + line * D);
        v_from = reinterpret_cast<const unsigned char*>(page + plane + line * DV);
      }
      const unsigned to = shared_address(ring + stage * STAGE);
#pragma unroll
      for (int i = 0; i < TILE * CHUNKS / 32; ++i) {
        const int token = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
        const bool inside = base + token < hi_ahead && (BYTES == CHUNKS * 16 || chunk * 16 < BYTES);
        const unsigned place = to + token * WIDE + swapped(chunk, token) * 16;
        fetch(place, from + token * BYTES + chunk * 16, inside);
        if (D == DV) fetch(place + TILE * WIDE, v_from + token * BYTES + chunk * 16, inside);
      }
#pragma unroll
      for (int i = 0; i < (D == DV ? 0 : TILE * V_CHUNKS / 32); ++i) {
        const int token = (i * 32 + lane) / V_CHUNKS, chunk = (i * 32 + lane) % V_CHUNKS;
        const bool inside = base + token < hi_ahead && (V_BYTES == V_CHUNKS * 16 || chunk * 16 < V_BYTES);
        fetch(to + TILE * WIDE + token * V_WIDE + v_swapped(chunk, token) * 16, v_from + token * V_BYTES + chunk * 16,
              inside);
      }
      if (SMALL && lane < 8)  // kv_scales of 16 keys, then of 16 values
        fetch(to + TILE * (WIDE + V_WIDE) + lane * 16, kv_scales + at + (lane >> 2) * (plane / D) + (lane & 3) * 4, true);
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
        if (r >= item.rows || i >= WHOLE) continue;
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
    float o[GROUPS][V_STEPS][4], m[GROUPS][2], l[GROUPS][2];
    int seen[GROUPS][2], first_seen[GROUPS][2];
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
      for (int i = 0; i < V_STEPS; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][i][e] = 0.0f;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        m[n][c] = LOWEST;
        l[n][c] = 0.0f;
        const int row = n * 8 + 2 * t + c;
        seen[n][c] = item.position + row / REP;
        if constexpr (BOUNDED) {
          const int* own = bounds + 2 * (item.token + min(row, item.rows - 1) / REP);
          first_seen[n][c] = own[0];
          seen[n][c] = own[1];
        }
        if (SINKS && warp == 0 && item.split == 0) {  // once, however the cached tokens are split
          m[n][c] = sink_of<T, REP>(sinks, h, n * 8 + 2 * t + c);
          l[n][c] = g == 0 ? 1.0f : 0.0f;
        }
      }
    }
    const int tiles = (item.hi - item.lo + TILE - 1) / TILE;
    for (int tile = warp; tile < tiles; tile += WARPS) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
      __syncwarp();
      produce(stage == 0 ? STAGES - 1 : stage - 1);
      const unsigned keys = shared_address(ring + stage * STAGE), values = keys + TILE * WIDE;
      const float* kept = reinterpret_cast<const float*>(ring + stage * STAGE + TILE * (WIDE + V_WIDE));
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
        load_matrices(a, keys + token * WIDE + swapped(chunk, token) * 16);
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
            bool sees = at < item.hi && at <= seen[n][c] && (WINDOW == 0 || at > seen[n][c] - WINDOW);
            if constexpr (BOUNDED) sees = sees && at >= first_seen[n][c];
            float& score = s[n][2 * half + c];
            score = sees ? capped<CAP>(score * (SMALL ? factor * kept[g + 8 * half] : factor)) : NEVER;
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
          // Half precision must not lose small weights of small values; behind the end lies what others left.
          const float low = base < item.hi ? kept[TILE + g] * RAISED : 0.0f;
          const float high = base + 8 < item.hi ? kept[TILE + g + 8] * RAISED : 0.0f;
          p[n][0] = swap_halves(pack(s[n][0] * low, s[n][1] * low, __half()));
          p[n][1] = swap_halves(pack(s[n][2] * high, s[n][3] * high, __half()));
        } else {
          p[n][0] = swap_halves(pack(s[n][0], s[n][1], T()));
          p[n][1] = swap_halves(pack(s[n][2], s[n][3], T()));
        }
#pragma unroll
        for (int i = 0; i < V_STEPS; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[n][i][e] *= old[e & 1];
      }
#pragma unroll
      for (int i = 0; i < V_CHUNKS; i += 2) {
        unsigned a[4];
        const int token = (lane & 7) + (SMALL ? lane & 8 : lane >> 1 & 8), chunk = i + (SMALL ? lane >> 4 : lane >> 3 & 1);
        load_transposed(a, values + token * V_WIDE + v_swapped(chunk, token) * 16);
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
        for (int i = 0; i < V_WHOLE; ++i) {
          line[i * 16 + (SMALL ? 2 * g : g)] = SMALL ? o[n][i][c] / RAISED : o[n][i][c];
          line[i * 16 + (SMALL ? 2 * g + 1 : g + 8)] = SMALL ? o[n][i][2 + c] / RAISED : o[n][i][2 + c];
        }
      }
      __syncthreads();
      for (int i = threadIdx.x; i < min(8, item.rows - n * 8) * (DV / 4); i += WARPS * 32) {
        const int r = i / (DV / 4), d = i % (DV / 4) * 4;
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
          put_row<T, DV, REP>(out, item, n * 8 + r, h, heads, d, value, sum);
        } else {
          __stcg(reinterpret_cast<float4*>(partial + (slot + n * 8 + r) * DV + d), value);
          if (d == 0) __stcg(reinterpret_cast<float2*>(scales + 2 * (slot + n * 8 + r)), make_float2(most, sum));
        }
      }
      __syncthreads();
    }
    if (item.splits > 1 && last_of(counters + item.row0 * heads + h, item.splits, &flag))
      merge_splits<T, DV, REP, ROWS>(item, h, heads, partial, scales, out);
  }
}

}  // namespace treadle
