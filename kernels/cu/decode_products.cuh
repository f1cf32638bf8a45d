// Products of one to sixteen tokens with up to three matrices.
#pragma once
#include "decode_tokens.cuh"

// ---- products ----

struct Segment {
    const u8 *w;
    float *out;   // [M, strips * 16]
    int type, strips;
};
struct Segments {
    Segment of[3];
    int count, total;  // segments, strips of all
};

// A team of eight warps shares the columns of a strip; teams of a block share the tokens.
#ifndef TEAMS
#define TEAMS 3
#endif
const int TEAM = 8;

// A warp of PER leaves its sums of 16 rows and NT * 8 tokens: [warp][token][row 16 + 1].
template <int NT, int PER>
DEV void leave(const float acc[NT][4], float *sums) {
    const int warp = threadIdx.x / 32 % PER, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[(warp * NT * 8 + n * 8 + 2 * t + i % 2) * 17 + g + i / 2 * 8] = acc[n][i];
}
template <int NT>
DEV float left(const float *sums, int first_warp, int last_warp, int row, int token) {
    float sum = 0.0f;
#pragma unroll 8
    for (int w = first_warp; w < last_warp; w++) sum += sums[(w * NT * 8 + token) * 17 + row];
    return sum;
}

struct Place {
    const u8 *strip;
    const Segment *segment;
    int at;
};
DEV Place place(const Segments &segments, int unit, int n_tiles) {
    int i = 0;
#pragma unroll 1
    while (i + 1 < segments.count && unit >= segments.of[i].strips) unit -= segments.of[i++].strips;
    const Segment &s = segments.of[i];
    return {s.w + (size_t)unit * n_tiles * tile_bytes(s.type), &s, unit};
}

// Team i of block b takes strips b + gridDim.x * (i + TEAMS * n) of all segments. `ready` waits for the kernel before and says where the tokens are.
template <int NT, bool ONE, class Ready>
DEV void product(const Segments &segments, int K, int M, int slot_bytes, const Ready &ready, const float *inverse) {
    __shared__ Tables tables[TEAMS * TEAM];
    __shared__ u64 barriers[TEAMS * TEAM][DEPTH];
    __shared__ Zeros zeros;
    __shared__ float sums[TEAMS][TEAM * NT * 8 * 17];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, n_tiles = K / 256;
    const int team = warp / TEAM, part = warp % TEAM;
    const int k0 = part * n_tiles / TEAM, k1 = (part + 1) * n_tiles / TEAM;
    const int first = blockIdx.x + gridDim.x * team, step = gridDim.x * TEAMS;
    const int total = segments.total;
    Ring ring;
    ring.start(shared_bytes + warp * DEPTH * slot_bytes, slot_bytes, barriers[warp]);
    int next_unit = first, next_k = k1, bytes = 0;
    const u8 *next = 0;
    auto ask = [&] {
        if (next_k == k1) {
            next = 0;
            if (next_unit < total && k0 < k1) {
                const Place p = place(segments, next_unit, n_tiles);
                bytes = tile_bytes(p.segment->type);
                next = p.strip + (size_t)k0 * bytes;
                next_unit += step;
                next_k = k0;
            }
        }
        ring.ask(next, bytes);
        if (next) { next += bytes; next_k++; }
    };
#pragma unroll 1
    for (int i = 0; i < DEPTH; i++) ask();
    clear(zeros);
    const Tokens B = ready();
    __syncthreads();
    bool has[NT];
    Columns base[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) { has[n] = g + 8 * n < M; base[n] = columns(B, g + 8 * n, k0, t, has[n], zeros); }
    bool again = false;
#pragma unroll 1
    for (int unit = first; unit < total; unit += step) {
        const Place p = place(segments, unit, n_tiles);
        const int type = p.segment->type;
        float acc[NT][4];
        Columns c[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) { acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f; c[n] = base[n]; }
#pragma unroll 1
        for (int k = k0; k < k1; k++) {
            tile_product_of<NT, ONE>(type, ring.take(), c, tables[warp], acc, lane);
            ask();
#pragma unroll
            for (int n = 0; n < NT; n++) advance(c[n], has[n]);
        }
        // Those who add up the strip before have all read it.
        if (again) barrier_of(1 + team, TEAM * 32);
        again = true;
        leave<NT, TEAM>(acc, sums[team]);
        barrier_of(1 + team, TEAM * 32);
#pragma unroll 1
        for (int i = threadIdx.x % (TEAM * 32); i < 16 * M; i += TEAM * 32)
            p.segment->out[(size_t)(i / 16) * p.segment->strips * 16 + p.at * 16 + i % 16] = left<NT>(sums[team], 0, TEAM, i % 16, i / 16) * inverse[i / 16];
    }
}

// out = w x for every segment, x as prepared tokens. Shared memory: the rings, then the tokens if they are staged.
template <int NT, bool ONE>
DEV void product_prepared(const Segments &segments, int K, int M, int slot_bytes, bool staged, const u16 *x, const u16 *x_sums, const float *inverse) {
    __shared__ u64 arrived;
    if (threadIdx.x == 0) { init_barrier(&arrived); fence_barriers(); }
    __syncthreads();
    auto ready = [&] {
        wait_for_previous();
        start_next();
        if (!staged) return Tokens{x, x_sums, K, K / 8};
        const Tokens B = copy_tokens((u16 *)(shared_bytes + TEAMS * TEAM * DEPTH * slot_bytes), x, x_sums, M, K, &arrived);
        wait_barrier(&arrived, 0);
        return B;
    };
    product<NT, ONE>(segments, K, M, slot_bytes, ready, inverse);
}

// The same of plain f32 x [M, K], with an RMS norm where `norm` is given. Shared memory: the rings, then the tokens.
template <int NT, bool ONE>
DEV void product_plain(const Segments &segments, int K, int M, int slot_bytes, const float *x, const float *norm, float eps) {
    __shared__ float partial[2 * TEAMS * TEAM], inverse[NT * 8];
    auto ready = [&] {
        u16 *tokens = (u16 *)(shared_bytes + TEAMS * TEAM * DEPTH * slot_bytes);
        const int x_stride = K + 32, sums_stride = K / 8 + 32;
        u16 *token_sums = tokens + M * x_stride;
        wait_for_previous();
        start_next();
        const Plain source = {x, norm, K};
        stage<TEAMS * TEAM, ONE>(source, M, K, tokens, x_stride, token_sums, sums_stride, inverse, partial, eps);
        return Tokens{tokens, token_sums, x_stride, sums_stride};
    };
    product<NT, ONE>(segments, K, M, slot_bytes, ready, inverse);
}

#define PRODUCTS(NAME, NT, ONE) \
    extern "C" __global__ void __launch_bounds__(TEAMS * TEAM * 32, 1) product_prepared_##NAME(__grid_constant__ const Segments s, int K, int M, int slot_bytes, int staged, const u16 *x, const u16 *x_sums, const float *inverse) { \
        product_prepared<NT, ONE>(s, K, M, slot_bytes, staged, x, x_sums, inverse); \
    } \
    extern "C" __global__ void __launch_bounds__(TEAMS * TEAM * 32, 1) product_plain_##NAME(__grid_constant__ const Segments s, int K, int M, int slot_bytes, const float *x, const float *norm, float eps) { \
        product_plain<NT, ONE>(s, K, M, slot_bytes, x, norm, eps); \
    }
// Of one token, up to 8, up to 16.
PRODUCTS(1, 1, true)
PRODUCTS(8, 1, false)
PRODUCTS(16, 2, false)
