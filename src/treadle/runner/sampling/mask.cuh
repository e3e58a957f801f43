// Masking a row of logits by one bit a token: a thread has PER tokens, whose bits are in one word.

namespace treadle {

__device__ inline float narrow(float v, float) { return v; }

template <typename T, int V, int PER>
__device__ void mask(const T* logits, const int* words, int width, T* masked) {
  const int i = (blockIdx.x * blockDim.x + threadIdx.x) * PER;
  if (i >= V) return;
  const size_t row = blockIdx.y, at = row * V + i;
  const unsigned allowed = unsigned(words[row * width + i / 32]) >> (i % 32);
  Several<T, PER> some = several<PER>(logits + at);
  for (int e = 0; e < PER; ++e)
    if (!(allowed >> e & 1)) some.of[e] = narrow(__int_as_float(0xff800000), T());  // -infinity
  *reinterpret_cast<Several<T, PER>*>(masked + at) = some;
}

}  // namespace treadle
