// Products of few tokens with their experts: weights stream from memory, and no warp waits for another.

namespace treadle {

// The weights that a warp multiplies with, tile after tile, through a ring in shared memory: DEPTH stages of at most 128 bytes
// a row.
template <typename K, int DEPTH>
struct WeightStream {
  using T = typename K::T;
  using Packed = typename K::Packed;
  static constexpr int UNITS = Packed::UNITS, SLOT = 32 * UNITS * Packed::BYTES;
  static constexpr int STAGE = SLOT + UNITS * K::GROUPS * 32 * K::SCALE;
  const Experts<T>& w;
  const void* routing;
  bool direct;  // of one token: `routing` are its experts, and not chunks
  unsigned char* ring;
  int count, tiles, begin, end, last;  // chunks, tiles of each, the range of 64 columns; the end of the items, tiles of chunks
  int next, tile, chunk, unit, slot, expert, upcoming, slot_at;

  __device__ Chunk chunk_at(int c) const {
    if (direct) return {int(static_cast<const unsigned*>(routing)[c]), c, 1, 0};
    return static_cast<const Chunk*>(routing)[1 + c];
  }

  __device__ void start(int first) {
    next = first, tile = first % tiles, chunk = first / tiles, unit = begin, slot = 0, slot_at = 0;
    expert = first < last ? chunk_at(chunk).expert : 0;
    upcoming = chunk + 1 < count ? chunk_at(chunk + 1).expert : 0;  // read before it is needed
#pragma unroll
    for (int i = 0; i < DEPTH - 1; ++i) copy_next();
  }

  // The next stage, on over the end of a tile.
  __device__ void copy_next() {
    if (next < last && begin < end) {
      const int lane = threadIdx.x & 31, left = min(UNITS, end - unit);
      unsigned char* to = ring + slot * STAGE;
      const size_t line = size_t(w.columns / 64) * Packed::BYTES;
      constexpr int ROW = UNITS * Packed::BYTES / 16, TILE = 16 * ROW;  // pieces
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const unsigned char* from = K::weights(w, expert, tile, m, unit);
        const unsigned char* own = from + lane / ROW * line + lane % ROW * 16;
#pragma unroll
        for (int c = 0; c < (TILE + 31) / 32; ++c) {
          const int at = c * 32 + lane, row = at / ROW, piece = at % ROW;
          if (piece / Packed::LINE * Packed::SPAN < left && (TILE % 32 == 0 || at < TILE))
            copy_ahead(to + place_of<K::BITS, UNITS>(m * 16 + row, piece) * 16,
                       32 % ROW ? from + row * line + piece * 16 : own + c * (32 / ROW) * line);
        }
      }
      constexpr int PIECES = K::PIECES, ALL = K::SCALE ? UNITS * K::GROUPS * 2 * PIECES : 0;
#pragma unroll
      for (int c = lane; c < ALL; c += 32) {
        const int m = c / PIECES % 2, q = c / PIECES / 2 % K::GROUPS, u = c / PIECES / 2 / K::GROUPS;
        if (u < left) copy_ahead(to + SLOT + c * 16, K::scales(w, expert, tile, m, unit + u, q) + c % PIECES * 16);
      }
      slot = slot + 1 == DEPTH ? 0 : slot + 1;
      unit += UNITS;
      if (unit >= end) pass_tile();
    }
    asm volatile("cp.async.commit_group;");
  }

  __device__ void pass_tile() {
    unit = begin, ++next;
    if (++tile < tiles) return;
    tile = 0, ++chunk, expert = upcoming;
    if (chunk + 1 < count) upcoming = chunk_at(chunk + 1).expert;
  }

  // Waits for the oldest stage, and begins another in place of the one before it.
  __device__ const unsigned char* take() {
    asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 2));
    __syncwarp();
    const unsigned char* oldest = ring + slot_at * STAGE;
    slot_at = slot_at + 1 == DEPTH ? 0 : slot_at + 1;
    copy_next();
    return oldest;
  }
};

// A warp's sums of a tile with the 8 MT rows of a chunk, over its columns.
template <typename K, int MT, typename Stream>
__device__ inline void add_tile(float (&sum)[2][MT][4], Stream& stream, const Chunk& chunk, const typename K::T* x,
                                const int* order, int top) {
  using T = typename K::T;
  constexpr int UNROLL = MT == 1 ? 4 : 1;
  constexpr bool AHEAD = MT <= 2;  // beyond, it takes more registers than it gains
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  const T* from[MT];
#pragma unroll
  for (int i = 0; i < MT; ++i) {
    const int row = chunk.begin + min(i * 8 + g, chunk.rows - 1);
    from[i] = x + size_t(!K::TOKENS ? row : order ? order[row] / top : 0) * stream.w.columns + t * 16;
  }
  auto load = [&](int unit, int i, int half) { return *reinterpret_cast<const uint4*>(from[i] + unit * 64 + half * 8); };
  uint4 coming[AHEAD ? MT : 1][2];
  if (AHEAD && stream.begin < stream.end)
#pragma unroll
    for (int i = 0; i < MT; ++i) coming[AHEAD ? i : 0][0] = load(stream.begin, i, 0), coming[AHEAD ? i : 0][1] = load(stream.begin, i, 1);
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[m][i][e] = 0.0f;
  for (int stage = stream.begin; stage < stream.end; stage += Stream::UNITS) {
    const unsigned char* slot = stream.take();
#pragma unroll UNROLL
    for (int u = 0; u < Stream::UNITS; ++u) {
      const int unit = stage + u;
      if (unit >= stream.end) break;
      uint4 now[AHEAD ? MT : 1][2];
      if (AHEAD)
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            now[AHEAD ? i : 0][half] = coming[AHEAD ? i : 0][half];
            if (unit + 1 < stream.end) coming[AHEAD ? i : 0][half] = load(unit + 1, i, half);
          }
      add_unit<K, Stream::UNITS, 32, MT>(sum, slot, slot + Stream::SLOT, u, 0, [&](int i, int half) {
        return AHEAD ? now[AHEAD ? i : 0][half] : load(unit, i, half);
      });
    }
  }
}

template <typename K, int MT, int PARTS, typename Stream>
__device__ inline void multiply_tile(Stream& stream, const Chunk& chunk, int tile, const typename K::T* x, const int* order,
                                     int top, const Results<K>& results, float4* joint) {
  constexpr int AT_ONCE = MT < 2 ? MT : 2;  // blocks of eight rows whose sums are added up together
  const int lane = threadIdx.x & 31, part = threadIdx.x / 32 % PARTS;
  float sum[2][MT][4];
  add_tile<K, MT>(sum, stream, chunk, x, order, top);
#pragma unroll
  for (int first = 0; first < MT; first += AT_ONCE) {
    if (PARTS > 1) {
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const float(&own)[4] = sum[m][first + i];
          joint[((part * AT_ONCE + i) * 2 + m) * 32 + lane] = make_float4(own[0], own[1], own[2], own[3]);
        }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (PARTS > 1 && part != i) continue;
      float own[2][4];
#pragma unroll
      for (int e = 0; e < 8; ++e) own[e / 4][e % 4] = PARTS > 1 ? 0.0f : sum[e / 4][first + i][e % 4];
#pragma unroll
      for (int p = 0; p < (PARTS > 1 ? PARTS : 0); ++p)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const float4 v = joint[((p * AT_ONCE + i) * 2 + m) * 32 + lane];
          own[m][0] += v.x, own[m][1] += v.y, own[m][2] += v.z, own[m][3] += v.w;
        }
      results.write(own, first + i, stream.w, chunk, tile);
    }
    if (PARTS > 1) __syncthreads();
  }
}

// Few rows: each warp, or four together (PARTS), goes alone over tiles of weights. x comes from memory that the
// multiprocessor's cache holds. Chunks have at most 32 rows; of one token (`direct`), `routing` are its experts.
template <typename K, int PARTS, int DEPTH>
__device__ inline void few_rows(const typename K::T* x, const Experts<typename K::T>& w, const void* routing, bool direct,
                                const int* order, typename K::T* out, int pairs, int top, float alpha, float limit) {
  constexpr int WARPS = 4, SHARES = WARPS / PARTS, SPAN = K::Packed::SPAN;
  using Stream = WeightStream<K, DEPTH>;
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = threadIdx.x >> 5, part = warp % PARTS, tiles = K::tiles(w.rows), spans = w.columns / (64 * SPAN);
  const int count = direct ? pairs : static_cast<const Chunk*>(routing)->expert;
  const long long all = static_cast<long long>(count) * tiles;
  const int share = blockIdx.x * SHARES + warp / PARTS, shares = gridDim.x * SHARES;
  const int first = all * share / shares, last = all * (share + 1) / shares;
  Stream stream = {w, routing, direct, memory + warp * DEPTH * Stream::STAGE, count, tiles, spans * part / PARTS * SPAN,
                   spans * (part + 1) / PARTS * SPAN, last};
  stream.start(first);
  float4* joint = reinterpret_cast<float4*>(memory + WARPS * DEPTH * Stream::STAGE);  // [PARTS][2][2][lane]
  const Results<K> results = {out, K::TOKENS || direct ? nullptr : order, alpha, limit};
  const int* const sources = direct ? nullptr : order;
  Chunk chunk = {};
  int tile = first % tiles;
  for (int item = first, c = first / tiles; item < last; ++item) {
    if (item == first || tile == 0) chunk = stream.chunk_at(c);
    if (chunk.rows <= 8)
      multiply_tile<K, 1, PARTS>(stream, chunk, tile, x, sources, top, results, joint);
    else if (chunk.rows <= 16)
      multiply_tile<K, 2, PARTS>(stream, chunk, tile, x, sources, top, results, joint);
    else
      multiply_tile<K, 4, PARTS>(stream, chunk, tile, x, sources, top, results, joint);
    if (++tile == tiles) tile = 0, ++c;
  }
}

}  // namespace treadle
