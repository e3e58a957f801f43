// What CUDA gives to a kernel's text, on the host.
#pragma once
#include <math.h>

#include "emulated_arrays.h"

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define threadIdx (emulated::self->index)
#define blockIdx emulated::block
#define blockDim emulated::shape
#define gridDim emulated::blocks

// ---- numbers ----

template <typename To, typename From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __uint_as_float(unsigned v) { return same_bits<float>(v); }
inline float __int_as_float(int v) { return same_bits<float>(v); }
inline unsigned __float_as_uint(float v) { return same_bits<unsigned>(v); }
inline int __float_as_int(float v) { return same_bits<int>(v); }

struct __nv_bfloat16 { uint16_t bits; };
struct __half { uint16_t bits; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
struct alignas(4) __half2 { __half x, y; };

inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(unsigned(v.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16(float v) {
  const unsigned u = __float_as_uint(v);
  if (v != v) return {0x7fff};
  return {uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline float __half2float(__half v) {
  const unsigned magnitude = (v.bits & 0x7fffu) << 13, sign = (v.bits & 0x8000u) << 16;
  const bool finite = (v.bits & 0x7c00) != 0x7c00;
  const float wide = finite ? __uint_as_float(magnitude) * 0x1p112f : __uint_as_float(magnitude | 0x7f800000);
  return __uint_as_float(__float_as_uint(wide) | sign);
}
inline __half __float2half(float v) {
  unsigned u = __float_as_uint(v);
  const unsigned sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return {0x7fff};
  if (u >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // it rounds to 65536
  if (u < 0x38800000) return {uint16_t(sign | unsigned(rintf(__uint_as_float(u) * 0x1p24f)))};
  u += 0xfff + (u >> 13 & 1);
  return {uint16_t(sign | (u - 0x38000000) >> 13)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16(x), __float2bfloat16(y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half(x), __float2half(y)}; }
inline __half __ushort_as_half(unsigned short v) { return {v}; }
inline __half2 __half2half2(__half v) { return {v, v}; }
inline __half2 __hsub2(__half2 a, __half2 b) {
  return {__float2half(__half2float(a.x) - __half2float(b.x)), __float2half(__half2float(a.y) - __half2float(b.y))};
}

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }

// ---- functions ----

inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline float emulated_fmaxf(float a, float b) { return a > b || b != b ? a : b; }
inline float emulated_fminf(float a, float b) { return a < b || b != b ? a : b; }
#define fmaxf emulated_fmaxf
#define fminf emulated_fminf
#undef __expf
#define __expf expf
inline float rsqrtf(float v) { return float(1.0 / sqrt(double(v))); }
inline int __float2int_rn(float v) { return int(rintf(v)); }
inline unsigned long long __float2ull_rz(float v) { return static_cast<unsigned long long>(v); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned __int128>(a) * b >> 64;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned pick) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned which = pick >> 4 * i & 15, byte = bytes >> 8 * (which & 7) & 0xff;
    result |= (which & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
  }
  return result;
}
template <typename T>
inline T __ldcg(const T* from) { return *from; }
template <typename T>
inline void __stcg(T* to, T value) { *to = value; }

// ---- threads together ----

inline void __threadfence() {}
inline void __syncthreads() { emulated::sync_block(); }
inline int __syncthreads_or(int holds) {
  static int any = 0;
  if (holds) any = 1;
  emulated::sync_block();
  const int result = any;
  emulated::sync_block();
  any = 0;
  emulated::sync_block();
  return result;
}
template <typename T>
inline T atomicAdd(T* to, T value) {
  const T old = *to;
  *to = old + value;
  return old;
}

namespace emulated {

inline void whole(unsigned mask) {
  if (mask != ~0u) fail("a mask of some lanes is not emulated");
}

template <typename T>
struct Shared { T value, got; int from; };

template <typename T>
inline T shuffled(const char* what, T value, int from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  Shared<T> mine = {value, value, from};
  memset(&mine.got, 0xff, sizeof mine.got);  // what a lane that has ended gives
  together(what, &mine, [](void* const* lanes) {
    for (int i = 0; i < 32; ++i) {
      auto* own = static_cast<Shared<T>*>(lanes[i]);
      if (own && lanes[own->from]) own->got = static_cast<Shared<T>*>(lanes[own->from])->value;
    }
  });
  return mine.got;
}

inline int lane() { return self->index.x % 32; }

inline unsigned ballot(const char* what, bool vote) {
  struct Vote { bool own; unsigned all; } mine = {vote, 0};
  together(what, &mine, [](void* const* lanes) {
    unsigned all = 0;
    for (int i = 0; i < 32; ++i)
      if (lanes[i] && static_cast<Vote*>(lanes[i])->own) all |= 1u << i;
    for (int i = 0; i < 32; ++i)
      if (lanes[i]) static_cast<Vote*>(lanes[i])->all = all;
  });
  return mine.all;
}

}  // namespace emulated

inline void __syncwarp(unsigned mask = ~0u) {
  emulated::whole(mask);
  emulated::arrive();
  emulated::together("__syncwarp", nullptr, [](void* const*) {});
}
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int from) {
  emulated::whole(mask);
  return emulated::shuffled("__shfl_sync", value, from & 31);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int with) {
  emulated::whole(mask);
  return emulated::shuffled("__shfl_xor_sync", value, (emulated::lane() ^ with) & 31);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, int by) {
  emulated::whole(mask);
  const int lane = emulated::lane();
  return emulated::shuffled("__shfl_up_sync", value, lane < by ? lane : lane - by);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, int by) {
  emulated::whole(mask);
  const int lane = emulated::lane();
  return emulated::shuffled("__shfl_down_sync", value, lane + by > 31 ? lane : lane + by);
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
  emulated::whole(mask);
  return emulated::ballot("__ballot_sync", vote);
}
inline bool __any_sync(unsigned mask, bool vote) {
  emulated::whole(mask);
  return emulated::ballot("__any_sync", vote) != 0;
}

// ---- shared memory, by its address there ----

inline size_t __cvta_generic_to_shared(const void* pointer) {
  const size_t at = static_cast<const unsigned char*>(pointer) - emulated::arena;
  if (at < emulated::memory_start || at > emulated::memory_start + emulated::memory_size)
    emulated::fail("the shared address of what is not in dynamic shared memory");
  return at;
}

#include "emulated_ptx.h"

// What -fsanitize=alignment calls.
extern "C" inline __attribute__((used)) void __ubsan_handle_type_mismatch_v1(void* data, void* pointer) {
  struct Where { const char* file; unsigned line, column; };
  const auto* where = static_cast<Where*>(data);
  emulated::fail("a misaligned access to %p, line %u of %s", pointer, where->line, where->file);
}

namespace mlx::core::cu {
struct Shape {
  int of[8];
  int operator[](int i) const { return of[i]; }
};
struct Strides {
  long long of[8];
  long long operator[](int i) const { return of[i]; }
};
}  // namespace mlx::core::cu

#define inf __builtin_inff()
