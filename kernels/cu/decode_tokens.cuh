// The way of tiles into shared memory, and of activations into B fragments.
#pragma once
#include "decode_tiles.cuh"

// ---- a warp's ring of tiles on their way from global to shared memory ----
//
// Tiles are asked for in the order in which they are used; DEPTH of them are under way.
#ifndef DEPTH
#define DEPTH 3
#endif
struct Ring {
    u8 *slots;
    u64 *full;
    int slot_bytes, asked, used;
    DEV void start(u8 *at, int bytes, u64 *barriers) {
        slots = at; slot_bytes = bytes; full = barriers; asked = used = 0;
        if (threadIdx.x % 32 == 0) {
#pragma unroll
            for (int i = 0; i < DEPTH; i++) init_barrier(full + i);
            fence_barriers();
        }
        __syncwarp();
    }
    // Called DEPTH times before the first take and once after each tile was used; null when nothing is left.
    DEV void ask(const u8 *tile, int bytes) {
        const int slot = asked++ % DEPTH;
        if (tile && threadIdx.x % 32 == 0) {
            expect(full + slot, bytes);
            copy_bulk(slots + slot * slot_bytes, tile, bytes, full + slot);
        }
    }
    DEV const u8 *take() {
        const int slot = used % DEPTH;
        wait_barrier(full + slot, used / DEPTH & 1);
        used++;
        return slots + slot * slot_bytes;
    }
};

// ---- putting activations into that form ----

DEV float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o; o /= 2) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
DEV float warp_max(float v) {
#pragma unroll
    for (int o = 16; o; o /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}
// The power of two that brings `largest` to [512, 1024).
DEV float token_scale(float largest) {
    int e = (int)(__float_as_uint(largest) >> 23);
    if (e == 0 || e >= 255) return 1.0f;
    int to = 127 + 9 - e + 127;
    to = to < 1 ? 1 : to > 253 ? 253 : to;
    return __uint_as_float((u32)to << 23);
}

// Stores columns 32 i + 4 t .. and 32 i + 16 + 4 t .. of a token times `factor`; `here`: the lanes that call it, whole groups of four.
DEV void store_columns_of(const float v[8], float factor, int i, int t, u16 *x, u16 *sums, u32 here) {
    uint4 h;
    h.x = floats_to_halves(v[0] * factor, v[1] * factor); h.y = floats_to_halves(v[2] * factor, v[3] * factor);
    h.z = floats_to_halves(v[4] * factor, v[5] * factor); h.w = floats_to_halves(v[6] * factor, v[7] * factor);
    *(uint4 *)(x + (i * 4 + t) * 8) = h;
    float a = (low_half(h.x) + high_half(h.x)) + (low_half(h.y) + high_half(h.y));
    float b = (low_half(h.z) + high_half(h.z)) + (low_half(h.w) + high_half(h.w));
    a += __shfl_xor_sync(here, a, 1); b += __shfl_xor_sync(here, b, 1);
    a += __shfl_xor_sync(here, a, 2); b += __shfl_xor_sync(here, b, 2);
    if (t < 2) {
        // Lane 0 stores the first group, lane 1 the second.
        const float sum = t == 0 ? a : b;
        const int group = 2 * i + t;
        u16 *to = sums + group / 4 * 8 + group % 4;
        const u16 high = float_to_half(sum);
        to[0] = high; to[4] = float_to_half(sum - half_to_float(high));
    }
}

extern __shared__ __align__(16) u8 shared_bytes[];

// Puts M tokens of K columns from global f32 into shared memory, WARPS warps together. Source::raw(token, column) returns four columns, Source::weight
// what they are multiplied by. Leaves 1 / scale in inverse[token]. Ends with a barrier. With ONE all warps share the token, else each has SHARE warps.
template <int WARPS, bool ONE, class Source>
DEV void stage(const Source &source, int M, int K, u16 *x, int x_stride, u16 *sums, int sums_stride, float *inverse, float *partial, float eps) {
    const int SHARE = ONE ? WARPS : WARPS >= 16 ? 2 : 1, AT_ONCE = WARPS / SHARE;
    const int HELD = ONE ? 1 : 4;  // units of eight columns that a lane keeps between the passes
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
    const int part = ONE ? warp : warp % SHARE;
    const int units = K / 8, first = part * 32 + lane, step = SHARE * 32;
#pragma unroll 1
    for (int m = ONE ? 0 : warp / SHARE; m - (ONE ? 0 : warp / SHARE) < M; m += AT_ONCE) {
        const bool mine = m < M;
        float v[HELD][8];
        float square = 0.0f, largest = 0.0f;
        auto load = [&](int unit, float to[8]) {
            const int c = unit / 4 * 32 + t * 4;
            const float4 a = source.raw(m, c), b = source.raw(m, c + 16);
            if (source.normed()) square += (a.x * a.x + a.y * a.y) + (a.z * a.z + a.w * a.w) + (b.x * b.x + b.y * b.y) + (b.z * b.z + b.w * b.w);
            const float4 wa = source.weight(c), wb = source.weight(c + 16);
            to[0] = a.x * wa.x; to[1] = a.y * wa.y; to[2] = a.z * wa.z; to[3] = a.w * wa.w;
            to[4] = b.x * wb.x; to[5] = b.y * wb.y; to[6] = b.z * wb.z; to[7] = b.w * wb.w;
#pragma unroll
            for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(to[i]));
        };
        if (mine) {
#pragma unroll
            for (int j = 0; j < HELD; j++) if (first + j * step < units) load(first + j * step, v[j]);
#pragma unroll 1
            for (int unit = first + HELD * step; unit < units; unit += step) { float w[8]; load(unit, w); }
        }
        if (source.normed()) square = warp_sum(square);
        largest = warp_max(largest);
        if (SHARE > 1) {
            if (lane == 0) { partial[2 * warp] = square; partial[2 * warp + 1] = largest; }
            __syncthreads();
            const int from = ONE ? 0 : warp / SHARE * SHARE;
            if (source.normed()) square = warp_sum(lane < SHARE ? partial[2 * (from + lane)] : 0.0f);
            largest = warp_max(lane < SHARE ? partial[2 * (from + lane) + 1] : 0.0f);
        }
        if (mine) {
            const float norm = source.normed() ? rsqrtf(square / K + eps) : 1.0f;
            const float scale = token_scale(largest * norm), factor = norm * scale;
            if (part == 0 && lane == 0) inverse[m] = 1.0f / scale;
            // Units come in fours, so the lanes of a sum are here together or not.
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                const u32 here = __ballot_sync(~0u, first + j * step < units);
                if (first + j * step < units) store_columns_of(v[j], factor, (first + j * step) / 4, t, x + m * x_stride, sums + m * sums_stride, here);
            }
#pragma unroll 1
            for (int unit0 = part * 32 + HELD * step; unit0 < units; unit0 += step) {
                const int unit = unit0 + lane;
                const u32 here = __ballot_sync(~0u, unit < units);
                float w[8];
                if (unit < units) { load(unit, w); store_columns_of(w, factor, unit / 4, t, x + m * x_stride, sums + m * sums_stride, here); }
            }
        }
        if (SHARE > 1 && !ONE) __syncthreads();
    }
    __syncthreads();
}

struct Plain {
    const float *x, *norm;
    int K;
    DEV float4 raw(int m, int c) const { return *(const float4 *)(x + (size_t)m * K + c); }
    DEV float4 weight(int c) const { return norm ? *(const float4 *)(norm + c) : make_float4(1, 1, 1, 1); }
    DEV bool normed() const { return norm != 0; }
};

// x += y where there is a y; out = rms(x) * weight as f32 and as B fragments. Grid (tokens, parts): each block of 512 threads adds up the whole token
// and stores its part, because one multiprocessor alone would take longer for the arithmetic than the whole for the loads. K up to 8192 * parts / 2.
extern "C" __global__ void __launch_bounds__(512) add_norm_tokens(const float *x, const float *y, const float *weight, float scale, float eps, int K,
        float *x_out, float *h, u16 *tokens, u16 *sums, float *inverse) {
    __shared__ float partial[16];
    const int m = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
    const int units = K / 8, per_part = (units / 4 + gridDim.y - 1) / gridDim.y * 4;
    const int unit = blockIdx.y * per_part + threadIdx.x, column = unit / 4 * 32 + t * 4;
    const bool mine = threadIdx.x < per_part && unit < units;
    const int HELD = 3;  // 6144 columns
    float4 own_w[2] = {};
    if (mine) { own_w[0] = *(const float4 *)(weight + column); own_w[1] = *(const float4 *)(weight + column + 16); }
    wait_for_previous();
    start_next();
    x += (size_t)m * K;
    if (y) y += (size_t)m * K;
    auto at = [&](int c) {
        float4 a = *(const float4 *)(x + c);
        if (y) { const float4 b = *(const float4 *)(y + c); a.x += b.x; a.y += b.y; a.z += b.z; a.w += b.w; }
        return a;
    };
    float square = 0.0f;
    float4 own[2] = {}, held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int c = (i * 512 + threadIdx.x) * 4;
        held[i] = c < K ? at(c) : make_float4(0, 0, 0, 0);
    }
    if (mine) { own[0] = at(column); own[1] = at(column + 16); }
#pragma unroll
    for (int i = 0; i < HELD; i++) square += (held[i].x * held[i].x + held[i].y * held[i].y) + (held[i].z * held[i].z + held[i].w * held[i].w);
#pragma unroll 1
    for (int c = (HELD * 512 + threadIdx.x) * 4; c < K; c += 2048) { const float4 a = at(c); square += (a.x * a.x + a.y * a.y) + (a.z * a.z + a.w * a.w); }
    square = warp_sum(square);
    if (lane == 0) partial[warp] = square;
    __syncthreads();
    const u32 here = __ballot_sync(~0u, mine);
    if (!here) return;
    square = warp_sum(lane < 16 ? partial[lane] : 0.0f);
    const float norm = rsqrtf(square / K + eps);
    if (unit == 0) inverse[m] = 1.0f / scale;
    if (!mine) return;
    x_out += (size_t)m * K; h += (size_t)m * K;
    const float o[8] = {own[0].x * own_w[0].x * norm, own[0].y * own_w[0].y * norm, own[0].z * own_w[0].z * norm, own[0].w * own_w[0].w * norm,
                        own[1].x * own_w[1].x * norm, own[1].y * own_w[1].y * norm, own[1].z * own_w[1].z * norm, own[1].w * own_w[1].w * norm};
    *(float4 *)(x_out + column) = own[0]; *(float4 *)(x_out + column + 16) = own[1];
    *(float4 *)(h + column) = make_float4(o[0], o[1], o[2], o[3]); *(float4 *)(h + column + 16) = make_float4(o[4], o[5], o[6], o[7]);
    store_columns_of(o, scale, column / 32, t, tokens + (size_t)m * K, sums + (size_t)m * (K / 8), here);
}

// Copies prepared tokens into shared memory: one thread asks, `barrier` counts.
const int PAD = 32;  // keeps the rows of eight tokens in different banks
DEV Tokens copy_tokens(u16 *to, const u16 *x, const u16 *sums, int M, int K, u64 *barrier) {
    const int stride = K + PAD, sums_stride = K / 8 + PAD;
    u16 *to_sums = to + M * stride;
    if (threadIdx.x == 0) {
        expect(barrier, (u32)(M * (K * 2 + K / 4)));
#pragma unroll 1
        for (int m = 0; m < M; m++) {
            copy_bulk(to + m * stride, x + (size_t)m * K, K * 2, barrier);
            copy_bulk(to_sums + m * sums_stride, sums + (size_t)m * (K / 8), K / 4, barrier);
        }
    }
    return {to, to_sums, stride, sums_stride};
}
