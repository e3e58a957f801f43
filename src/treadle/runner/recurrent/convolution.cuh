// Causal convolutions of single channels over ragged segments: a token sees the WIDTH - 1 inputs before it, in its segment
// and before that in a slot (WIDTH - 1, C).

namespace treadle::recurrent {

template <typename T>
__device__ inline float as(float v) {
  T kept;
  put(&kept, v);
  return real(kept);
}

// A channel's sum at a token of `segment`, whose inputs are `inputs(token)`; its last inputs go to the segment's slots. `states`
// are those of the channel in slot 0: WIDTH - 1 numbers that are `channels` apart, and `each` to the next slot.
template <int WIDTH, typename T, typename W, typename I>
__device__ inline float convolved(const I& inputs, const W* weights, const Segment& segment, int token, T* states, size_t each,
                                  int channels) {
  constexpr int KEPT = WIDTH - 1;
  const int first = segment.first, source = segment.source, at = token - first;
  const auto input = [&](int i) -> T {
    if (i >= 0) return inputs(first + i);
    T none;
    put(&none, 0.0f);
    return source >= 0 ? states[source * each + size_t(KEPT + i) * channels] : none;
  };
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) sum += real(weights[i]) * real(input(at + i - KEPT));
  const auto keep = [&](int count, int slot) {  // the last of the first `count` inputs
    if (slot < 0) return;
    T* to = states + slot * each;
    if (at < count && at >= count - KEPT) to[size_t(at - (count - KEPT)) * channels] = input(at);
    if (at == 0)
      for (int i = 0; i < KEPT - count; ++i) to[size_t(i) * channels] = input(count - KEPT + i);
  };
  keep(segment.count, segment.target);
  keep(segment.split, segment.aside);
  return sum;
}

template <int WIDTH, bool BIAS, typename T, typename W>
__device__ inline void convolve(const T* inputs, const W* weights, const W* biases, const int* segments, const int* rows,
                                T* states, T* out, int tokens, int channels) {
  const size_t place = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int token = place / channels, c = place % channels;
  if (token >= tokens) return;
  const Segment segment = reinterpret_cast<const Segment*>(segments)[rows[token]];
  if (segment.source < -1) {  // padding
    put(out + place, 0.0f);
    return;
  }
  const auto input = [&](int t) { return inputs[size_t(t) * channels + c]; };
  const float sum = convolved<WIDTH>(input, weights + c * WIDTH, segment, token, states + c, size_t(WIDTH - 1) * channels, channels);
  put(out + place, BIAS ? sum + real(biases[c]) : sum);
}

// The same for channels that are `columns` of x (tokens, outputs), with equally many in each pool, through SiLU if SILU. Those
// from CHANNELS to ALL on are only passed on. If GATED, inputs are multiplied by columns from BEFORE on, and outputs by those
// from AFTER on.
template <int WIDTH, bool BIAS, bool SILU, bool GATED, int CHANNELS, int ALL, int BEFORE, int AFTER, int POOLS, typename T, typename W>
__device__ inline void mix(const T* x, const int* columns, const W* weights, const W* biases, const int* segments, const int* rows,
                           T* const (&pools)[POOLS], T* out, int tokens, int outputs) {
  constexpr int OF_POOL = CHANNELS / POOLS;
  const size_t place = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int token = place / ALL, c = place % ALL;
  if (token >= tokens) return;
  const Segment segment = reinterpret_cast<const Segment*>(segments)[rows[token]];
  if (segment.source < -1) {  // padding
    put(out + place, 0.0f);
    return;
  }
  const T *own = x + columns[c], *row = x + size_t(token) * outputs;
  if (c >= CHANNELS) {
    out[place] = own[size_t(token) * outputs];
    return;
  }
  const auto input = [&](int t) -> T {
    const T value = own[size_t(t) * outputs];
    if (!GATED) return value;
    T product;
    put(&product, real(x[size_t(t) * outputs + BEFORE + c]) * real(value));
    return product;
  };
  T* states = pools[0];
#pragma unroll
  for (int i = 1; i < POOLS; ++i)
    if (c / OF_POOL == i) states = pools[i];
  float y = convolved<WIDTH>(input, weights + c * WIDTH, segment, token, states + c % OF_POOL, size_t(WIDTH - 1) * OF_POOL, OF_POOL);
  if constexpr (BIAS) y += real(biases[c]);
  if (SILU || GATED) y = as<T>(y);
  if (SILU) y /= 1.0f + expf(-y);
  if (GATED) y *= real(row[AFTER + c]);
  put(out + place, y);
}

}  // namespace treadle::recurrent
