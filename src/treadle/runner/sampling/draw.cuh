// Picking a token of a row of logits, one block of THREADS threads a row.
//
// A token's weight is e to the power of its distance from the largest logit, over the temperature, as a whole number of
// 2^-40: sums of whole numbers do not depend on who adds first. Where a row keeps only its most probable tokens, `limit`
// is the last of them, in order of distance and then of index: it is looked for in a histogram of distances, and inside
// one of its buckets by sorting. The token is then the one at which the running sum of what is kept, in the vocabulary's
// order, goes over the row's share of the whole.

namespace treadle {

using Whole = unsigned long long;

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int BUCKETS = 2048, PER_UNIT = 64;  // of distance: beyond 32 nothing weighs anything
constexpr int SORTED = 2048, EACH = BUCKETS / THREADS;
constexpr Whole EVERYTHING = ~0ull;

__device__ inline float wide(float v) { return v; }
__device__ inline float infinity() { return __int_as_float(0x7f800000); }

struct Row {
  float inverse;   // of the temperature; 0: greedy
  float min_p;
  unsigned top_k;  // 0: off
  float top_p;     // above 1: off
  Whole chance;    // of 2^48
};

struct Shared {
  Whole sums[WARPS];
  Whole bucket_sums[BUCKETS];
  unsigned bucket_counts[BUCKETS];
  Whole sorted[SORTED];
  Whole answer;
  int size, found;
};

__device__ inline Whole weight(float distance) {
  return __float2ull_rz(exp2f(distance * -1.44269504f) * 1099511627776.0f);
}

__device__ inline bool counts(float distance, const Row& row) {
  return distance < 32.0f && exp2f(distance * -1.44269504f) >= row.min_p;
}

__device__ inline Whole key(float distance, int index) { return Whole(__float_as_uint(distance)) << 32 | unsigned(index); }

__device__ inline Whole weight_of(Whole key) { return weight(__uint_as_float(unsigned(key >> 32))); }

// What comes before each thread's value, and in `total` what all come to.
__device__ inline Whole before(Whole value, Whole* sums, Whole& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Whole sum = value;
  for (int i = 1; i < 32; i *= 2) {
    const Whole other = __shfl_up_sync(~0u, sum, i);
    if (lane >= i) sum += other;
  }
  __syncthreads();
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  Whole earlier = 0;
  total = 0;
  for (int i = 0; i < WARPS; ++i) {
    if (i == warp) earlier = total;
    total += sums[i];
  }
  return earlier + sum - value;
}

// Calls f(logit, index) for what falls to lane `lane` of `lanes` between `first` and `last`.
template <int PER, typename T, typename F>
__device__ void each(const T* logits, int first, int last, int lane, int lanes, F f) {
  for (int i = first + lane * PER; i < last; i += lanes * PER) {
    const Several<T, PER> some = several<PER>(logits + i);
    for (int e = 0; e < PER; ++e) f(wide(some.of[e]), i + e);
  }
}

// The largest logit and the first index that has it.
template <int V, int PER, typename T>
__device__ void largest(const T* logits, Shared& shared, float& most, int& index) {
  most = -infinity();
  index = V;
  each<PER>(logits, 0, V, threadIdx.x, THREADS, [&](float x, int i) {
    if (x > most || x == most && i < index) most = x, index = i;
  });
  for (int i = 16; i; i /= 2) {
    const float x = __shfl_xor_sync(~0u, most, i);
    const int other = __shfl_xor_sync(~0u, index, i);
    if (x > most || x == most && other < index) most = x, index = other;
  }
  if (threadIdx.x % 32 == 0) shared.sums[threadIdx.x / 32] = key(most, index);
  __syncthreads();
  for (int i = 0; i < WARPS; ++i) {
    const float x = __uint_as_float(unsigned(shared.sums[i] >> 32));
    const int other = int(unsigned(shared.sums[i]));
    if (x > most || x == most && other < index) most = x, index = other;
  }
  __syncthreads();
  if (index == V) index = 0;
}

// How many tokens, and how much weight, each bucket and those before it have; `total` of all.
template <int V, int PER, typename T>
__device__ void histogram(const T* logits, float most, const Row& row, Shared& shared, unsigned& count, Whole& total) {
  for (int i = threadIdx.x; i < BUCKETS; i += THREADS) {
    shared.bucket_sums[i] = 0;
    shared.bucket_counts[i] = 0;
  }
  __syncthreads();
  each<PER>(logits, 0, V, threadIdx.x, THREADS, [&](float x, int) {
    const float distance = (most - x) * row.inverse;
    if (!counts(distance, row)) return;
    const int bucket = int(distance * PER_UNIT);
    const Whole w = weight(distance);
    unsigned* halves = reinterpret_cast<unsigned*>(&shared.bucket_sums[bucket]);
    const unsigned low = unsigned(w), old = atomicAdd(halves, low), high = unsigned(w >> 32) + (old + low < low);
    if (high) atomicAdd(halves + 1, high);
    atomicAdd(&shared.bucket_counts[bucket], 1u);
  });
  __syncthreads();
  const int at = threadIdx.x * EACH;
  Whole mine = 0, all = 0;
  unsigned here = 0;
  for (int i = at; i < at + EACH; ++i) {
    mine += shared.bucket_sums[i];
    here += shared.bucket_counts[i];
  }
  Whole sum = before(mine, shared.sums, total), earlier = before(here, shared.sums, all);
  count = unsigned(all);
  for (int i = at; i < at + EACH; ++i) {
    shared.bucket_sums[i] = sum += shared.bucket_sums[i];
    shared.bucket_counts[i] = unsigned(earlier += shared.bucket_counts[i]);
  }
  __syncthreads();
}

// The first bucket for which `enough` holds.
template <typename F>
__device__ int first_bucket(Shared& shared, F enough) {
  if (threadIdx.x == 0) shared.found = BUCKETS - 1;
  __syncthreads();
  for (int i = threadIdx.x * EACH; i < (threadIdx.x + 1) * EACH; ++i)
    if (enough(i) && (i == 0 || !enough(i - 1))) shared.found = i;
  __syncthreads();
  const int found = shared.found;
  __syncthreads();
  return found;
}

// Puts the keys of a bucket's tokens into `shared.sorted`, in order; false where they are too many.
template <int V, int PER, typename T>
__device__ bool sort_bucket(const T* logits, float most, const Row& row, int bucket, Shared& shared) {
  if (threadIdx.x == 0) shared.size = 0;
  for (int i = threadIdx.x; i < SORTED; i += THREADS) shared.sorted[i] = EVERYTHING;
  __syncthreads();
  each<PER>(logits, 0, V, threadIdx.x, THREADS, [&](float x, int i) {
    const float distance = (most - x) * row.inverse;
    if (!counts(distance, row) || int(distance * PER_UNIT) != bucket) return;
    const int place = atomicAdd(&shared.size, 1);
    if (place < SORTED) shared.sorted[place] = key(distance, i);
  });
  __syncthreads();
  const int size = shared.size;
  if (size > SORTED) return false;
  int padded = 2;
  while (padded < size) padded *= 2;
  for (int run = 2; run <= padded; run *= 2) {  // bitonic
    for (int step = run / 2; step; step /= 2) {
      for (int i = threadIdx.x; i < padded; i += THREADS) {
        const int other = i ^ step;
        const Whole a = shared.sorted[i], b = shared.sorted[other];
        if (other > i && (a > b) == ((i & run) == 0)) {
          shared.sorted[i] = b;
          shared.sorted[other] = a;
        }
      }
      __syncthreads();
    }
  }
  return true;
}

// Of the first `size` sorted keys, those that come before the running sum, which begins at `sum`, has reached `enough`:
// the last of them in `limit`; what the sum comes to with all `size` in `total`.
__device__ inline void cut_sorted(Shared& shared, int size, Whole sum, double enough, Whole& limit, Whole& total) {
  const int at = threadIdx.x * (SORTED / THREADS);
  Whole mine = 0;
  for (int i = at; i < at + SORTED / THREADS; ++i) mine += i < size ? weight_of(shared.sorted[i]) : 0;
  Whole here = sum + before(mine, shared.sums, total);
  total += sum;
  if (threadIdx.x == 0) shared.answer = shared.sorted[0];
  __syncthreads();
  for (int i = at; i < at + SORTED / THREADS && i < size; ++i) {
    const Whole next = here + weight_of(shared.sorted[i]);
    if (double(here) < enough && (i == size - 1 || !(double(next) < enough))) shared.answer = shared.sorted[i];
    here = next;
  }
  __syncthreads();
  limit = shared.answer;
  __syncthreads();
}

// The last key that top_k and top_p keep; false where the tokens about as probable as that are too many to sort.
template <int V, int PER, typename T>
__device__ bool last_kept(const T* logits, float most, const Row& row, Shared& shared, Whole& limit) {
  unsigned count, size = 0;
  Whole total;
  int sorted = -1;
  histogram<V, PER>(logits, most, row, shared, count, total);
  limit = EVERYTHING;
  if (row.top_k && row.top_k < count) {
    sorted = first_bucket(shared, [&](int i) { return shared.bucket_counts[i] >= row.top_k; });
    if (!sort_bucket<V, PER>(logits, most, row, sorted, shared)) return false;
    size = row.top_k - (sorted ? shared.bucket_counts[sorted - 1] : 0);
    limit = shared.sorted[size - 1];
    Whole same;
    cut_sorted(shared, size, sorted ? shared.bucket_sums[sorted - 1] : 0, infinity(), same, total);
  }
  if (row.top_p > 1.0f) return true;
  const double enough = fmax(double(row.top_p) * double(total), 0.5);
  if (double(total) <= enough) return true;
  const int bucket = first_bucket(shared, [&](int i) { return double(shared.bucket_sums[i]) >= enough; });
  if (bucket != sorted) {
    if (!sort_bucket<V, PER>(logits, most, row, bucket, shared)) return false;
    size = shared.size;
  }
  cut_sorted(shared, size, bucket ? shared.bucket_sums[bucket - 1] : 0, enough, limit, total);
  return true;
}

// The token at which the running sum of the weights up to `limit` goes over the row's chance.
template <int V, int PER, typename T>
__device__ int drawn(const T* logits, float most, const Row& row, Whole limit, Shared& shared) {
  constexpr int SPAN = (V + WARPS * 32 * PER - 1) / (WARPS * 32 * PER) * 32 * PER;  // a warp's
  constexpr int MINE = (SPAN + THREADS * PER - 1) / (THREADS * PER) * PER;          // a thread's, of that
  const auto kept = [&](float x, int i) {
    const float distance = (most - x) * row.inverse;
    return counts(distance, row) && key(distance, i) <= limit ? weight(distance) : 0;
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Whole sum = 0, total = 0;
  each<PER>(logits, warp * SPAN, min(V, (warp + 1) * SPAN), lane, 32, [&](float x, int i) { sum += kept(x, i); });
  for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  __syncthreads();
  if (lane == 0) shared.sums[warp] = sum;
  __syncthreads();
  for (int i = 0; i < WARPS; ++i) total += shared.sums[i];
  const Whole target = __umul64hi(total, row.chance << 16);
  Whole passed = 0;
  int span = 0;
  while (span < WARPS - 1 && passed + shared.sums[span] <= target) passed += shared.sums[span++];
  const int end = min(V, (span + 1) * SPAN), first = span * SPAN + threadIdx.x * MINE, last = min(end, first + MINE);
  sum = 0;
  each<PER>(logits, first, last, 0, 1, [&](float x, int i) { sum += kept(x, i); });
  Whole here = passed + before(sum, shared.sums, total);
  if (here <= target && target < here + sum) {
    each<PER>(logits, first, last, 0, 1, [&](float x, int i) {
      const Whole w = kept(x, i);
      if (here <= target && target < here + w) shared.found = i;
      here += w;
    });
  }
  __syncthreads();
  return shared.found;
}

template <typename T, int V, int PER>
__device__ void draw(const T* all, const int* asked, int* tokens, int* spilled) {
  __shared__ Shared shared;
  const T* logits = all + size_t(blockIdx.x) * V;
  const int* of = asked + blockIdx.x * 6;
  const Row row = {__int_as_float(of[0]), __int_as_float(of[1]), unsigned(of[2]), __int_as_float(of[3]),
                   Whole(of[4]) << 24 | Whole(of[5])};
  float most;
  int token;
  bool fits = true;
  largest<V, PER>(logits, shared, most, token);
  if (row.inverse > 0.0f && most > -infinity() && most < infinity()) {
    Whole limit = EVERYTHING;
    if (row.top_k || row.top_p <= 1.0f) fits = last_kept<V, PER>(logits, most, row, shared, limit);
    if (fits) token = drawn<V, PER>(logits, most, row, limit, shared);
  }
  if (threadIdx.x == 0) {
    tokens[blockIdx.x] = token;
    spilled[blockIdx.x] = !fits;
  }
}

}  // namespace treadle
