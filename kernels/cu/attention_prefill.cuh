#pragma once
#include "attention.cuh"

// ---- prefill ----
// For a run of positions that fits the scratch: mla_expand, then mla_prefill; longer contexts take several runs, in ascending order.

constexpr int EXPAND_TILE = 128;             // positions, and output rows of kv_b, of a block
constexpr int EXPAND_K = 32;
constexpr int EXPAND_PITCH = EXPAND_K * 2 + 16;
constexpr int EXPAND_STAGES = 3;
constexpr int EXPAND_STAGE = 2 * EXPAND_TILE * EXPAND_PITCH;
constexpr int EXPAND_OUT_PITCH = EXPAND_TILE * 2 + 16;
constexpr int EXPAND_SHARED = at_least(EXPAND_STAGES * EXPAND_STAGE, EXPAND_TILE * EXPAND_OUT_PITCH);
constexpr int EXPAND_STEPS = div_up(R, EXPAND_K);

// Keys and values of each head: keys[h, p - start] = kv_b[nope rows of h] . latent[p], values likewise with the v rows.
//   keys [heads, capacity, NOPE] f16; values [heads, capacity, V] f16; table: offset of the sequence's table in `blocks`
//   grid (div_up(heads * (NOPE + V), 128), div_up(length, 128)), 256 threads, EXPAND_SHARED bytes; start is a multiple of 64
extern "C" __global__ void __launch_bounds__(256, 2)
mla_expand(const u16* __restrict__ cache, const u32* __restrict__ blocks, const u16* __restrict__ kv_b, u16* __restrict__ keys, u16* __restrict__ values,
           int heads, int table, int start, int length, int capacity) {
    unsigned char* shared = (unsigned char*)shared_bytes;
    const u32 stages = shared_address(shared);
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, i = lane % 4;
    const int n0 = blockIdx.x * EXPAND_TILE, p0 = blockIdx.y * EXPAND_TILE, outputs = heads * (NOPE + V);
    successor_start();
    predecessor_wait();

    // A thread brings one 16-byte piece of two rows of each operand.
    const int piece = tid % 4, line = tid / 4;
    const u16* a_rows[2];
    const u16* b_rows[2];
    bool a_real[2], b_real[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int p = p0 + line + r * 64, n = n0 + line + r * 64;
        a_real[r] = p < length;
        b_real[r] = n < outputs;
        int position = start + (a_real[r] ? p : 0);
        a_rows[r] = cache + ((size_t)blocks[table + position / BLOCK] * BLOCK + position % BLOCK) * D + piece * 8;
        b_rows[r] = kv_b + (size_t)(b_real[r] ? n : 0) * R + piece * 8;
    }
    auto load = [&](int step) {
        const u32 dst = stages + step % EXPAND_STAGES * EXPAND_STAGE + line * EXPAND_PITCH + piece * 16;
        const bool inside = R % EXPAND_K == 0 || step * EXPAND_K + piece * 8 < R;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            copy16(dst + r * 64 * EXPAND_PITCH, inside ? a_rows[r] + step * EXPAND_K : a_rows[r], inside && a_real[r]);
            copy16(dst + (EXPAND_TILE + r * 64) * EXPAND_PITCH, inside ? b_rows[r] + step * EXPAND_K : b_rows[r], inside && b_real[r]);
        }
    };
#pragma unroll
    for (int step = 0; step < EXPAND_STAGES - 1; ++step) {
        if (step < EXPAND_STEPS) load(step);
        copy_commit();
    }

    const int m_warp = warp % 2 * 64, n_warp = warp / 2 * 32;
    float c[4][4][4] = {};
    for (int step = 0; step < EXPAND_STEPS; ++step) {
        copy_wait<EXPAND_STAGES - 2>();
        __syncthreads();
        if (step + EXPAND_STAGES - 1 < EXPAND_STEPS) load(step + EXPAND_STAGES - 1);
        copy_commit();
        const u32 stage = stages + step % EXPAND_STAGES * EXPAND_STAGE;
        const u32 a_lane = stage + (m_warp + lane / 8 % 2 * 8 + lane % 8) * EXPAND_PITCH + lane / 16 * 16;
        const u32 b_lane = stage + (EXPAND_TILE + n_warp + lane / 16 * 8 + lane % 8) * EXPAND_PITCH + lane / 8 % 2 * 16;
#pragma unroll
        for (int half = 0; half < EXPAND_K / 16; ++half) {
            uint4 a[4], b[2];
#pragma unroll
            for (int mt = 0; mt < 4; ++mt) a[mt] = ldmatrix4(a_lane + mt * 16 * EXPAND_PITCH + half * 32);
#pragma unroll
            for (int nt = 0; nt < 2; ++nt) {
                b[nt] = ldmatrix4(b_lane + nt * 16 * EXPAND_PITCH + half * 32);
                b[nt] = make_uint4(halves_of_bf16(b[nt].x), halves_of_bf16(b[nt].y), halves_of_bf16(b[nt].z), halves_of_bf16(b[nt].w));
            }
#pragma unroll
            for (int mt = 0; mt < 4; ++mt) {
#pragma unroll
                for (int nt = 0; nt < 2; ++nt) {
                    mma_half(c[mt][nt * 2], a[mt], b[nt].x, b[nt].y);
                    mma_half(c[mt][nt * 2 + 1], a[mt], b[nt].z, b[nt].w);
                }
            }
        }
    }

    // Through shared memory, so that rows leave in whole 16-byte pieces.
    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int mt = 0; mt < 4; ++mt) {
#pragma unroll
        for (int nt = 0; nt < 4; ++nt) {
            unsigned char* at = shared + (m_warp + mt * 16 + g) * EXPAND_OUT_PITCH + (n_warp + nt * 8 + i * 2) * 2;
            *(u32*)at = half_pair(c[mt][nt][0], c[mt][nt][1]);
            *(u32*)(at + 8 * EXPAND_OUT_PITCH) = half_pair(c[mt][nt][2], c[mt][nt][3]);
        }
    }
    __syncthreads();
    const int n = n0 + tid % 16 * 8, h = n / (NOPE + V), row = n % (NOPE + V);
    if (n >= outputs) return;
    u16* out = row < NOPE ? keys + (size_t)h * capacity * NOPE + row : values + (size_t)h * capacity * V + (row - NOPE);
    const int width = row < NOPE ? NOPE : V;
#pragma unroll
    for (int r = 0; r < EXPAND_TILE / 16; ++r) {
        int p = r * 16 + tid / 16;
        if (p0 + p < length) *(uint4*)(out + (size_t)(p0 + p) * width) = *(const uint4*)(shared + p * EXPAND_OUT_PITCH + tid % 16 * 16);
    }
}

#ifndef ATT_PREFILL_SPLIT
#define ATT_PREFILL_SPLIT 2
#endif
constexpr int P_ROWS = 64;                       // new tokens of a block: 16 for each of 4 warps
constexpr int P_SPLIT = ATT_PREFILL_SPLIT;       // warps that share rows, each with its part of every step's positions
constexpr int P_THREADS = 128 * P_SPLIT;
constexpr int P_KEYS = 64;                       // positions of a step; divides BLOCK
constexpr int W_KEYS = P_KEYS / P_SPLIT;         // of them, one warp's
constexpr int QK = NOPE + ROPE;
constexpr int QK_STEPS = div_up(QK, 16);
constexpr int QK_PITCH = QK_STEPS * 32 + 16;
constexpr int V_PAIRS = div_up(V, 16);
constexpr int V_PITCH = V_PAIRS * 32 + 16;
constexpr int PREFILL_K = P_ROWS * QK_PITCH;     // byte offsets in shared memory
constexpr int PREFILL_V = PREFILL_K + P_KEYS * QK_PITCH;
constexpr int PREFILL_ML = V_PAIRS * 2 * P_ROWS * 32; // for the joining of the parts at the end, in place of all the rest
constexpr int PREFILL_SHARED = at_least(PREFILL_V + P_KEYS * V_PITCH, P_SPLIT > 1 ? PREFILL_ML + P_ROWS * 8 : 0);
static_assert(BLOCK % P_KEYS == 0 && W_KEYS % 16 == 0 && P_SPLIT <= 2, "a step of mla_prefill lies in one cache block");

// Causal attention of new tokens, at positions cached, cached + 1, ..., to the run of positions start .. start + length that mla_expand left.
//   q [tokens, heads * (NOPE + ROPE)] f32; out [tokens, heads * V] f32; state [tokens, heads] {m, l}
//   continues != 0: out and state hold what earlier runs left; more != 0: leave them so for a later run, else finish
//   grid (div_up(tokens, P_ROWS) * heads), P_THREADS threads, PREFILL_SHARED bytes; start is a multiple of 64
extern "C" __global__ void __launch_bounds__(P_THREADS)
mla_prefill(const float* __restrict__ q, const u16* __restrict__ keys, const u16* __restrict__ values, const u16* __restrict__ cache,
            const u32* __restrict__ blocks, float* __restrict__ out, float2* __restrict__ state, int tokens, int heads, int cached, int table,
            int start, int length, int capacity, int continues, int more, float scale) {
    unsigned char* shared = (unsigned char*)shared_bytes;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, i = lane % 4;
    // Later rows attend to more: they start first.
    const int h = blockIdx.x % heads, row0 = (gridDim.x / heads - 1 - blockIdx.x / heads) * P_ROWS;
    const int row_warp = warp % 4, part = warp / 4;
    const int rows = min(P_ROWS, tokens - row0);
    const int end = min(start + length, cached + row0 + rows); // of the positions that any row of this block sees
    successor_start();
    predecessor_wait();

    const u32 base = shared_address(shared);
    const u16* head_keys = keys + (size_t)h * capacity * NOPE;
    const u16* head_values = values + (size_t)h * capacity * V;
    auto load_keys = [&](int p0, u32 block) {
        constexpr int N = NOPE / 8, P = ROPE / 8;
        const u16* source = head_keys + (size_t)(p0 - start) * NOPE;
#pragma unroll
        for (int round = 0; round < div_up(P_KEYS * N, P_THREADS); ++round) {
            int k = round * P_THREADS + tid, n = k / N;
            if (P_KEYS * N % P_THREADS == 0 || k < P_KEYS * N)
                copy16(base + PREFILL_K + k * 16 + n * (QK_PITCH - NOPE * 2), p0 + n < end ? source + k * 8 : source, p0 + n < end);
        }
        const u16* rotated = cache + ((size_t)block * BLOCK + p0 % BLOCK) * D + R;
#pragma unroll
        for (int round = 0; round < div_up(P_KEYS * P, P_THREADS); ++round) {
            int k = round * P_THREADS + tid, n = k / P;
            if (P_KEYS * P % P_THREADS == 0 || k < P_KEYS * P)
                copy16(base + PREFILL_K + NOPE * 2 + k * 16 + n * (QK_PITCH - ROPE * 2), rotated + n * D + k % P * 8, p0 + n < end);
        }
    };
    auto load_values = [&](int p0) {
        constexpr int N = V / 8;
        const u16* source = head_values + (size_t)(p0 - start) * V;
#pragma unroll
        for (int round = 0; round < div_up(P_KEYS * N, P_THREADS); ++round) {
            int k = round * P_THREADS + tid, n = k / N;
            if (P_KEYS * N % P_THREADS == 0 || k < P_KEYS * N)
                copy16(base + PREFILL_V + k * 16 + n * (V_PITCH - V * 2), p0 + n < end ? source + k * 8 : source, p0 + n < end);
        }
    };
    if (start < end) load_keys(start, blocks[table + start / BLOCK]);
    copy_commit();

    {
        constexpr int QUADS = QK_STEPS * 4; // a row, with its padding to whole steps
        const float factor = scale * LOG2E;
        const float* source = q + ((size_t)row0 * heads + h) * QK;
#pragma unroll 4
        for (int k = tid; k < P_ROWS * QUADS; k += P_THREADS) {
            int n = k / QUADS, c = k % QUADS * 4;
            float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (n < rows && c < QK) x = load_fresh((const float4*)(source + (size_t)n * heads * QK + c));
            *(uint2*)(shared + n * QK_PITCH + c * 2) = make_uint2(half_pair(x.x * factor, x.y * factor), half_pair(x.z * factor, x.w * factor));
        }
        if (QK % 16 != 0)
            for (int n = tid; n < P_KEYS; n += P_THREADS) *(uint4*)(shared + PREFILL_K + n * QK_PITCH + QK * 2) = make_uint4(0, 0, 0, 0);
        if (V % 16 != 0)
            for (int n = tid; n < P_KEYS; n += P_THREADS) *(uint4*)(shared + PREFILL_V + n * V_PITCH + V * 2) = make_uint4(0, 0, 0, 0);
    }

    float o[V_PAIRS][2][4];
    float m[2] = {minus_infinity(), minus_infinity()}, l[2] = {0.0f, 0.0f}; // rows g and g + 8; l is this thread's share
    const int row_g = row0 + row_warp * 16 + g;
    float* out_g = out + ((size_t)row_g * heads + h) * V + i * 2;
#pragma unroll
    for (int pair = 0; pair < V_PAIRS; ++pair) {
#pragma unroll
        for (int nt = 0; nt < 2; ++nt) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float2 x = make_float2(0.0f, 0.0f);
                if (continues && part == 0 && row_g + r * 8 < tokens && pair * 16 + nt * 8 < V) x = load_fresh((const float2*)(out_g + (size_t)r * 8 * heads * V + pair * 16 + nt * 8));
                o[pair][nt][r * 2] = x.x;
                o[pair][nt][r * 2 + 1] = x.y;
            }
        }
    }
    if (continues && part == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (row_g + r * 8 >= tokens) continue;
            float2 ml = load_fresh(state + (size_t)(row_g + r * 8) * heads + h);
            m[r] = ml.x;
            l[r] = i == 0 ? ml.y : 0.0f;
        }
    }

    const u32 q_lane = base + (row_warp * 16 + lane / 8 % 2 * 8 + lane % 8) * QK_PITCH + lane / 16 * 16;
    const u32 k_lane = base + PREFILL_K + (part * W_KEYS + lane / 16 * 8 + lane % 8) * QK_PITCH + lane / 8 % 2 * 16;
    const u32 v_lane = base + PREFILL_V + (part * W_KEYS + lane / 8 % 2 * 8 + lane % 8) * V_PITCH + lane / 16 * 16;
    for (int p0 = start; p0 < end; p0 += P_KEYS) {
        copy_wait<0>();
        __syncthreads(); // the keys are there, and the values of the step before are done with
        const bool another = p0 + P_KEYS < end;
        const u32 next_block = another ? blocks[table + (p0 + P_KEYS) / BLOCK] : 0;
        load_values(p0);
        copy_commit();

        float s[W_KEYS / 8][4] = {};
#pragma unroll
        for (int step = 0; step < QK_STEPS; ++step) {
            uint4 a = ldmatrix4(q_lane + step * 32);
#pragma unroll
            for (int nt = 0; nt < W_KEYS / 16; ++nt) {
                uint4 b = ldmatrix4(k_lane + nt * 16 * QK_PITCH + step * 32);
                mma_half(s[nt * 2], a, b.x, b.y);
                mma_half(s[nt * 2 + 1], a, b.z, b.w);
            }
        }
        __syncthreads();
        if (another) load_keys(p0 + P_KEYS, next_block);
        copy_commit();

        const int w0 = p0 + part * W_KEYS; // this warp's first position
        if (w0 + W_KEYS - 1 > cached + row0 + row_warp * 16) {
#pragma unroll
            for (int nt = 0; nt < W_KEYS / 8; ++nt) {
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (w0 + nt * 8 + i * 2 + e % 2 > cached + row_g + e / 2 * 8) s[nt][e] = minus_infinity();
            }
        }
        float alpha[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = m[r];
#pragma unroll
            for (int nt = 0; nt < W_KEYS / 8; ++nt) top = fmaxf(top, fmaxf(s[nt][r * 2], s[nt][r * 2 + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            const float shift = top == minus_infinity() ? 0.0f : top; // a part may lie wholly past the row
            alpha[r] = exp2_fast(m[r] - shift);
            m[r] = top;
            l[r] *= alpha[r];
#pragma unroll
            for (int nt = 0; nt < W_KEYS / 8; ++nt) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float p = exp2_fast(s[nt][r * 2 + e] - shift);
                    s[nt][r * 2 + e] = p;
                    l[r] += p;
                }
            }
        }
        uint4 p[W_KEYS / 16];
#pragma unroll
        for (int k = 0; k < W_KEYS / 16; ++k)
            p[k] = make_uint4(half_pair(s[k * 2][0], s[k * 2][1]), half_pair(s[k * 2][2], s[k * 2][3]),
                              half_pair(s[k * 2 + 1][0], s[k * 2 + 1][1]), half_pair(s[k * 2 + 1][2], s[k * 2 + 1][3]));
        if (alpha[0] != 1.0f || alpha[1] != 1.0f) {
#pragma unroll
            for (int pair = 0; pair < V_PAIRS; ++pair) {
#pragma unroll
                for (int e = 0; e < 8; ++e) o[pair][e / 4][e % 4] *= alpha[e % 4 / 2];
            }
        }
        copy_wait<1>();
        __syncthreads();
#pragma unroll
        for (int k = 0; k < W_KEYS / 16; ++k) {
#pragma unroll
            for (int pair = 0; pair < V_PAIRS; ++pair) {
                uint4 b = ldmatrix4_transposed(v_lane + k * 16 * V_PITCH + pair * 32);
                mma_half(o[pair][0], p[k], b.x, b.y);
                mma_half(o[pair][1], p[k], b.z, b.w);
            }
        }
    }
    copy_wait<0>();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        l[r] += __shfl_xor_sync(0xffffffffu, l[r], 1);
        l[r] += __shfl_xor_sync(0xffffffffu, l[r], 2);
    }
    if (P_SPLIT > 1) {
        float4* other_o = (float4*)shared + (row_warp * 32 + lane);
        float2* other_ml = (float2*)(shared + PREFILL_ML) + row_warp * 16 + g;
        __syncthreads();
        if (part == 1) {
#pragma unroll
            for (int k = 0; k < V_PAIRS * 2; ++k) other_o[k * 128] = make_float4(o[k / 2][k % 2][0], o[k / 2][k % 2][1], o[k / 2][k % 2][2], o[k / 2][k % 2][3]);
            if (i == 0) other_ml[0] = make_float2(m[0], l[0]), other_ml[8] = make_float2(m[1], l[1]);
        }
        __syncthreads();
        if (part == 1) return;
        float mine[2], theirs[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float2 ml = other_ml[r * 8];
            const float top = fmaxf(m[r], ml.x), shift = top == minus_infinity() ? 0.0f : top;
            mine[r] = exp2_fast(m[r] - shift);
            theirs[r] = exp2_fast(ml.x - shift);
            m[r] = top;
            l[r] = l[r] * mine[r] + ml.y * theirs[r];
        }
#pragma unroll
        for (int k = 0; k < V_PAIRS * 2; ++k) {
            float4 x = other_o[k * 128];
            float(&y)[4] = o[k / 2][k % 2];
            y[0] = y[0] * mine[0] + x.x * theirs[0];
            y[1] = y[1] * mine[0] + x.y * theirs[0];
            y[2] = y[2] * mine[1] + x.z * theirs[1];
            y[3] = y[3] * mine[1] + x.w * theirs[1];
        }
    }

#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (row_g + r * 8 >= tokens) continue;
        if (more && i == 0) state[(size_t)(row_g + r * 8) * heads + h] = make_float2(m[r], l[r]);
        const float factor = more ? 1.0f : 1.0f / l[r];
#pragma unroll
        for (int pair = 0; pair < V_PAIRS; ++pair) {
#pragma unroll
            for (int nt = 0; nt < 2; ++nt) {
                if (V % 16 != 0 && pair * 16 + nt * 8 >= V) continue;
                *(float2*)(out_g + (size_t)r * 8 * heads * V + pair * 16 + nt * 8) = make_float2(o[pair][nt][r * 2] * factor, o[pair][nt][r * 2 + 1] * factor);
            }
        }
    }
}
