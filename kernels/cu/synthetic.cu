// Random weights made on the device, for measurements of models that nobody has to download: valid blocks, whose values do not
// matter but must be numbers.
#include "prelude.cuh"

// To nearest, ties to even.
__device__ __forceinline__ u16 float_to_bf16(float f) {
    u16 b;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b) : "f"(f));
    return b;
}

#define THREADS 256

__device__ __forceinline__ u32 random_bits(u64 at, u32 seed) {
    u64 z = at * 0x9e3779b97f4a7c15ull + seed;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return (u32)(z >> 32);
}

// `blocks` blocks, or tiles, of `block_bytes` random bytes. In start..end every `stride` bytes begin with an f16 scale of given
// bits, and have a second one `second` bytes on (< 0: none).
KERNEL(THREADS)
fill_blocks(u16 *to, u64 blocks, int block_bytes, int start, int end, int stride, u32 first_bits, int second, u32 second_bits,
            u32 seed) {
    int halves = block_bytes / 2;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < blocks * halves; i += (u64)gridDim.x * THREADS) {
        int at = (int)(i % halves) * 2, offset = at >= start && at < end ? (at - start) % stride : -1;
        to[i] = (u16)(offset == 0 ? first_bits : offset >= 0 && offset == second ? second_bits : random_bits(i, seed));
    }
}

// Uniform in [centre - spread, centre + spread), as f32 or bf16.
KERNEL(THREADS) fill_values(void *to, u64 len, int as_bf16, float centre, float spread, u32 seed) {
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < len; i += (u64)gridDim.x * THREADS) {
        float value = centre + spread * ((float)(random_bits(i, seed) >> 8) / (float)(1 << 23) - 1.0f);
        if (as_bf16) ((u16 *)to)[i] = float_to_bf16(value);
        else ((float *)to)[i] = value;
    }
}
