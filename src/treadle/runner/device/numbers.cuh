// Half-precision numbers, the tensor cores, and what brings matrices to them, for compute capability 8.0 and later.

namespace treadle {

__device__ inline void mma(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
                           __nv_bfloat16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline void mma(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
                           __half) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
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

__device__ inline unsigned pack(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<unsigned*>(&both);
}

__device__ inline unsigned pack(float low, float high, __half) {
  __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<unsigned*>(&both);
}

__device__ inline float wide(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline float wide(__half v) { return __half2float(v); }
__device__ inline __nv_bfloat16 narrow(float v, __nv_bfloat16) { return __float2bfloat16(v); }
__device__ inline __half narrow(float v, __half) { return __float2half(v); }

template <typename T>
__device__ inline float rounded(float v) { return wide(narrow(v, T())); }

// What the whole numbers of 8 bits are times that stand for those of a warp, of which each lane's largest is `most`.
__device__ inline float factor_of(float most) {
  for (int i = 16; i; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
  return most > 0.0f ? most / 127.0f : 1.0f;
}

__device__ inline int whole(float v, float factor) { return __float2int_rn(v / factor) + 128; }

template <typename T, int N>
struct alignas(sizeof(T) * N) Several { T of[N]; };

template <int N, typename T>
__device__ inline Several<T, N> several(const T* from) { return *reinterpret_cast<const Several<T, N>*>(from); }

}  // namespace treadle
