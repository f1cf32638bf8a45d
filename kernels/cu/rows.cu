// What products of many tokens need around them: activations as f16, visits grouped by expert, and their sums.
#include "prelude.cuh"

#define THREADS 256
// Tokens of a block of gemm.cu.
#define TM 128

__device__ __forceinline__ u16 float_to_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

__device__ __forceinline__ float block_max(float v, float *scratch) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    v = warp_max(v);
    __syncthreads();
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    return warp_max(lane < warps ? scratch[lane] : 0.0f);
}

// A row as f16 times 2^-e, so that its largest is in [2^9, 2^10): no overflow, and what is 2^-24 of it is not lost. The rest of
// the stride is zeros. scale = 2^e
template <typename Value>
__device__ __forceinline__ void row_to_half(Value value, u16 *to, float *scale, int width, int stride) {
    __shared__ float scratch[32];
    float largest = 0.0f;
    for (int i = threadIdx.x; i < width; i += THREADS) largest = fmaxf(largest, fabsf(value(i)));
    largest = block_max(largest, scratch);
    // Zero and what is no number go as they are.
    int exponent = largest > 0.0f && largest < INFINITY ? (int)(__float_as_uint(largest) >> 23) - 127 - 9 : 0;
    exponent = max(exponent, -100);
    float factor = __uint_as_float((u32)(127 - exponent) << 23);
    for (int i = threadIdx.x; i < stride; i += THREADS) to[i] = i < width ? float_to_half(value(i) * factor) : 0;
    if (threadIdx.x == 0) *scale = __uint_as_float((u32)(127 + exponent) << 23);
}

// x [rows, width] to out [rows, stride]; grid (rows)
KERNEL(THREADS) to_half(const float *x, u16 *out, float *scales, int width, int stride) {
    const float *row = x + (u64)blockIdx.x * width;
    row_to_half([=](int i) { return row[i]; }, out + (u64)blockIdx.x * stride, scales + blockIdx.x, width, stride);
}

// silu(gate) * up, likewise
KERNEL(THREADS) swiglu_to_half(const float *gate, const float *up, u16 *out, float *scales, int width, int stride) {
    const float *g = gate + (u64)blockIdx.x * width, *u = up + (u64)blockIdx.x * width;
    row_to_half([=](int i) { return g[i] / (1.0f + expf(-g[i])) * u[i]; }, out + (u64)blockIdx.x * stride,
                scales + blockIdx.x, width, stride);
}

// Visits of local experts by expert: order [T * per_token], and the tiles that gemm_experts works on. One block;
// shared: 2 * experts ints
KERNEL(1024)
group_visits(const float *choice, int *order, int *tiles, int *tile_count, int tokens, int per_token, int first_expert,
             int experts) {
    extern __shared__ int counts[];
    int *next = counts + experts;
    for (int e = threadIdx.x; e < experts; e += 1024) counts[e] = 0;
    __syncthreads();
    int visits = tokens * per_token;
    for (int v = threadIdx.x; v < visits; v += 1024) {
        int e = (int)choice[(u64)(v / per_token) * 2 * per_token + v % per_token] - first_expert;
        if (e >= 0 && e < experts) atomicAdd(counts + e, 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int start = 0, tile = 0;
        for (int e = 0; e < experts; e++) {
            next[e] = start;
            for (int first = 0; first < counts[e]; first += TM, tile++) {
                tiles[tile * 3] = e;
                tiles[tile * 3 + 1] = start + first;
                tiles[tile * 3 + 2] = min(TM, counts[e] - first);
            }
            start += counts[e];
        }
        *tile_count = tile;
    }
    __syncthreads();
    // Which visit of an expert comes first changes no result: each has rows of its own.
    for (int v = threadIdx.x; v < visits; v += 1024) {
        int e = (int)choice[(u64)(v / per_token) * 2 * per_token + v % per_token] - first_expert;
        if (e >= 0 && e < experts) order[atomicAdd(next + e, 1)] = v;
    }
}

// out [tokens, width]: the weighted sums of the local visits' rows of y [T * per_token, width]; grid (width / THREADS, tokens)
KERNEL(THREADS)
sum_visits(const float *y, const float *choice, float *out, int width, int per_token, int first_expert, int experts) {
    int i = blockIdx.x * THREADS + threadIdx.x, t = blockIdx.y;
    if (i >= width) return;
    const float *ids = choice + (u64)t * 2 * per_token;
    float sum = 0.0f;
    for (int k = 0; k < per_token; k++) {
        int e = (int)ids[k] - first_expert;
        if (e >= 0 && e < experts) sum = fmaf(ids[per_token + k], y[((u64)t * per_token + k) * width + i], sum);
    }
    out[(u64)t * width + i] = sum;
}

// out [tokens, rows] = w [rows, columns] x [tokens, columns], all f32 and columns a multiple of 4: the router, whose choice must not
// depend on rounding. A thread has 4 tokens x 4 rows; grid (rows / 64, tokens / 64)
#define SIDE 64
#define STEP 32
KERNEL(THREADS) f32_product(const float *w, const float *x, float *out, int rows, int columns, int tokens) {
    __shared__ __align__(16) float xs[STEP][SIDE + 4], ws[STEP][SIDE + 4];
    int first_row = blockIdx.x * SIDE, first_token = blockIdx.y * SIDE;
    int line = threadIdx.x / 4, part = threadIdx.x % 4 * 8;
    int token = threadIdx.x / 16 * 4, row = threadIdx.x % 16 * 4;
    const float *from_x = x + (u64)min(first_token + line, tokens - 1) * columns;
    const float *from_w = w + (u64)min(first_row + line, rows - 1) * columns;
    float sums[4][4] = {};
    for (int k = 0; k < columns; k += STEP) {
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 8; half += 4) {
            int column = k + part + half;
            float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            float4 a = column < columns ? *(const float4 *)(from_x + column) : zero;
            float4 b = column < columns ? *(const float4 *)(from_w + column) : zero;
            xs[part + half][line] = a.x, xs[part + half + 1][line] = a.y;
            xs[part + half + 2][line] = a.z, xs[part + half + 3][line] = a.w;
            ws[part + half][line] = b.x, ws[part + half + 1][line] = b.y;
            ws[part + half + 2][line] = b.z, ws[part + half + 3][line] = b.w;
        }
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < STEP; i++) {
            float4 a = *(const float4 *)&xs[i][token], b = *(const float4 *)&ws[i][row];
            float t[4] = {a.x, a.y, a.z, a.w}, r[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int m = 0; m < 4; m++)
#pragma unroll
                for (int n = 0; n < 4; n++) sums[m][n] = fmaf(t[m], r[n], sums[m][n]);
        }
    }
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
            if (first_token + token + m < tokens && first_row + row + n < rows)
                out[(u64)(first_token + token + m) * rows + first_row + row + n] = sums[m][n];
}
