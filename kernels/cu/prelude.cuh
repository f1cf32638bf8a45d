// What every kernel source begins with: no header of CUDA's is needed, so NVRTC is enough to compile them.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#endif

#define WARP 32
#define FULL 0xffffffffu
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)

// Tokens of a cache block; step.rs has the same number.
#define BLOCK_TOKENS 64

__device__ __forceinline__ float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ __forceinline__ float bf16_to_float(u16 b) { return __uint_as_float((u32)b << 16); }

// As the cache keeps it: f16, and its largest for what lies beyond; what is no number stays none.
__device__ __forceinline__ u16 float_to_cached(float f) {
    u16 h;
    asm("max.NaN.f32 %1, %1, 0fC77FE000;\n\tmin.NaN.f32 %1, %1, 0f477FE000;\n\tcvt.rn.f16.f32 %0, %1;" : "=h"(h), "+f"(f));
    return h;
}

// Programmatic launch, where there is any: what comes before the wait may run while the kernel before still does.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(FULL, v, offset);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(FULL, v, offset));
    return v;
}

// The sum over a block of whole warps, the same bits in every thread. `scratch` has 32 floats and may be used again at once.
__device__ __forceinline__ float block_sum(float v, float *scratch) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    v = warp_sum(v);
    __syncthreads();
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}
