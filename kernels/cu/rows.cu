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

// out [tokens, width]: the weighted sums of the local visits' rows of y [T * per_token, width]; grid (width / 4 / THREADS, tokens)
KERNEL(THREADS)
sum_visits(const float *y, const float *choice, float *out, int width, int per_token, int first_expert, int experts) {
    int i = (blockIdx.x * THREADS + threadIdx.x) * 4, t = blockIdx.y, count = min(4, width - i);
    if (count <= 0) return;
    bool whole = width % 4 == 0;
    const float *ids = choice + (u64)t * 2 * per_token;
    float sum[4] = {};
    // Several rows on their way at the same time.
#pragma unroll 8
    for (int k = 0; k < per_token; k++) {
        int e = (int)ids[k] - first_expert;
        if (e < 0 || e >= experts) continue;
        const float *row = y + ((u64)t * per_token + k) * width + i;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (whole) {
            v = *(const float4 *)row;
        } else {
            v.x = row[0];
            if (count > 1) v.y = row[1];
            if (count > 2) v.z = row[2];
            if (count > 3) v.w = row[3];
        }
        float weight = ids[per_token + k];
        sum[0] = fmaf(weight, v.x, sum[0]), sum[1] = fmaf(weight, v.y, sum[1]);
        sum[2] = fmaf(weight, v.z, sum[2]), sum[3] = fmaf(weight, v.w, sum[3]);
    }
    float *to = out + (u64)t * width + i;
    if (whole) {
        *(float4 *)to = make_float4(sum[0], sum[1], sum[2], sum[3]);
    } else {
        for (int j = 0; j < count; j++) to[j] = sum[j];
    }
}

// ---- products of f32, for the router, whose choice must not depend on rounding ----
//
// Tensor cores take 11 bits of a factor: a number is a large part of 11 bits and a small one of the next 11, and three of the four products of parts
// count. They are added up in f32 after every 32 columns, because what tensor cores add is not rounded but cut.
#define F_TOKENS 64
#define F_ROWS 128
#define F_STEP 32
#define F_PITCH (F_STEP + 4)
#define F_STAGE ((F_TOKENS + F_ROWS) * F_PITCH)
#define F_STAGES 2

struct Parts {
    u32 large, small;
};
__device__ __forceinline__ Parts parts_of(float f) {
    u32 large = (__float_as_uint(f) + 0x1000) & 0xffffe000u;
    return Parts{large, __float_as_uint(f - __uint_as_float(large))};
}
__device__ __forceinline__ void mma_tf32(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// out [tokens, rows] = w [rows, columns] x [tokens, columns]; columns is a multiple of 4. A warp has 32 tokens x 32 rows; grid (rows / F_ROWS,
// tokens / F_TOKENS), F_STAGES * F_STAGE floats of shared memory
KERNEL(THREADS) f32_product(const float *w, const float *x, float *out, int rows, int columns, int tokens) {
    extern __shared__ __align__(16) float stages[];
    int first_row = blockIdx.x * F_ROWS, first_token = blockIdx.y * F_TOKENS, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int g = lane / 4, t = lane % 4, warp_token = warp / 4 * 32, warp_row = warp % 4 * 32;
    // A thread copies the same four columns of every 32nd line: two of x, four of w.
    int line = threadIdx.x / 8, part = threadIdx.x % 8 * 4;
    auto fetch = [&](int step) {
        int column = step * F_STEP + part, bytes = column < columns ? 16 : 0;
        float *to = stages + step % F_STAGES * F_STAGE + line * F_PITCH + part;
#pragma unroll
        for (int i = 0; i < (F_TOKENS + F_ROWS) / 32; i++) {
            const float *from = i < F_TOKENS / 32 ? x + (u64)min(first_token + line + i * 32, tokens - 1) * columns
                                                  : w + (u64)min(first_row + line + (i - F_TOKENS / 32) * 32, rows - 1) * columns;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to + i * 32 * F_PITCH)),
                         "l"(from + (bytes ? column : 0)), "r"(bytes));
        }
        asm volatile("cp.async.commit_group;");
    };
    float sums[2][4][4] = {};
    int steps = (columns + F_STEP - 1) / F_STEP;
    if (steps > 0) fetch(0);
    for (int step = 0; step < steps; step++) {
        asm volatile("cp.async.wait_group 0;");
        __syncthreads();
        if (step + 1 < steps) fetch(step + 1);
        const float *xs = stages + step % F_STAGES * F_STAGE + (warp_token + g) * F_PITCH + t;
        const float *ws = stages + step % F_STAGES * F_STAGE + (F_TOKENS + warp_row + g) * F_PITCH + t;
        float c[2][4][4] = {};
#pragma unroll
        for (int k = 0; k < F_STEP; k += 8) {
            u32 a[2][2][4], b[4][2][2];
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    Parts p = parts_of(xs[(m * 16 + i % 2 * 8) * F_PITCH + k + i / 2 * 4]);
                    a[m][0][i] = p.large, a[m][1][i] = p.small;
                }
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    Parts p = parts_of(ws[n * 8 * F_PITCH + k + i * 4]);
                    b[n][0][i] = p.large, b[n][1][i] = p.small;
                }
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    mma_tf32(c[m][n], a[m][1], b[n][0]);
                    mma_tf32(c[m][n], a[m][0], b[n][1]);
                    mma_tf32(c[m][n], a[m][0], b[n][0]);
                }
        }
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) sums[m][n][i] += c[m][n][i];
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int token = first_token + warp_token + m * 16 + g + i / 2 * 8, row = first_row + warp_row + n * 8 + t * 2 + i % 2;
                if (token < tokens && row < rows) out[(u64)token * rows + row] = sums[m][n][i];
            }
}
