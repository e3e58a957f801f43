// Causal convolutions of single channels over ragged segments: a token sees the WIDTH - 1 inputs before it, in its segment
// and before that in a slot (WIDTH - 1, C).

namespace treadle::recurrent {

template <int WIDTH, bool BIAS, typename T, typename W>
__device__ inline void convolve(const T* inputs, const W* weights, const W* biases, const int* segments, const int* rows,
                                T* states, T* out, int tokens, int channels) {
  constexpr int KEPT = WIDTH - 1;
  const size_t place = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int token = place / channels, c = place % channels;
  if (token >= tokens) return;
  const int4 segment = reinterpret_cast<const int4*>(segments)[rows[token]];
  const int first = segment.x, count = segment.y, source = segment.z, target = segment.w, at = token - first;
  if (source < -1) {  // padding
    put(out + place, 0.0f);
    return;
  }
  const size_t each = size_t(KEPT) * channels;
  const auto input = [&](int i) -> T {
    if (i >= 0) return inputs[size_t(first + i) * channels + c];
    T none;
    put(&none, 0.0f);
    return source >= 0 ? states[source * each + size_t(KEPT + i) * channels + c] : none;
  };
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) sum += real(weights[c * WIDTH + i]) * real(input(at + i - KEPT));
  if constexpr (BIAS) sum += real(biases[c]);
  put(out + place, sum);
  if (target < 0) return;
  T* to = states + target * each + c;
  if (at >= count - KEPT) to[size_t(at - (count - KEPT)) * channels] = input(at);
  if (at == 0)
    for (int i = 0; i < KEPT - count; ++i) to[size_t(i) * channels] = input(count - KEPT + i);
}

}  // namespace treadle::recurrent
