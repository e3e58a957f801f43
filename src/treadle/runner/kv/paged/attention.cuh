// Attention of a step's tokens over keys and values in pages, for tensor cores of compute capability 8.0 and later, where a block has the shared memory (`Kernels.too_large`).
//
// A pool holds one layer's cache: of each page first the keys, [kv heads][PAGE tokens][D], then the values, [kv heads]
// [PAGE tokens][DV]; a latent cache has no values of its own: they are the first DV dimensions of the keys. The queries of one kv head are
// packed: packed row r of a segment is token r / REP and head h * REP + r % REP, so that grouped heads share every byte
// that is read. A work item is a tile of packed rows over a range of cached tokens; where a tile's range is split
// over several items, each leaves a partial sum, and the last one to finish merges them (flash-decoding, Dao et al.
// 2023, without its second launch; the counters are left at zero for the next launch).
//
// Items are 8 ints: first token of the segment, packed rows of the tile, first packed row of the tile, position of the
// segment's first token, first cached token (a multiple of 16), end of the cached tokens, where the segment's
// pages begin in `pages`, and (index of the split << 16 | number of splits); a tile's items lie side by side. Where
// tiles are of few rows they begin with row 0, and the third number is where the tile's partial results are.
//
// A token sees the cached tokens up to its own position, or the last WINDOW of them. In BOUNDED launches it sees those from
// `bounds[2 * token]` to `bounds[2 * token + 1]` instead, wherever it stands itself.

namespace treadle {

// Dimensions that a row of D takes in shared memory, where its 16-byte pieces are swapped about: a power of two. Pages
// hold D.
template <int D>
constexpr int ROW_OF = D <= 64 ? 64 : D <= 128 ? 128 : 256;

constexpr float LOWEST = -1e30f;  // finite: a difference of two is 0, not a NaN
constexpr float NEVER = -3e38f;   // weighs nothing beside LOWEST
constexpr float LOG2_E = 1.44269504f;

// A score, or the capped one, CAP * tanh(score); CAP is a float's bits, 0 for no cap. In units of log2(e).
template <int CAP>
__device__ inline float capped(float score) {
  if constexpr (CAP == 0) return score;
  else return __int_as_float(CAP) * (1.0f - 2.0f / (1.0f + exp2f(2.0f * LOG2_E * score)));
}

// The maximum that a packed row's softmax starts with: its head's attention sink, a token without a value, or none.
template <typename T, int REP>
__device__ inline float sink_of(const T* sinks, int h, int packed) {
  return fmaxf(wide(sinks[h * REP + packed % REP]) * LOG2_E, LOWEST);
}

// Copies `count` numbers, a multiple of 8, by all threads of the grid.
template <typename T>
__device__ inline void copy_rows(const T* from, T* to, size_t count) {
  static_assert(sizeof(T) == 2);
  const size_t threads = size_t(gridDim.x) * gridDim.y * blockDim.x;
  const size_t first = (size_t(blockIdx.y) * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  for (size_t i = first; i < count / 8; i += threads)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
}

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

}  // namespace treadle
