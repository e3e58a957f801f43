// Weights of experts as operands of a tensor core: plain (16 bits), or as MLX packs them along K (affine, mxfp4, nvfp4, mxfp8).
//
// A unit is 64 columns of a row. Thread t of four has 16 of them in all products, 8 a half, so that a half of x is one read of
// 16 bytes. Weights of 2 and 4 bits come out as columns i and i + 4 of the eight side by side, and x is brought into the same
// order. A dequantized weight is rounded once, as MLX's dequantization rounds it.

namespace treadle {

enum Mode { PLAIN, AFFINE, MXFP4, NVFP4, MXFP8 };

__device__ inline void multiply(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
                                __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void multiply(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
                                __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// a b + c of two numbers, each rounded once.
__device__ inline unsigned fma_of_two(unsigned a, unsigned b, unsigned c, __nv_bfloat16) {
  unsigned d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ inline unsigned fma_of_two(unsigned a, unsigned b, unsigned c, __half) {
  unsigned d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Constants of a type, twice in a register: 1; -0; the number whose last bits hold a whole number that is added; minus that.
__device__ inline unsigned two_ones(__nv_bfloat16) { return 0x3f803f80; }
__device__ inline unsigned two_ones(__half) { return 0x3c003c00; }
__device__ inline unsigned two_bases(__nv_bfloat16) { return 0x43004300; }  // 128
__device__ inline unsigned two_bases(__half) { return 0x64006400; }         // 1024
constexpr unsigned NEGATIVE = 0x80008000;

// (word & MASK) | base, in one instruction, which the compiler does not find.
template <unsigned MASK>
__device__ inline unsigned picked(unsigned word, unsigned base) {
  unsigned two;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(two) : "r"(word), "n"(MASK), "r"(base));
  return two;
}

// Two numbers of 4 bits (e2m1) at bits 4 i and 4 i + 16, times 2^-126 or 2^-14.
__device__ inline unsigned two_e2m1(unsigned word, int i, __nv_bfloat16) {
  const unsigned magnitude = i < 2 ? word << (6 - 4 * i) : word >> (4 * i - 6);
  return picked<NEGATIVE>(word << (12 - 4 * i), magnitude & 0x01c001c0);
}
__device__ inline unsigned two_e2m1(unsigned word, int i, __half) {
  const unsigned magnitude = i < 3 ? word << (9 - 4 * i) : word >> (4 * i - 9);
  return picked<NEGATIVE>(word << (12 - 4 * i), magnitude & 0x0e000e00);
}
__device__ inline unsigned lift_of_e2m1(__nv_bfloat16) { return 0x7e807e80; }  // 2^126
__device__ inline unsigned lift_of_e2m1(__half) { return 0x74007400; }         // 2^14

// Bytes 2 i and 2 i + 1 (e4m3), times 2^-120 or 2^-8.
__device__ inline unsigned two_e4m3(unsigned word, int i, __nv_bfloat16) {
  const unsigned high = __byte_perm(word, 0, i ? 0x3424 : 0x1404);
  return picked<NEGATIVE>(high, high >> 4 & 0x07f007f0);
}
__device__ inline unsigned two_e4m3(unsigned word, int i, __half) {
  const unsigned high = __byte_perm(word, 0, i ? 0x3424 : 0x1404);
  return picked<NEGATIVE>(high, high >> 1 & 0x3f803f80);
}

// A power of two by its exponent with the bias of `e8m0`, 127, plus `more`: as far as the type has it.
__device__ inline unsigned power(int exponent, int more, __nv_bfloat16) { return min(max(exponent + more, 0), 254) << 7; }
__device__ inline unsigned power(int exponent, int more, __half) {
  return min(max(exponent - 112 + more, 0), 30) << 10;
}
__device__ inline int lift_exponent(Mode mode, __nv_bfloat16) { return mode == MXFP4 ? 126 : 120; }
__device__ inline int lift_exponent(Mode mode, __half) { return mode == MXFP4 ? 14 : 8; }

// What numbers are times and plus, each twice in a register.
struct Scale { unsigned factor, bias; };

template <typename T, Mode MODE>
__device__ inline Scale scale_at(const unsigned char* at) {
  if (MODE == AFFINE) {
    const unsigned both = *reinterpret_cast<const unsigned*>(at);
    return {__byte_perm(both, 0, 0x1010), __byte_perm(both, 0, 0x3232)};
  }
  if (MODE == NVFP4) {
    const int e = *at >> 3 & 15, m = *at & 7;  // e4m3
    const float scale = float(e ? 8 + m : m) * __uint_as_float((max(e, 1) + 117) << 23);
    return {pack(scale, scale, T()), NEGATIVE};
  }
  const unsigned one = power(*at, lift_exponent(MODE, T()), T());
  return {one | one << 16, NEGATIVE};
}

// Bytes 2 i and 2 i + 1, times the scale and plus the bias.
__device__ inline unsigned two_of_bytes(unsigned word, int i, Scale scale, __nv_bfloat16 kind) {
  const float low = __uint_as_float(__byte_perm(word, 0x4b000000, i ? 0x7542 : 0x7540)) - 8388608.0f;
  const float high = __uint_as_float(__byte_perm(word, 0x4b000000, i ? 0x7543 : 0x7541)) - 8388608.0f;
  const float factor = __uint_as_float(scale.factor << 16), bias = __uint_as_float(scale.bias << 16);
  return pack(factor * low + bias, factor * high + bias, kind);
}
__device__ inline unsigned two_of_bytes(unsigned word, int i, Scale scale, __half kind) {
  const unsigned two = __byte_perm(word, 0x64646464, i ? 0x4342 : 0x4140);
  return fma_of_two(fma_of_two(two, two_ones(kind), two_bases(kind) | NEGATIVE, kind), scale.factor, scale.bias, kind);
}

// The columns of 3 and 5 bits come in pairs of units: of these a row has whole pieces of 16 bytes.
template <int BITS>
struct Packing {
  static constexpr bool EVEN = 16 % BITS == 0;  // a number never lies in two words
  static constexpr int SPAN = BITS % 2 ? 2 : 1, LINE = BITS * SPAN / 2;  // units, and the pieces of 16 bytes of a row in them
  static constexpr int UNITS = EVEN ? 16 / BITS : BITS == 3 ? 4 : 2;     // at most 128 bytes
  static constexpr int BYTES = 8 * BITS;                                 // of a row's unit
};

// What a thread has of a row's unit, 16 columns; of plain weights a half of it.
template <int BITS>
struct alignas(!Packing<BITS>::EVEN ? 4 : BITS == 16 ? 16 : 2 * BITS) Words { unsigned of[BITS == 16 ? 4 : (BITS + 1) / 2]; };

// Two numbers of a width that words are no multiple of, from the one of that index on.
template <int BITS>
__device__ inline unsigned two_across(const Words<BITS>& words, int index) {
  unsigned two[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int bit = (index + e) * BITS, word = bit / 32, shift = bit % 32;
    two[e] = words.of[word] >> shift;
    if (shift + BITS > 32) two[e] |= words.of[word + 1] << (32 - shift);
    two[e] &= (1u << BITS) - 1;
  }
  return two[0] | two[1] << 16;
}

// Eight columns as operands.
template <typename T, Mode MODE, int BITS>
__device__ inline void dequantize(unsigned (&a)[4], const Words<BITS>& words, int half, Scale scale) {
  const T kind = T();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (MODE == PLAIN) {
      a[i] = words.of[i];
    } else if constexpr (MODE == MXFP8) {
      a[i] = fma_of_two(two_e4m3(words.of[half * 2 + i / 2], i % 2, kind), scale.factor, NEGATIVE, kind);
    } else if constexpr (MODE == MXFP4) {
      a[i] = fma_of_two(two_e2m1(words.of[half], i, kind), scale.factor, NEGATIVE, kind);
    } else if constexpr (MODE == NVFP4) {
      const unsigned whole = fma_of_two(two_e2m1(words.of[half], i, kind), lift_of_e2m1(kind), NEGATIVE, kind);
      a[i] = fma_of_two(whole, scale.factor, NEGATIVE, kind);
    } else if constexpr (BITS == 8) {
      a[i] = two_of_bytes(words.of[half * 2 + i / 2], i % 2, scale, kind);
    } else if constexpr (!Packing<BITS>::EVEN) {
      const unsigned two = two_across<BITS>(words, half * 8 + 2 * i) | two_bases(kind);
      const unsigned whole = fma_of_two(two, two_ones(kind), two_bases(kind) | NEGATIVE, kind);
      a[i] = fma_of_two(whole, scale.factor, scale.bias, kind);
    } else {
      constexpr unsigned MASK = BITS == 4 ? 0x000f000f : 0x00030003;
      const unsigned word = BITS == 4 ? words.of[half] : __byte_perm(words.of[0], 0, half ? 0x4342 : 0x4140);
      const unsigned two = picked<MASK>(word >> BITS * i, two_bases(kind));
      const unsigned whole = fma_of_two(two, two_ones(kind), two_bases(kind) | NEGATIVE, kind);
      a[i] = fma_of_two(whole, scale.factor, scale.bias, kind);
    }
  }
}

// Eight columns of x in the order of such weights' operands.
template <int BITS>
__device__ inline uint4 arranged(uint4 v) {
  if (BITS != 4 && BITS != 2) return v;
  return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                    __byte_perm(v.y, v.w, 0x7632));
}

// The place of 16 bytes of a row in shared memory that has UNITS units of it, so that no two of eight threads meet in a bank.
template <int BITS, int UNITS>
__device__ inline int place_of(int row, int piece) {
  constexpr int LINE = BITS / 2, PIECES = UNITS * BITS / 2;
  const int turn = BITS == 16 ? row & 1 : Packing<BITS>::EVEN && PIECES == 8 ? (row & (8 / LINE - 1)) * LINE : 0;
  return row * PIECES + (piece ^ turn);
}

template <int BITS, int UNITS>
__device__ inline Words<BITS> words_of(const unsigned char* slot, int row, int unit, int half) {
  const int t = threadIdx.x & 3;
  if constexpr (BITS == 3 || BITS == 5) {  // at a multiple of two bytes
    const unsigned char* at = slot + (row * UNITS + unit) * Packing<BITS>::BYTES + t * 2 * BITS;
    const unsigned short* halves = reinterpret_cast<const unsigned short*>(at);
    Words<BITS> words;
#pragma unroll
    for (int i = 0; i < BITS; i += 2) words.of[i / 2] = halves[i] | (i + 1 < BITS ? unsigned(halves[i + 1]) << 16 : 0u);
    return words;
  } else if constexpr (BITS == 6) {
    return *reinterpret_cast<const Words<BITS>*>(slot + (row * UNITS + unit) * Packing<BITS>::BYTES + t * 2 * BITS);
  } else {
    constexpr int LINE = BITS / 2;
    const int piece = unit * LINE + (BITS == 16 ? 2 * t + half : t * LINE / 4);
    const int inside = BITS < 8 ? t % (16 / (2 * BITS)) * 2 * BITS : 0;
    return *reinterpret_cast<const Words<BITS>*>(slot + place_of<BITS, UNITS>(row, piece) * 16 + inside);
  }
}

}  // namespace treadle
