// y = x W^T, plus `added` (N,) if BIASED, for few rows of x and weights that are plain (BITS 16), or of 4 or 8 bits packed
// along K as MLX's affine quantization has them (w = scale * q + bias, per GROUP). They stream from memory to the tensor cores
// once, and no warp waits for another.
//
// A block keeps its range of K of x in shared memory: ROWS rows, of which the last may be missing. Each of its warps then goes
// alone over tiles of 16 rows of W: it copies whole lines of weights, DEPTH stages of 256 columns, into a ring of its own, on
// over the end of a tile, and scales and biases eight groups at a time. `parts` warps of a block share a tile's columns, and so
// do the blocks of a column of the grid: what they have is added at the tile's end.
//
// The order of K is dealt to the threads so that what a thread reads is a fragment of a matrix: of 64 columns, thread t of four
// has 16. Weights enter as whole numbers (plus OFFSET, which costs one instruction to make). The scale is applied to the sum
// over 64 columns; biases and offsets are a product of their own, with the sums of x over the groups, in more than 16 bits.
// A row of x stays in its own column of every product, so whatever is in a missing one harms nothing.

namespace treadle {

// As `mma`, in whatever order the compiler likes best.
__device__ inline void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// What of a number is beyond the 11 bits that a tensor core reads of it.
__device__ inline float low(float value) { return value - __uint_as_float(__float_as_uint(value) & 0xffffe000); }

// Two whole numbers out of four 4-bit ones that are 16 bits apart, plus OFFSET.
__device__ inline unsigned two_of_4(unsigned word, int i, unsigned offset) {
  unsigned two;  // in one instruction, which the compiler does not find
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(two) : "r"(word >> 4 * i), "n"(0x000f000f), "r"(offset));
  return two;
}
__device__ inline unsigned two_of_4(unsigned word, int i, __nv_bfloat16) { return two_of_4(word, i, 0x43004300u); }
__device__ inline unsigned two_of_4(unsigned word, int i, __half) { return two_of_4(word, i, 0x64006400u); }

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

__device__ inline unsigned ones(__nv_bfloat16) { return 0x3f803f80; }
__device__ inline unsigned ones(__half) { return 0x3c003c00; }

template <int BITS>
__device__ inline float offset_of(__nv_bfloat16) { return BITS == 4 ? 128.0f : 0.0f; }
template <int BITS>
__device__ inline float offset_of(__half) { return 1024.0f; }

// Eight columns, in three passes of 11 bits of mantissa.
__device__ inline void multiply_exact(float (&d)[4], const float (&a)[4], const float4& b) {
  const float lows[4] = {low(a[0]), low(a[1]), low(a[2]), low(a[3])};
  auto pass = [&](const float (&f)[4], float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(f[0])), "r"(__float_as_uint(f[1])), "r"(__float_as_uint(f[2])), "r"(__float_as_uint(f[3])),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
  };
  pass(a, b.x, b.y);
  pass(a, b.z, b.w);
  pass(lows, b.x, b.y);
}

__device__ inline void copy_ahead(void* to, const void* from) {
  const unsigned at = shared_address(to);
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(at), "l"(from));
}

template <typename T, int ROWS, int BITS, int GROUP, int DEPTH, bool BIASED>
__device__ inline void skinny_gemm(const T* x, const unsigned* weight, const T* scales, const T* biases, const T* added, T* out,
                                float* partial, int* counters, int M, int N, int K, int parts) {
  constexpr int MT = ROWS / 8, TILE = 16, STAGE = 256, GROUPS = STAGE / GROUP;
  constexpr int UNITS = BITS / 2, LINE = 4 * UNITS, STEP = 32 / LINE;  // pieces of 16 bytes: in a row's 64 columns, its stage
  constexpr int EIGHT = 8 * GROUP / STAGE;
  constexpr int SCALE_DEPTH = BITS == 16 ? 0 : (EIGHT + DEPTH - 2) / EIGHT + 1;
  constexpr int SLOT = TILE * LINE * 16, SCALE_SLOT = 2 * TILE * 16, RING = DEPTH * SLOT + SCALE_DEPTH * SCALE_SLOT;  // bytes
  extern __shared__ __align__(16) unsigned char memory[];
  const int warps = blockDim.x >> 5, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int across = warps / parts, own_tile = warp % across, own_part = warp / across;
  const int splits = gridDim.y, split = blockIdx.y, eights = K / (8 * GROUP);
  const int begin = eights * split / splits, length = eights * (split + 1) / splits - begin;
  const int start = begin * EIGHT, stages = length * EIGHT;  // of this block
  const int first = length * own_part / parts * EIGHT, last = length * (own_part + 1) / parts * EIGHT;
  const int tiles = (N + TILE - 1) / TILE, stride = gridDim.x * across, first_tile = own_tile * gridDim.x + blockIdx.x;
  const int most = (eights + splits - 1) / splits * EIGHT;
  const T kind = T();
  unsigned char* ring = memory + warp * RING;
  uint4* xs = reinterpret_cast<uint4*>(memory + warps * RING);       // [64 columns][half of a thread's][row][t]
  float4* sums = reinterpret_cast<float4*>(xs + most * 32 * ROWS);   // [8 groups][MT][lane]: two sums, and their lows
  float4* joint = sums + (BITS == 16 ? 0 : most / EIGHT * MT * 32);  // [warps - across][MT][lane]

  int next_tile = first_tile, next_stage = first, next_slot = 0, next_scales = 0;
  const int unit = lane % LINE, block_of = unit / UNITS;
  const int place = block_of * TILE * UNITS + (((lane / LINE) * UNITS + unit % UNITS) ^ (block_of * UNITS & 7));
  const size_t line = size_t(K) * BITS / 8;
  auto copy_next = [&]() {  // the last tile begins early enough to have 16 rows
    if (next_tile < tiles && first < last) {
      const int row = min(next_tile * TILE, N - TILE);
      unsigned char* slot = ring + next_slot * SLOT;
      const unsigned char* from = reinterpret_cast<const unsigned char*>(weight) + (row + lane / LINE) * line +
                                  (size_t(start + next_stage) * LINE + unit) * 16;
#pragma unroll
      for (int c = 0; c < TILE * LINE / 32; ++c) {
        const int swapped = BITS == 16 ? place ^ (c & 1) : place;
        copy_ahead(slot + (swapped + c * STEP * UNITS) * 16, from + c * STEP * line);
      }
      if (BITS != 16 && next_stage % EIGHT == 0) {
        copy_ahead(ring + DEPTH * SLOT + next_scales * SCALE_SLOT + lane * 16,
                   (lane < TILE ? scales : biases) + size_t(row + lane % TILE) * (K / GROUP) + (start + next_stage) * GROUPS);
        next_scales = next_scales + 1 == SCALE_DEPTH ? 0 : next_scales + 1;
      }
      next_slot = next_slot + 1 == DEPTH ? 0 : next_slot + 1;
      if (++next_stage == last) {
        next_stage = first;
        next_tile += stride;
      }
    }
    asm volatile("cp.async.commit_group;");
  };
#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i) copy_next();

  constexpr int AHEAD = 8;
  const int down = warps / stages, right = warps % stages;
  for (int m = warp / stages, stage = warp % stages; m < M;) {
    uint4 four[AHEAD];
    int at[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int half = lane & 1;  // of which one has its rows swapped, or threads would meet in a bank
      at[i] = m < M ? (((stage * 4 + (lane >> 3)) * 2 + half) * ROWS + (m ^ half)) * 4 + (lane >> 1 & 3) : -1;
      if (m < M) four[i] = *reinterpret_cast<const uint4*>(x + size_t(m) * K + (start + stage) * STAGE + lane * 8);
      m += down, stage += right;
      if (stage >= stages) stage -= stages, ++m;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      uint4 v = four[i];
      if (BITS == 4)
        v = make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                       __byte_perm(v.y, v.w, 0x7632));
      if (at[i] >= 0) xs[at[i]] = v;
    }
  }
  __syncthreads();
  auto read_x = [&](uint4 (&two)[2], int block, int i) {
    two[0] = xs[(block * 2 * ROWS + i * 8 + g) * 4 + t];
    two[1] = xs[((block * 2 + 1) * ROWS + i * 8 + (g ^ 1)) * 4 + t];
  };
  for (int at = warp; at < (BITS == 16 ? 0 : stages * GROUPS * MT); at += warps) {
    const int group = at / MT, i = at % MT;
    const unsigned all[4] = {ones(kind), ones(kind), ones(kind), ones(kind)};
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int b = 0; b < GROUP / 64; ++b) {
      uint4 v[2];
      read_x(v, group * (GROUP / 64) + b, i);
      multiply(sum, all, v[0].x, v[0].y, kind);
      multiply(sum, all, v[0].z, v[0].w, kind);
      multiply(sum, all, v[1].x, v[1].y, kind);
      multiply(sum, all, v[1].z, v[1].w, kind);
    }
    if (g < 2) {
      float* put = reinterpret_cast<float*>(sums + (group / 8 * MT + i) * 32 + (2 * t + g) * 4 + group % 4) + (group >> 2 & 1);
      put[0] = g ? sum[1] : sum[0];
      put[2] = low(put[0]);
    }
  }
  __syncthreads();

  int slot_at = 0, scales_at = SCALE_DEPTH - 1;
  for (int tile = first_tile; tile - own_tile * int(gridDim.x) < tiles; tile += stride) {
    const bool mine = tile < tiles;
    if (parts == 1 && !mine) break;
    float sum[MT][4];
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[i][e] = 0.0f;
    for (int stage = first; stage < (mine ? last : first); ++stage) {
      asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 2));
      __syncwarp();
      const unsigned char* slot = ring + slot_at * SLOT;
      slot_at = slot_at + 1 == DEPTH ? 0 : slot_at + 1;
      copy_next();
      if constexpr (BITS == 16) {
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          unsigned a[4][4];
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int at = (b * TILE + h * 8 + g) * UNITS + ((2 * t + half) ^ (g & 1));
              const uint4 w = *reinterpret_cast<const uint4*>(slot + at * 16);
              a[2 * half][h] = w.x, a[2 * half][h + 2] = w.y;
              a[2 * half + 1][h] = w.z, a[2 * half + 1][h + 2] = w.w;
            }
#pragma unroll
          for (int i = 0; i < MT; ++i) {
            uint4 v[2];
            read_x(v, stage * 4 + b, i);
            multiply(sum[i], a[0], v[0].x, v[0].y, kind);
            multiply(sum[i], a[1], v[0].z, v[0].w, kind);
            multiply(sum[i], a[2], v[1].x, v[1].y, kind);
            multiply(sum[i], a[3], v[1].z, v[1].w, kind);
          }
        }
        continue;
      }
      if (stage % EIGHT == 0) scales_at = scales_at + 1 == SCALE_DEPTH ? 0 : scales_at + 1;
      const T* own = reinterpret_cast<const T*>(ring + DEPTH * SLOT + scales_at * SCALE_SLOT) + stage % EIGHT * GROUPS;
      const Several<T, GROUPS> scale[2] = {several<GROUPS>(own + g * 8), several<GROUPS>(own + (8 + g) * 8)};
      if (stage % EIGHT == 0) {
        float o[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const T* at = own + ((e & 1) * 8 + g) * 8 + (e >> 1) * 4 + t;
          o[e] = wide(at[TILE * 8]) - offset_of<BITS>(kind) * wide(at[0]);
        }
#pragma unroll
        for (int i = 0; i < MT; ++i) multiply_exact(sum[i], o, sums[(stage / EIGHT * MT + i) * 32 + lane]);
      }
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        unsigned a[4][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = ((h * 8 + g) * UNITS + t * UNITS / 4) ^ (b * UNITS & 7);
          const unsigned char* words = slot + (b * TILE * UNITS + at) * 16;
          if (BITS == 4) {
            const uint2 w = *reinterpret_cast<const uint2*>(words + (t & 1) * 8);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              a[i >> 1][h + (i & 1) * 2] = two_of_4(w.x, i, kind);
              a[2 + (i >> 1)][h + (i & 1) * 2] = two_of_4(w.y, i, kind);
            }
          } else {
            const uint4 w = *reinterpret_cast<const uint4*>(words);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              a[0][h + i * 2] = two_of_8(w.x, i, kind);
              a[1][h + i * 2] = two_of_8(w.y, i, kind);
              a[2][h + i * 2] = two_of_8(w.z, i, kind);
              a[3][h + i * 2] = two_of_8(w.w, i, kind);
            }
          }
        }
        const float s[2] = {wide(scale[0].of[b * 64 / GROUP]), wide(scale[1].of[b * 64 / GROUP])};
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          uint4 v[2];
          read_x(v, stage * 4 + b, i);
          float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          multiply(part, a[0], v[0].x, v[0].y, kind);
          multiply(part, a[1], v[0].z, v[0].w, kind);
          multiply(part, a[2], v[1].x, v[1].y, kind);
          multiply(part, a[3], v[1].z, v[1].w, kind);
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][e] += s[e >> 1] * part[e];
        }
      }
    }

    auto add = [](float (&to)[4], const float4& v) { to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w; };
    if (parts > 1) {
#pragma unroll
      for (int i = 0; i < MT; ++i)
        if (own_part > 0)
          joint[((warp - across) * MT + i) * 32 + lane] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
      __syncthreads();
      for (int p = 0; p < parts - 1; ++p)
#pragma unroll
        for (int i = 0; i < MT; ++i)
          if (own_part == 0) add(sum[i], joint[((p * across + own_tile) * MT + i) * 32 + lane]);
      __syncthreads();
      if (own_part > 0 || !mine) continue;
    }
    if (splits > 1) {
      float4* all = reinterpret_cast<float4*>(partial) + size_t(tile) * splits * MT * 32 + lane;
#pragma unroll
      for (int i = 0; i < MT; ++i) __stcg(all + (split * MT + i) * 32, make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]));
      __threadfence();
      __syncwarp();
      int count = 0;
      if (lane == 0) count = atomicAdd(counters + tile, 1);
      if (__shfl_sync(~0u, count, 0) < splits - 1) continue;
      if (lane == 0) counters[tile] = 0;
      __threadfence();
#pragma unroll
      for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][e] = 0.0f;
      constexpr int AT_ONCE = MT > 2 ? 16 / MT : 8;
      for (int p = 0; p < splits; p += AT_ONCE) {
        float4 some[AT_ONCE][MT];
#pragma unroll
        for (int q = 0; q < AT_ONCE; ++q)
#pragma unroll
          for (int i = 0; i < MT; ++i)
            some[q][i] = p + q < splits ? __ldcg(all + ((p + q) * MT + i) * 32) : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int q = 0; q < AT_ONCE; ++q)
#pragma unroll
          for (int i = 0; i < MT; ++i) add(sum[i], some[q][i]);
      }
    }
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int m = i * 8 + 2 * t + (e & 1), n = min(tile * TILE, N - TILE) + (e >> 1) * 8 + g;
        if (m < M) out[size_t(m) * N + n] = narrow(sum[i][e] + (BIASED ? wide(added[n]) : 0.0f), kind);
      }
  }
}

}  // namespace treadle
