// Numbers of MLX's quantization modes, and weights of up to 8 bits out of their packed form.

namespace treadle {

enum Mode { AFFINE = 0, MXFP4 = 1, MXFP8 = 2, NVFP4 = 3 };

// A power of two, of which only the exponent is stored.
__device__ inline float from_e8m0(unsigned v) { return __uint_as_float(v ? v << 23 : 0x00400000u); }

__device__ inline float from_e4m3(unsigned v) {
  const unsigned exponent = v >> 3 & 15, mantissa = v & 7;
  const float size = exponent ? __uint_as_float((exponent + 120) << 23 | mantissa << 20) : mantissa * 0.001953125f;
  return v & 128 ? -size : size;
}

__device__ inline float from_e2m1(unsigned v) {
  const float size = 0.5f * (0xc8643210u >> 4 * (v & 7) & 15);  // no small exponents, which a compiler may flush to zero
  return v & 8 ? -size : size;
}

// A group's factor.
template <int MODE, typename S>
__device__ inline float factor(S v) {
  if constexpr (MODE == AFFINE) return wide(v);
  else if constexpr (MODE == NVFP4) return from_e4m3(v);
  else return from_e8m0(v);
}

// A stored number, before its group's factor.
template <int MODE>
__device__ inline float stored(unsigned v) {
  if constexpr (MODE == AFFINE) return float(v);
  else if constexpr (MODE == MXFP8) return from_e4m3(v);
  else return from_e2m1(v);
}

// Number `i` of eight that lie in BITS bytes.
template <int BITS>
__device__ inline unsigned nth(const unsigned char* bytes, int i) {
  const int bit = i * BITS, byte = bit / 8;
  const unsigned two = bytes[byte] | (byte + 1 < BITS ? bytes[byte + 1] << 8 : 0);
  return two >> bit % 8 & ((1u << BITS) - 1);
}

}  // namespace treadle
