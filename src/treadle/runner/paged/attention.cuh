// Attention of a step's tokens over keys and values in pages, for tensor cores of compute capability 8.0 and later, where a block has the shared memory (`Kernels.too_large`).
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

}  // namespace treadle
