// Products of tokens with the experts that they chose.
//
// A pair is a token and one of its experts. `route_experts` brings the pairs of an expert side by side and cuts them into chunks
// of at most ROWS. In a first product each pair's row of x is its token's, and results stand in the order of the chunks; a second
// one reads them so, and writes each pair's result to its own place. A pair's sums do not depend on those beside it.
//
// Weights are the 16 rows of the tensor cores' operands, pairs their columns. A tile is 32 rows: two times 16 of one array, or
// 16 of a gate's and the same 16 of up's, so that a thread has both numbers of an activation.

namespace treadle {

struct alignas(16) Chunk { int expert, begin, rows, unused; };

enum Activation { NONE, SILU, CLAMPED_OAI, GELU_TANH, GELU_ERF, RELU2, SILU_CLAMPED, CLAMPED_SILU };

// Chunks of pairs by expert, their number in `expert` of a first one, and the pairs in their order. THREADS >= E.
template <int THREADS, int ROWS>
__device__ inline void route_experts(const unsigned* indices, Chunk* chunks, int* order, int pairs, int experts) {
  __shared__ int cursors[THREADS];
  __shared__ int sums[2][32];
  const int own = threadIdx.x, warp = own >> 5, lane = own & 31;
  cursors[own] = 0;
  __syncthreads();
  for (int p = own; p < pairs; p += THREADS) atomicAdd(cursors + min(indices[p], unsigned(experts - 1)), 1);
  __syncthreads();
  const int rows = cursors[own], parts = (rows + ROWS - 1) / ROWS;
  int begin = rows, first = parts;  // sums up to here, and soon those before
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int r = __shfl_up_sync(~0u, begin, by), c = __shfl_up_sync(~0u, first, by);
    if (lane >= by) begin += r, first += c;
  }
  if (lane == 31) sums[0][warp] = begin, sums[1][warp] = first;
  __syncthreads();
  for (int w = 0; w < warp; ++w) begin += sums[0][w], first += sums[1][w];
  if (own == THREADS - 1) chunks[0] = {first, 0, 0, 0};
  begin -= rows, first -= parts;
  for (int c = 0; c < parts; ++c) chunks[1 + first + c] = {own, begin + c * ROWS, min(ROWS, rows - c * ROWS), 0};
  cursors[own] = begin;
  __syncthreads();
  for (int p = own; p < pairs; p += THREADS) order[atomicAdd(cursors + min(indices[p], unsigned(experts - 1)), 1)] = p;
}

__device__ inline float silu(float v) { return v / (1.0f + __expf(-v)); }

template <Activation KIND>
__device__ inline float activated(float gate, float up, float alpha, float limit) {
  if (KIND == SILU) return silu(gate) * up;
  if (KIND == CLAMPED_OAI) {
    const float low = fminf(gate, limit);
    return (fmaxf(fminf(up, limit), -limit) + 1.0f) * (low / (1.0f + __expf(-alpha * low)));
  }
  if (KIND == SILU_CLAMPED) return fminf(silu(gate), limit) * fmaxf(fminf(up, limit), -limit);
  if (KIND == CLAMPED_SILU) return silu(fminf(gate, limit)) * fmaxf(fminf(up, limit), -limit);
  if (KIND == GELU_TANH) return 0.5f * gate * (1.0f + tanhf(0.7978845608f * (gate + 0.044715f * gate * gate * gate))) * up;
  if (KIND == GELU_ERF) return 0.5f * gate * (1.0f + erff(gate * 0.7071067812f)) * up;
  if (KIND == RELU2) return fmaxf(gate, 0.0f) * fmaxf(gate, 0.0f) * up;
  return gate * up;
}

// The weights of a product by expert: one array, or two. Scales and biases are side by side, with rows next to each other.
template <typename T>
struct Experts {
  const unsigned char* weight[2];
  const unsigned char* scale[2];
  const T* bias[2];
  int rows, columns;
};

// What a product is: the weights' type, what becomes of sums, and whether rows of x are tokens.
template <typename T_, Mode MODE_, int BITS_, int GROUP_, Activation KIND_, bool PAIRED_, bool BIASED_, bool TOKENS_>
struct Kind {
  using T = T_;
  static constexpr Mode MODE = MODE_;
  static constexpr Activation KIND = KIND_;
  static constexpr bool PAIRED = PAIRED_, BIASED = BIASED_, TOKENS = TOKENS_;
  static constexpr int BITS = BITS_, GROUP = GROUP_;
  using Packed = Packing<BITS>;
  static constexpr int SCALE = MODE == PLAIN ? 0 : MODE == AFFINE ? 4 : 1, GROUPS = GROUP > 64 ? 1 : 64 / GROUP;
  static constexpr int PIECES = SCALE ? SCALE : 1;  // of 16 bytes, in 16 rows' scales

  static __device__ int tiles(int rows) { return PAIRED ? rows / 16 : (rows / 16 + 1) / 2; }
  // The first of 16 rows of half `m` of a tile; where there is no second half, it is the first again.
  static __device__ int row_of(int tile, int m, int rows) { return PAIRED ? tile * 16 : min(2 * tile + m, rows / 16 - 1) * 16; }
  static __device__ const unsigned char* weights(const Experts<T>& w, int expert, int tile, int m, int unit) {
    const size_t row = size_t(expert) * w.rows + row_of(tile, m, w.rows);
    return (PAIRED && m ? w.weight[1] : w.weight[0]) + (row * (w.columns / 64) + unit) * Packed::BYTES;
  }
  static __device__ const unsigned char* scales(const Experts<T>& w, int expert, int tile, int m, int unit, int q) {
    const int group = GROUP > 64 ? unit * 64 / GROUP : unit * GROUPS + q;
    const size_t line = size_t(expert) * (w.columns / GROUP) + group;
    return (PAIRED && m ? w.scale[1] : w.scale[0]) + (line * w.rows + row_of(tile, m, w.rows)) * SCALE;
  }
};

__device__ inline void copy_ahead(void* to, const void* from) {
  const unsigned at = shared_address(to);
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(at), "l"(from));
}

// Adds 64 columns of a tile and of 8 MT rows of x, which `read_x` gives by their number / 8 and the half of their columns.
template <typename K, int UNITS, int ROWS, int MT, typename ReadX>
__device__ inline void add_unit(float (&sum)[2][MT][4], const unsigned char* slot, const unsigned char* scales, int unit,
                                int first_row, ReadX read_x) {
  using T = typename K::T;
  constexpr int BITS = K::BITS;
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  Words<BITS> words[2][2];
  Scale scale[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + m * 16 + h * 8 + g;
      if constexpr (K::MODE != PLAIN) {
        words[m][h] = words_of<BITS, UNITS>(slot, row, unit, 0);
        const int q = t * K::GROUPS / 4;
        scale[m][h] = scale_at<T, K::MODE>(scales + ((unit * K::GROUPS + q) * ROWS + row) * K::SCALE);
      }
    }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned a[2][2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (K::MODE == PLAIN) words[m][h] = words_of<BITS, UNITS>(slot, first_row + m * 16 + h * 8 + g, unit, half);
        dequantize<T, K::MODE, BITS>(a[m][h], words[m][h], half, scale[m][h]);
      }
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      const uint4 v = arranged<BITS>(read_x(i, half));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        multiply(sum[m][i], a[m][0][0], a[m][1][0], a[m][0][1], a[m][1][1], v.x, v.y, T());
        multiply(sum[m][i], a[m][0][2], a[m][1][2], a[m][0][3], a[m][1][3], v.z, v.w, T());
      }
    }
  }
}

// Writes what becomes of a tile's sums with eight rows of x: row 2 t + (odd g) of two neighbouring columns.
template <typename K, typename Target>
__device__ inline void put(const float (&sum)[2][4], const Experts<typename K::T>& w, int expert, int tile, float alpha,
                           float limit, Target target) {
  using T = typename K::T;
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3, odd = g & 1;
#pragma unroll
  for (int m = 0; m < (K::PAIRED ? 1 : 2); ++m) {
    const int first = K::row_of(tile, m, w.rows);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = first + h * 8 + g;
      const size_t at = size_t(expert) * w.rows + n;
      const float one = K::BIASED ? wide(w.bias[0][at]) : 0.0f, two = K::BIASED && K::PAIRED ? wide(w.bias[1][at]) : 0.0f;
      float v[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        v[e] = activated<K::KIND>(sum[m][h * 2 + e] + one, K::PAIRED ? sum[1][h * 2 + e] + two : 1.0f, alpha, limit);
      const float got = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 4);
      T* to = target(2 * t + odd);
      if (to) *reinterpret_cast<unsigned*>(to + (n & ~1)) = odd ? pack(got, v[1], T()) : pack(v[0], got, T());
    }
  }
}

// What a product's results become: numbers of a chunk's rows, at the places of their pairs or in the chunks' order.
template <typename K>
struct Results {
  typename K::T* out;
  const int* order;  // null: the chunks'
  float alpha, limit;

  __device__ void write(const float (&sum)[2][4], int i, const Experts<typename K::T>& w, const Chunk& chunk, int tile) const {
    put<K>(sum, w, chunk.expert, tile, alpha, limit, [&](int j) {
      const int at = i * 8 + j, row = chunk.begin + at;
      return at < chunk.rows ? out + size_t(order ? order[row] : row) * w.rows : nullptr;
    });
  }
};

}  // namespace treadle
