// Products with one type of weights, in layout `ggml` or, with MMA16, `mma16.v1`; TYPE names the type. Compiled once for each
// type that a checkpoint has.
//
// A warp owns a row of the weights. It decodes 256 columns at a time, eight in each lane, and meets up to N activation rows
// with them. A sum's order depends on its own row alone, so a token's result is the same in any company.
#include "blocks.cuh"

typedef TYPE W;

#define WARPS 8
#define THREADS (WARPS * WARP)

// Eight values of an activation row of `columns`, zeros after its end.
__device__ __forceinline__ void load8(const float *x, int column, int columns, bool aligned, float *out) {
    if (aligned && column + 8 <= columns) {
        float4 a = *(const float4 *)(x + column), b = *(const float4 *)(x + column + 4);
        out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
        out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
    } else {
        EACH8 out[j] = column + j < columns ? x[column + j] : 0.0f;
    }
}

// sums[n] = w[row] . x[n], in every lane; rows of x are `stride` apart, those from `tokens` on repeat the last.
template <int N>
__device__ __forceinline__ void dots(const u8 *w, int row, const float *x, u64 stride, int tokens, int columns, float *sums) {
    bool aligned = columns % 4 == 0 && stride % 4 == 0 && (u64)x % 16 == 0;
#pragma unroll
    for (int n = 0; n < N; n++) sums[n] = 0.0f;
    for (int column = threadIdx.x % WARP * 8; column < columns; column += WARP * 8) {
        float values[8];
        decode8<W>(w, row, column, columns, values);
#pragma unroll
        for (int n = 0; n < N; n++) {
            float v[8];
            load8(x + min(n, tokens - 1) * stride, column, columns, aligned, v);
            EACH8 sums[n] = fmaf(values[j], v[j], sums[n]);
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) sums[n] = warp_sum(sums[n]);
}

// out [tokens, rows] = w [rows, columns] x [tokens, columns]; grid (rows / WARPS, tokens / N)
template <int N>
__device__ __forceinline__ void matvec(const u8 *w, const float *x, float *out, int rows, int columns, int tokens) {
    int row = blockIdx.x * WARPS + threadIdx.x / WARP, first = blockIdx.y * N;
    if (row >= rows) return;
    float sums[N];
    dots<N>(w, row, x + (u64)first * columns, columns, tokens - first, columns, sums);
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (threadIdx.x % WARP == 0 && first + n < tokens) out[(u64)(first + n) * rows + row] = sums[n];
    }
}

#define MATVEC(N)                                                                                                     \
    KERNEL(THREADS) matvec##N(const u8 *w, const float *x, float *out, int rows, int columns, int tokens) {           \
        matvec<N>(w, x, out, rows, columns, tokens);                                                                  \
    }
MATVEC(1)
MATVEC(2)
MATVEC(4)
MATVEC(8)

// The local index of the expert that token t visits at place k, or -1.
__device__ __forceinline__ int local_expert(const float *choice, int t, int k, int per_token, int first, int experts) {
    int expert = (int)choice[(u64)t * 2 * per_token + k] - first;
    return expert >= 0 && expert < experts ? expert : -1;
}

// out [tokens, per_token, rows]: the products of every token with the experts it visits, [experts, rows, columns], where
// they are local; grid (rows / WARPS, per_token, tokens)
KERNEL(THREADS)
expert_in(const u8 *w, const float *x, const float *choice, float *out, int rows, int columns, int per_token,
          int first_expert, int experts) {
    int row = blockIdx.x * WARPS + threadIdx.x / WARP, k = blockIdx.y, t = blockIdx.z;
    int expert = local_expert(choice, t, k, per_token, first_expert, experts);
    if (row >= rows || expert < 0) return;
    float sum;
    dots<1>(w + (u64)expert * rows * row_bytes<W>(columns), row, x + (u64)t * columns, columns, 1, columns, &sum);
    if (threadIdx.x % WARP == 0) out[((u64)t * per_token + k) * rows + row] = sum;
}

// out [tokens, rows]: the weighted sum over the local experts of their products with h [tokens, per_token, columns];
// grid (rows / WARPS, tokens)
KERNEL(THREADS)
expert_out(const u8 *w, const float *h, const float *choice, float *out, int rows, int columns, int per_token,
           int first_expert, int experts) {
    int row = blockIdx.x * WARPS + threadIdx.x / WARP, t = blockIdx.y;
    if (row >= rows) return;
    float total = 0.0f;
    for (int k = 0; k < per_token; k++) {
        int expert = local_expert(choice, t, k, per_token, first_expert, experts);
        if (expert < 0) continue;
        float sum;
        dots<1>(w + (u64)expert * rows * row_bytes<W>(columns), row, h + ((u64)t * per_token + k) * columns, columns,
                1, columns, &sum);
        total = fmaf(choice[(u64)t * 2 * per_token + per_token + k], sum, total);
    }
    if (threadIdx.x % WARP == 0) out[(u64)t * rows + row] = total;
}

// out [tokens, columns]: rows of the table by token id, zeros where it lies outside; grid (columns / 8 / THREADS, tokens)
KERNEL(THREADS)
embed(const u8 *table, const u32 *tokens, float *out, int rows, int columns, u32 first_row) {
    int column = (blockIdx.x * THREADS + threadIdx.x) * 8, t = blockIdx.y;
    if (column >= columns) return;
    u32 row = tokens[t] - first_row;
    float v[8];
    EACH8 v[j] = 0.0f;
    if (tokens[t] >= first_row && row < (u32)rows) decode8<W>(table, row, column, columns, v);
    EACH8 if (column + j < columns) out[(u64)t * columns + column + j] = v[j];
}

// Queries into the latent space. q [T, heads, nope + rope], w [heads, nope + v, latent],
// out [T, heads, latent + rope] = [q_nope . w[nope rows] | q_rope]; grid (heads, T / TOKENS)
#define TOKENS 4
KERNEL(THREADS)
absorb(const u8 *w, const float *q, float *out, int heads, int nope, int rope, int v, int latent, int tokens) {
    int head = blockIdx.x, first = blockIdx.y * TOKENS;
    int width = latent + rope, qk = nope + rope;
    int first_row = head * (nope + v);
    for (int column = threadIdx.x * 8; column < latent; column += THREADS * 8) {
        float sums[TOKENS][8] = {};
        for (int n = 0; n < nope; n++) {
            float values[8];
            decode8<W>(w, first_row + n, column, latent, values);
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                float factor = q[((u64)min(first + t, tokens - 1) * heads + head) * qk + n];
                EACH8 sums[t][j] = fmaf(factor, values[j], sums[t][j]);
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (first + t >= tokens) break;
            float *to = out + ((u64)(first + t) * heads + head) * width + column;
            EACH8 if (column + j < latent) to[j] = sums[t][j];
        }
    }
    for (int i = threadIdx.x; i < TOKENS * rope; i += THREADS) {
        int t = first + i / rope, r = i % rope;
        if (t < tokens) out[((u64)t * heads + head) * width + latent + r] = q[((u64)t * heads + head) * qk + nope + r];
    }
}

// Attended latents to values. x [T, heads, latent], w as above, out [T, heads, v]; grid (v / WARPS, heads, T / TOKENS)
KERNEL(THREADS)
project(const u8 *w, const float *x, float *out, int heads, int nope, int v, int latent, int tokens) {
    int row = blockIdx.x * WARPS + threadIdx.x / WARP, head = blockIdx.y, first = blockIdx.z * TOKENS;
    if (row >= v) return;
    float sums[TOKENS];
    dots<TOKENS>(w, head * (nope + v) + nope + row,
                 x + ((u64)first * heads + head) * latent, (u64)heads * latent, tokens - first, latent, sums);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        if (threadIdx.x % WARP == 0 && first + t < tokens) out[((u64)(first + t) * heads + head) * v + row] = sums[t];
    }
}
