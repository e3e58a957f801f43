// The PTX instructions that the kernels' text has, by the name that `emulated_text` gives them: results first, then operands.
#pragma once

namespace emulated {

// Operands as their constraints say: a register of 32 bits, one of a float, an address of 64 bits.
template <typename T>
inline T& reg(T& v) {
  static_assert(sizeof(T) == 4 && T(0.5f) == T(0), "a constraint of 32 bits");
  return v;
}
template <typename T>
inline unsigned reg(const T& v) {
  static_assert(sizeof(T) == 4 && T(0.5f) == T(0), "a constraint of 32 bits");
  return v;
}
inline float& real(float& v) { return v; }
inline float real(const float& v) { return v; }
template <typename T>
inline const void* far(T* v) { return v; }

ONCE unsigned char* shared_at(unsigned address, const char* what) {
  if (address % 16) fail("%s at the shared address %u, which is no multiple of 16", what, address);
  if (address < memory_start || address + 16 > memory_start + memory_size)
    fail("%s %ld bytes from the beginning of %zu bytes of shared memory", what, long(address) - long(memory_start), memory_size);
  return arena + address;
}

// A copy comes as late as it may: with the barrier after the wait for its group. Until then there is garbage.
ONCE void copy_async(unsigned to, const void* from, unsigned bytes = 16) {
  const auto* first = static_cast<const unsigned char*>(from);
  memset(shared_at(to, "cp.async"), 0xff, 16);
  if (uintptr_t(from) % 16) fail("cp.async from %p, which is no multiple of 16", from);
  bool inside = bytes == 0;
  for (int i = 0; i < known_arrays; ++i) inside |= first >= arrays[i].from && first + bytes <= arrays[i].to;
  if (!inside || bytes > 16) fail("cp.async of %u bytes from outside of all arrays", bytes);
  if (self->last_copy - self->first_copy == MOST_COPIES) fail("more copies on their way than are emulated");
  self->copies[self->last_copy++ % MOST_COPIES] = {to, bytes, from, self->groups};
}
inline void copy_async_off(unsigned to, const void* from, unsigned bytes, unsigned to_by, unsigned from_by) {
  copy_async(to + to_by, static_cast<const unsigned char*>(from) + from_by, bytes);
}
inline void commit_group() { ++self->groups; }
ONCE void wait_group(int left) {
  long& at = self->waited_copy;
  while (at < self->last_copy && self->copies[at % MOST_COPIES].group < self->groups - left) ++at;
}

template <int TABLE>
inline void lop3(unsigned& d, unsigned a, unsigned b, unsigned c) {
  d = 0;
  for (int i = 0; i < 8; ++i)
    if (TABLE >> i & 1) d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
}

inline void ex2(float& d, float a) {
  const auto flushed = [](float v) { return fabsf(v) < 0x1p-126f ? copysignf(0.0f, v) : v; };
  d = flushed(exp2f(flushed(a)));
}

template <typename P>
inline P& of(void* const* lanes, int i) {
  if (!lanes[i]) fail("an instruction of a warp without lane %d", i);
  return *static_cast<P*>(lanes[i]);
}

struct Matrices { unsigned address, got[4]; };

template <bool TRANSPOSED>
inline void load_rows(void* const* lanes) {
  for (int m = 0; m < 4; ++m) {
    uint16_t rows[8][8];
    for (int r = 0; r < 8; ++r) memcpy(rows[r], shared_at(of<Matrices>(lanes, m * 8 + r).address, "ldmatrix"), 16);
    for (int i = 0; i < 32; ++i) {
      const int g = i / 4, t = i % 4 * 2;
      of<Matrices>(lanes, i).got[m] =
          TRANSPOSED ? rows[t][g] | unsigned(rows[t + 1][g]) << 16 : rows[g][t] | unsigned(rows[g][t + 1]) << 16;
    }
  }
}
ONCE_TEMPLATE void load_rows<false>(void* const*);
ONCE_TEMPLATE void load_rows<true>(void* const*);
template <bool TRANSPOSED>
inline void ldmatrix(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned address) {
  Matrices mine = {address, {}};
  together("ldmatrix", &mine, load_rows<TRANSPOSED>);
  a = mine.got[0], b = mine.got[1], c = mine.got[2], d = mine.got[3];
}

ONCE void movmatrix(unsigned& d, unsigned a) {
  struct Both { unsigned own, got; } mine = {a, 0};
  together("movmatrix", &mine, [](void* const* lanes) {
    for (int i = 0; i < 32; ++i) {
      const int g = i / 4, t = i % 4 * 2, part = g % 2 * 16;  // rows t and t + 1 of column g
      const unsigned low = of<Both>(lanes, t * 4 + g / 2).own >> part & 0xffff;
      of<Both>(lanes, i).got = low | (of<Both>(lanes, (t + 1) * 4 + g / 2).own >> part & 0xffff) << 16;
    }
  });
  d = mine.got;
}

struct Product { unsigned a[4], b[2]; float d[4]; };
typedef float Eight __attribute__((vector_size(32)));

// d += a b for rows of 16 of a, K of them, and of 8 of b.
template <int K>
inline void add_product(void* const* lanes, const float (&a)[16][K], const float (&b)[K][8]) {
  for (int r = 0; r < 16; ++r) {
    Eight sum = {};
    for (int k = 0; k < K; ++k) {
      Eight line;
      memcpy(&line, b[k], sizeof line);
      sum += a[r][k] * line;
    }
    for (int n = 0; n < 8; ++n) of<Product>(lanes, r % 8 * 4 + n / 2).d[r / 8 * 2 + n % 2] += sum[n];
  }
}

inline float wide_bf16(uint16_t v) { return __bfloat162float({v}); }
inline float wide_f16(uint16_t v) { return __half2float({v}); }
inline uint16_t bits_of_bf16(float v) { return __float2bfloat16(v).bits; }
inline uint16_t bits_of_f16(float v) { return __float2half(v).bits; }

// Rounded twice where a product and its sum need more than a float's bits: not with the whole numbers that weights are.
template <float (*WIDE)(uint16_t), uint16_t (*BITS)(float)>
inline void fma_of_two(unsigned& d, unsigned a, unsigned b, unsigned c) {
  d = 0;
  for (int i = 0; i < 32; i += 16) d |= unsigned(BITS(fmaf(WIDE(a >> i), WIDE(b >> i), WIDE(c >> i)))) << i;
}
inline void fma_bf16(unsigned& d, unsigned a, unsigned b, unsigned c) { fma_of_two<wide_bf16, bits_of_bf16>(d, a, b, c); }
inline void fma_f16(unsigned& d, unsigned a, unsigned b, unsigned c) { fma_of_two<wide_f16, bits_of_f16>(d, a, b, c); }

inline float wide_tf32(unsigned v) { return __uint_as_float(v & 0xffffe000); }

template <float (*WIDE)(uint16_t)>
inline void multiply_16(void* const* lanes) {
  float a[16][16], b[16][8];
  for (int i = 0; i < 32; ++i) {
    const Product& own = of<Product>(lanes, i);
    const int g = i / 4, t = i % 4 * 2;
    for (int e = 0; e < 2; ++e) {
      for (int j = 0; j < 4; ++j) a[g + j % 2 * 8][t + e + j / 2 * 8] = WIDE(own.a[j] >> 16 * e);
      for (int j = 0; j < 2; ++j) b[t + e + j * 8][g] = WIDE(own.b[j] >> 16 * e);
    }
  }
  add_product<16>(lanes, a, b);
}
ONCE_TEMPLATE void multiply_16<wide_bf16>(void* const*);
ONCE_TEMPLATE void multiply_16<wide_f16>(void* const*);
ONCE void multiply_8(void* const* lanes) {
  float a[16][8], b[8][8];
  for (int i = 0; i < 32; ++i) {
    const Product& own = of<Product>(lanes, i);
    const int g = i / 4, t = i % 4;
    for (int j = 0; j < 4; ++j) a[g + j % 2 * 8][t + j / 2 * 4] = wide_tf32(own.a[j]);
    for (int j = 0; j < 2; ++j) b[t + j * 4][g] = wide_tf32(own.b[j]);
  }
  add_product<8>(lanes, a, b);
}

ONCE void multiply(const char* what, All all, float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1,
                     unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  Product mine = {{a0, a1, a2, a3}, {b0, b1}, {d0, d1, d2, d3}};
  together(what, &mine, all);
  d0 = mine.d[0], d1 = mine.d[1], d2 = mine.d[2], d3 = mine.d[3];
}
template <typename... Operands>
inline void mma_bf16(Operands&&... operands) { multiply("mma.bf16", multiply_16<wide_bf16>, operands...); }
template <typename... Operands>
inline void mma_f16(Operands&&... operands) { multiply("mma.f16", multiply_16<wide_f16>, operands...); }
template <typename... Operands>
inline void mma_tf32(Operands&&... operands) { multiply("mma.tf32", multiply_8, operands...); }

}  // namespace emulated
