#pragma once
#include "attention.cuh"

// ---- decode ----
// mla_absorb -> mla_attend -> mla_project. Rows are taken 16 at a time where rows share weights.

constexpr int ABSORB_COLUMNS = 32;                                       // latent columns of a block: one n-tile for each of 4 warps
constexpr int NOPE_STEPS = div_up(NOPE, 16);
constexpr int ABSORB_PITCH = ABSORB_COLUMNS * 2 + 16;                    // an odd number of 16-byte units: ldmatrix without conflicts
constexpr int NOPE_PITCH = NOPE_STEPS * 32 + 16;
constexpr int ABSORB_CHUNKS = div_up(R, ABSORB_COLUMNS);
constexpr int ROPE_PAIRS = (D_STEPS * 16 - R) / 2;                       // rotated part, with its padding to a whole step

// Where the pair (k, k + 1) of head h, row t lies in `absorbed`, in units of {hi, lo}: the order of the score product's A fragments,
// rows 0..8 of A the heads' high parts, rows 8..16 their low parts.
__device__ __forceinline__ size_t absorbed_index(int t, int heads, int h, int k) {
    size_t step = ((size_t)t * div_up(heads, GROUP) + h / GROUP) * D_STEPS + k / 16;
    return (step * 32 + (h % GROUP) * 4 + (k % 8) / 2) * 2 + (k % 16) / 8;
}

// What comes before attention, where mla_absorb is to do it on the way: rotating queries, and [norm(latent) | rotated key] of kv [tokens, R + ROPE]
// into the cache. No `kv`: all that has been done.
struct Store {
    const float *kv, *kv_norm, *inv_freq;
    u16* cache;
    const int *positions, *slots;
    float eps, scaling;
    int interleaved;
};

__device__ __forceinline__ float load_fresh(const float* p) {
    float x;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
    return x;
}
// Where value e of a rotated head comes from: out = x[first] * cosine -+ x[second] * sine, or the other way round for the second of a pair.
struct Turn {
    int first, second;
    float cosine, sine;
    bool is_second;
    __device__ __forceinline__ Turn(const Store& store, int position, int e) {
        constexpr int PAIRS = ROPE / 2;
        const int pair = store.interleaved ? e / 2 : e % PAIRS;
        first = store.interleaved ? e / 2 * 2 : pair, second = store.interleaved ? first + 1 : PAIRS + pair, is_second = e == second;
        // The angle is an f32 product, as in HF transformers.
        sincosf((float)position * store.inv_freq[pair], &sine, &cosine);
        cosine *= store.scaling, sine *= store.scaling;
    }
    __device__ __forceinline__ float operator()(float a, float b) const { return is_second ? a * sine + b * cosine : a * cosine - b * sine; }
};

// A row of the cache, by a block of 128 threads.
__device__ __forceinline__ void store_row(const Store& store, int t) {
    __shared__ float squares[4];
    const int tid = threadIdx.x;
    const float* x = store.kv + (size_t)t * D;
    u16* slot = store.cache + (size_t)store.slots[t] * D;
    static_assert(R <= 512 && ROPE <= 128, "a thread has four latents and a value of the key");
    float4 latent = make_float4(0.0f, 0.0f, 0.0f, 0.0f), norm = latent;
    const bool mine = tid * 4 < R;
    if (mine) norm = *(const float4*)(store.kv_norm + tid * 4);
    const int e = tid < ROPE ? tid : 0;
    const Turn turn(store, store.positions[t], e);
    predecessor_wait();
    if (mine) latent = load_fresh((const float4*)(x + tid * 4));
    const float a = load_fresh(x + R + turn.first), b = load_fresh(x + R + turn.second);
    float square = (latent.x * latent.x + latent.y * latent.y) + (latent.z * latent.z + latent.w * latent.w);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) square += __shfl_xor_sync(0xffffffffu, square, d);
    if (tid % 32 == 0) squares[tid / 32] = square;
    __syncthreads();
    const float scale = 1.0f / sqrtf(((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)R + store.eps);
    if (mine) *(uint2*)(slot + tid * 4) = make_uint2(half_pair(latent.x * scale * norm.x, latent.y * scale * norm.y), half_pair(latent.z * scale * norm.z, latent.w * scale * norm.w));
    if (tid < ROPE) slot[R + tid] = (u16)half_pair(turn(a, b), 0.0f);
    __syncthreads(); // the squares have been read
}

// absorbed[t, h] = scale * log2(e) * [q_nope . kv_b[nope rows of h] | q_rope].
//   q [tokens, heads * (NOPE + ROPE)] f32; kv_b [heads * (NOPE + V), R] bf16
//   grid (ABSORB_CHUNKS + 1, heads, div_up(tokens, 16)), one more in x with something to store; 128 threads
extern "C" __global__ void __launch_bounds__(128, 1)
mla_absorb(const float* __restrict__ q, const u16* __restrict__ kv_b, uint2* __restrict__ absorbed, int tokens, int heads, float scale, __grid_constant__ const Store store) {
    __shared__ __align__(16) unsigned char tile[NOPE_STEPS * 16 * ABSORB_PITCH], q_hi[16 * NOPE_PITCH], q_lo[16 * NOPE_PITCH];
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, i = lane % 4;
    const int h = blockIdx.y, column = blockIdx.x * ABSORB_COLUMNS;
    const int first = blockIdx.z * 16, last = min(first + 16, tokens);
    const bool rotated = blockIdx.x == ABSORB_CHUNKS;
    const float factor = scale * LOG2E;

    successor_start();
    if (blockIdx.x > ABSORB_CHUNKS) {
        // The heads' blocks share the rows.
        for (int t = first + h; t < last; t += heads) store_row(store, t);
        if (first + h >= last) predecessor_wait();
        return;
    }
    if (!rotated) {
        const u16* rows = kv_b + (size_t)h * (NOPE + V) * R;
        for (int piece = tid; piece < NOPE_STEPS * 16 * 4; piece += 128) {
            int n = piece / 4, c = column + piece % 4 * 8;
            bool wanted = n < NOPE && c < R;
            copy16(shared_address(tile + n * ABSORB_PITCH + piece % 4 * 16), wanted ? rows + (size_t)n * R + c : rows, wanted);
        }
        copy_commit();
    }

    if (rotated && store.kv) {
        for (int k = tid; k < (last - first) * ROPE_PAIRS; k += 128) {
            const int t = first + k / ROPE_PAIRS, d = k % ROPE_PAIRS * 2;
            const float* head = q + ((size_t)t * heads + h) * (NOPE + ROPE) + NOPE;
            const Turn even(store, store.positions[t], d < ROPE ? d : 0), odd(store, store.positions[t], d < ROPE ? d + 1 : 0);
            if (k == tid) predecessor_wait();
            float x = even(load_fresh(head + even.first), load_fresh(head + even.second)), y = odd(load_fresh(head + odd.first), load_fresh(head + odd.second));
            if (d >= ROPE) x = y = 0.0f;
            absorbed[absorbed_index(t, heads, h, R + d)] = half_split(x * factor, y * factor);
        }
        if (tid >= (last - first) * ROPE_PAIRS) predecessor_wait();
        return;
    }
    if (rotated) {
        predecessor_wait();
        constexpr int ROUNDS = div_up(16 * ROPE_PAIRS, 128);
        float2 x[ROUNDS];
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            int k = round * 128 + tid, t = first + k / ROPE_PAIRS, d = k % ROPE_PAIRS * 2;
            x[round] = make_float2(0.0f, 0.0f);
            if (t < last && d < ROPE) x[round] = load_fresh((const float2*)(q + ((size_t)t * heads + h) * (NOPE + ROPE) + NOPE + d));
        }
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            int k = round * 128 + tid, t = first + k / ROPE_PAIRS, d = k % ROPE_PAIRS * 2;
            if (t < last) absorbed[absorbed_index(t, heads, h, R + d)] = half_split(x[round].x * factor, x[round].y * factor);
        }
        return;
    }

    const u32 a_lane = (lane / 8 % 2 * 8 + lane % 8) * NOPE_PITCH + lane / 16 * 16;
    const u32 b_row = shared_address(tile + lane % 16 * ABSORB_PITCH + warp * 16);
    const int k_out = column + warp * 8 + i * 2;
#pragma unroll 1
    for (int show = tokens <= ATT_REHEARSE; show >= 0; --show) {
        if (show == 0) predecessor_wait();
        const int real = show ? first : last; // rows to read and to write
        {
            constexpr int QUADS = NOPE_STEPS * 4; // a row, with its padding to whole steps
            constexpr int ROUNDS = div_up(16 * QUADS, 128);
            float4 x[ROUNDS];
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                int k = round * 128 + tid, t = first + k / QUADS, c = k % QUADS * 4;
                x[round] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (t < real && c < NOPE) x[round] = load_fresh((const float4*)(q + ((size_t)t * heads + h) * (NOPE + ROPE) + c));
            }
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                int k = round * 128 + tid, t = k / QUADS, c = k % QUADS * 4;
                if (first + t >= last) break;
                uint2 a = bf16_split(x[round].x, x[round].y), b = bf16_split(x[round].z, x[round].w);
                *(uint2*)(q_hi + t * NOPE_PITCH + c * 2) = make_uint2(a.x, b.x);
                *(uint2*)(q_lo + t * NOPE_PITCH + c * 2) = make_uint2(a.y, b.y);
            }
        }
        copy_wait<0>();
        __syncthreads();

        // Rows of A past the last token hold anything: no other row's sum sees them.
        float sum_hi[2][4] = {}, sum_lo[2][4] = {};
        constexpr int BATCH = 6; // steps whose operands are in flight together
#pragma unroll
        for (int s0 = 0; s0 < NOPE_STEPS; s0 += BATCH) {
            uint2 b[BATCH];
            uint4 hi[BATCH], lo[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                if (s0 + k >= NOPE_STEPS) break;
                b[k] = ldmatrix2_transposed(b_row + (s0 + k) * 16 * ABSORB_PITCH);
                hi[k] = ldmatrix4(shared_address(q_hi) + a_lane + (s0 + k) * 32);
                lo[k] = ldmatrix4(shared_address(q_lo) + a_lane + (s0 + k) * 32);
            }
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                if (s0 + k >= NOPE_STEPS) break;
                mma(sum_hi[k % 2], hi[k], b[k].x, b[k].y);
                mma(sum_lo[k % 2], lo[k], b[k].x, b[k].y);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int t = first + g + r * 8;
            if (t >= real || k_out >= R) continue;
            float a = sum_hi[0][r * 2] + sum_hi[1][r * 2] + sum_lo[0][r * 2] + sum_lo[1][r * 2];
            float b = sum_hi[0][r * 2 + 1] + sum_hi[1][r * 2 + 1] + sum_lo[0][r * 2 + 1] + sum_lo[1][r * 2 + 1];
            absorbed[absorbed_index(t, heads, h, k_out)] = half_split(a * factor, b * factor);
        }
        __syncthreads();
    }
}

constexpr int TILE = 32;                                 // positions of a step of mla_attend; divides BLOCK
constexpr int D_PITCH = D_STEPS * 32 + 16;
constexpr int WARP_STEPS = div_up(D_STEPS, 8);           // score steps of a warp: 8 warps share the sum over D
constexpr int PAIRS = R / 16;                            // latent columns in units of 16
constexpr int PAIRS_PER_WARP = div_up(PAIRS, 8);
constexpr int SCORE_PITCH = TILE + 8;
constexpr int ATTEND_SCORES = 2 * TILE * D_PITCH;        // byte offsets in shared memory
constexpr int ATTEND_P = ATTEND_SCORES + 8 * GROUP * SCORE_PITCH * 4;
constexpr int ATTEND_ALPHA = ATTEND_P + 2 * 32 * 16;
constexpr int ATTEND_SHARED = ATTEND_ALPHA + GROUP * 4;
#if __CUDA_ARCH__ >= 1200
constexpr int ATTEND_BLOCKS = 1; // shared memory holds no second one
#else
constexpr int ATTEND_BLOCKS = 2;
#endif
static_assert(ATTEND_SHARED <= 99 * 1024, "mla_attend fits the smallest multiprocessor");

// Tiles of each split but the last: a function of the context alone, so that mla_project knows what mla_attend wrote.
__device__ __forceinline__ int tiles_per_split(int context, int splits, int least_tiles) {
    int tiles = div_up(context, TILE);
    return max(div_up(tiles, splits), least_tiles);
}

// Positions from .. to of a tile; zeros in place of those past the context.
__device__ __forceinline__ void load_cache_tile(u32 dst, const u16* cache, const u32* table, int tile, int from, int to, int context) {
    constexpr int PIECES = D / 8;
    const int start = tile * TILE;
    const u16* src = cache + ((size_t)table[start / BLOCK] * BLOCK + start % BLOCK) * D;
    int tid; // read anew, lest every piece's row is kept in a register over the whole loop
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
#pragma unroll
    for (int round = 0; round < div_up(TILE * PIECES, 256); ++round) {
        int piece = round * 256 + tid, row = piece / PIECES;
        if ((TILE * PIECES % 256 == 0 || piece < TILE * PIECES) && start + row >= from && start + row < to)
            copy16(dst + piece * 16 + row * (D_PITCH - D * 2), src + piece * 8, start + row < context);
    }
}

// One split of the context of one row for 8 heads: o = sum of exp2(score - m) * latent, l = sum of exp2(score - m).
//   part [tokens, heads, splits, R] f32; part_ml [tokens, heads, splits] {m, l}; entries of empty splits are not written
//   grid (splits, tokens, div_up(heads, 8)), 256 threads, ATTEND_SHARED bytes
extern "C" __global__ void __launch_bounds__(256, ATTEND_BLOCKS)
mla_attend(const uint2* __restrict__ absorbed, const u16* __restrict__ cache, const int* __restrict__ row_pos, const int* __restrict__ row_table,
           const u32* __restrict__ blocks, float* __restrict__ part, float2* __restrict__ part_ml, int heads, int splits, int least_tiles) {
    unsigned char* shared = (unsigned char*)shared_bytes;
    float* scores = (float*)(shared + ATTEND_SCORES);
    uint4* p_fragments = (uint4*)(shared + ATTEND_P);
    float* alphas = (float*)(shared + ATTEND_ALPHA);
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, i = lane % 4;
    const int split = blockIdx.x, t = blockIdx.y, group = blockIdx.z;
    successor_start();
    const int context = row_pos[t] + 1;
    const int tiles = div_up(context, TILE), per_split = tiles_per_split(context, splits, least_tiles);
    const int first = split * per_split, count = min(per_split, tiles - first);
    if (count <= 0) {
        // One block of each row stays, so that this kernel never ends before its predecessor.
        if (split == 0) predecessor_wait();
        return;
    }

    const u32* table = blocks + row_table[t];
    const u32 stages = shared_address(shared);
    if (D % 16 != 0 && tid < 2 * TILE) *(uint4*)(shared + tid * D_PITCH + D * 2) = make_uint4(0, 0, 0, 0);
    // A step's rows may be consecutive positions of one sequence: only positions older than all of them are sure to be in the cache already.
    const int old = context - (int)gridDim.y;
    const bool fresh = (first + min(count, 2)) * TILE > old;
    for (int n = 0; n < 2; ++n) {
        if (n < count) load_cache_tile(stages + n * TILE * D_PITCH, cache, table, first + n, 0, old, context);
        copy_commit();
    }

    uint4 q[WARP_STEPS];
#pragma unroll
    for (int s = 0; s < WARP_STEPS; ++s) q[s] = make_uint4(0, 0, 0, 0);
    float o[PAIRS_PER_WARP][2][4];
    float m = minus_infinity(), l = 0.0f; // of head `warp`; l is this lane's share

    const u32 k_lane = (lane / 16 * 8 + lane % 8) * D_PITCH + warp * 32 + lane / 8 % 2 * 16;
    const u32 v_lane = (lane / 8 % 2 * 8 + lane % 8) * D_PITCH + lane / 16 * 16;
#pragma unroll 1
    for (int n = gridDim.y <= ATT_REHEARSE ? -1 : 0; n < count; ++n) {
        if (n <= 0) {
            if (n == 0) {
                predecessor_wait();
                if (fresh && ATT_REHEARSE > 0) __syncthreads(); // the rehearsal has read the tile
                if (fresh)
                    for (int k = 0; k < min(count, 2); ++k) load_cache_tile(stages + k * TILE * D_PITCH, cache, table, first + k, old, context + TILE, context);
                copy_commit();
                const uint4* source = (const uint4*)absorbed + ((size_t)t * gridDim.z + group) * D_STEPS * 32 + lane;
                const bool real = group * GROUP + g < heads;
#pragma unroll
                for (int s = 0; s < WARP_STEPS; ++s) {
                    int step = s * 8 + warp;
                    if (real && step < D_STEPS) q[s] = load_fresh(source + step * 32);
                }
            }
            m = minus_infinity();
            l = 0.0f;
#pragma unroll
            for (int e = 0; e < PAIRS_PER_WARP * 8; ++e) o[e / 8][e / 4 % 2][e % 4] = 0.0f;
        }
        if (n < 0) copy_wait<1>();
        else if (n == 0 && !fresh) copy_wait<2>(); // the second tile may still be on its way
        else copy_wait<0>();
        __syncthreads();
        const u32 stage = stages + (n > 0 ? n % 2 : 0) * TILE * D_PITCH;
        if (n > 0 && n + 1 < count) load_cache_tile(stages + (n + 1) % 2 * TILE * D_PITCH, cache, table, first + n + 1, 0, context + TILE, context);
        if (n >= 0) copy_commit();

        float s[TILE / 8][4] = {};
        uint4 k_part[WARP_STEPS][TILE / 16];
#pragma unroll
        for (int step = 0; step < WARP_STEPS; ++step) {
            // Past the last step q is zero: any column will do.
            const u32 column = (step + 1) * 8 <= D_STEPS ? step * 256 : min(step * 8 + warp, D_STEPS - 1) * 32 - warp * 32;
#pragma unroll
            for (int half = 0; half < TILE / 16; ++half) k_part[step][half] = ldmatrix4(stage + k_lane + half * 16 * D_PITCH + column);
        }
#pragma unroll
        for (int step = 0; step < WARP_STEPS; ++step) {
#pragma unroll
            for (int half = 0; half < TILE / 16; ++half) {
                mma_half(s[half * 2], q[step], k_part[step][half].x, k_part[step][half].y);
                mma_half(s[half * 2 + 1], q[step], k_part[step][half].z, k_part[step][half].w);
            }
        }
#pragma unroll
        for (int nt = 0; nt < TILE / 8; ++nt)
            *(float2*)(scores + (warp * GROUP + g) * SCORE_PITCH + nt * 8 + i * 2) = make_float2(s[nt][0] + s[nt][2], s[nt][1] + s[nt][3]);
        __syncthreads();

        // One warp for each head, one lane for each position.
        float score = minus_infinity();
        if ((first + n) * TILE + lane < context) {
            score = 0.0f;
#pragma unroll
            for (int part_of_d = 0; part_of_d < 8; ++part_of_d) score += scores[(part_of_d * GROUP + warp) * SCORE_PITCH + lane];
        }
        float top = score;
#pragma unroll
        for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
        top = fmaxf(m, top);
        float alpha = exp2_fast(m - top), p = exp2_fast(score - top);
        m = top;
        l = l * alpha + p;
        float next = __shfl_down_sync(0xffffffffu, p, 1);
        if (lane % 2 == 0) ((uint2*)p_fragments)[(lane / 16 * 32 + warp * 4 + lane % 8 / 2) * 2 + lane / 8 % 2] = half_split(p, next);
        if (lane == 0) alphas[warp] = alpha;
        __syncthreads();

        float rescale = alphas[g];
        uint4 p0 = p_fragments[lane], p1 = p_fragments[32 + lane];
#pragma unroll
        for (int pair = 0; pair < PAIRS_PER_WARP; ++pair) {
            int column = (warp * PAIRS_PER_WARP + pair) * 16;
            if (PAIRS % 8 != 0 && column >= R) break;
#pragma unroll
            for (int e = 0; e < 8; ++e) o[pair][e / 4][e % 4] *= rescale;
            uint4 b = ldmatrix4_transposed(stage + v_lane + column * 2);
            mma_half(o[pair][0], p0, b.x, b.y);
            mma_half(o[pair][1], p0, b.z, b.w);
            b = ldmatrix4_transposed(stage + v_lane + 16 * D_PITCH + column * 2);
            mma_half(o[pair][0], p1, b.x, b.y);
            mma_half(o[pair][1], p1, b.z, b.w);
        }
    }

#pragma unroll
    for (int d = 16; d > 0; d /= 2) l += __shfl_xor_sync(0xffffffffu, l, d);
    if (lane == 0 && group * GROUP + warp < heads) part_ml[((size_t)t * heads + group * GROUP + warp) * splits + split] = make_float2(m, l);
    const int h = group * GROUP + g;
    if (h >= heads) return;
    float* out = part + (((size_t)t * heads + h) * splits + split) * R + i * 2;
#pragma unroll
    for (int pair = 0; pair < PAIRS_PER_WARP; ++pair) {
        int column = (warp * PAIRS_PER_WARP + pair) * 16;
        if (PAIRS % 8 != 0 && column >= R) break;
#pragma unroll
        for (int nt = 0; nt < 2; ++nt)
            *(float2*)(out + column + nt * 8) = make_float2(o[pair][nt][0] + o[pair][nt][2], o[pair][nt][1] + o[pair][nt][3]);
    }
}

constexpr int CLUSTER = 8;                                       // blocks that share a head: each joins 1/8 of the latent, makes 1/8 of the output
constexpr int PROJECT_ROWS = 8;                                  // rows of A hold their high parts, the other 8 their low parts
constexpr int SLICE = div_up(div_up(R, CLUSTER), 8) * 8;         // latent columns that a block joins, at most 64: 16 quads
constexpr int V_SLICE = div_up(V, CLUSTER * 8) * 8;              // output rows of a block
constexpr int V_TILES = V_SLICE / 8;
constexpr int K_WARPS = V_TILES > 4 ? 1 : V_TILES > 2 ? 2 : V_TILES > 1 ? 4 : 8; // warps that share an output tile
constexpr int R_PITCH = R * 2 + 16;
constexpr int R_STEPS = R / 16;
constexpr int K_STEPS = div_up(R_STEPS, K_WARPS);
constexpr int PROJECT_O = V_SLICE * R_PITCH;                     // byte offsets in shared memory
constexpr int PROJECT_SUMS = PROJECT_O + 16 * R_PITCH;
constexpr int PROJECT_ML = PROJECT_SUMS + at_least(PROJECT_ROWS * 4 * 64 * 4, K_WARPS * V_TILES * 32 * 8);
constexpr int PROJECT_BARRIER = PROJECT_ML + PROJECT_ROWS * 4 * 8;
constexpr int PROJECT_SHARED = PROJECT_BARRIER + 8;
static_assert(SLICE <= 64 && V_TILES * K_WARPS <= 8, "a block of mla_project is 256 threads");
static_assert(PROJECT_SHARED <= 99 * 1024, "mla_project fits the smallest multiprocessor");

// Sum over positions, relative to exp2(m), and its normaliser.
struct Joined {
    float m, l;
    float4 x;
};
__device__ __forceinline__ void join(Joined& a, float m, float l, float4 x) {
    const float top = fmaxf(a.m, m);
    const float old = a.m == top ? 1.0f : exp2_fast(a.m - top), now = m == top ? 1.0f : exp2_fast(m - top); // two empty sums join to an empty one
    a.m = top;
    a.l = a.l * old + l * now;
    a.x = make_float4(a.x.x * old + x.x * now, a.x.y * old + x.y * now, a.x.z * old + x.z * now, a.x.w * old + x.w * now);
}

// Joins the splits of ROWS rows for four columns: a thread takes every 16th split of each row, four threads of a warp then meet, and the sums of the 4
// warps that are left for a column go to shared memory. The order is the same for any number of rows, so a row's result does not depend on its batch.
template <int ROWS>
__device__ __forceinline__ void join_splits(const float* source, const float2* source_ml, size_t row_stride, const int (&used)[PROJECT_ROWS], bool real, int joiner, int quad,
                                            float* sums, float2* sums_ml) {
    constexpr int CHUNKS = PROJECT_ROWS / ROWS, BATCH = 4; // loads in flight, at first and in the rest of long contexts
    float2 ml[ROWS][CHUNKS];
    float4 x[ROWS][CHUNKS];
#pragma unroll
    for (int t = 0; t < ROWS; ++t) {
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) {
            const int s = joiner + k * 16;
            ml[t][k] = make_float2(minus_infinity(), 0.0f);
            x[t][k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (real && s < used[t]) {
                ml[t][k] = load_fresh(source_ml + t * row_stride + s);
                x[t][k] = load_fresh((const float4*)(source + (t * row_stride + s) * R));
            }
        }
    }
#pragma unroll
    for (int t = 0; t < ROWS; ++t) {
        Joined sum = {minus_infinity(), 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k)
            if (joiner + k * 16 < used[t]) join(sum, ml[t][k].x, ml[t][k].y, x[t][k]);
        for (int s0 = joiner + CHUNKS * 16; real && s0 < used[t]; s0 += BATCH * 16) {
            float2 more_ml[BATCH];
            float4 more[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const int s = min(s0 + k * 16, used[t] - 1); // past the end the last one again, not used
                more_ml[k] = load_fresh(source_ml + t * row_stride + s);
                more[k] = load_fresh((const float4*)(source + (t * row_stride + s) * R));
            }
#pragma unroll
            for (int k = 0; k < BATCH; ++k)
                if (s0 + k * 16 < used[t]) join(sum, more_ml[k].x, more_ml[k].y, more[k]);
        }
#pragma unroll
        for (int d = 16; d >= 8; d /= 2) {
            float m = __shfl_xor_sync(0xffffffffu, sum.m, d), l = __shfl_xor_sync(0xffffffffu, sum.l, d);
            float4 other = make_float4(__shfl_xor_sync(0xffffffffu, sum.x.x, d), __shfl_xor_sync(0xffffffffu, sum.x.y, d),
                                       __shfl_xor_sync(0xffffffffu, sum.x.z, d), __shfl_xor_sync(0xffffffffu, sum.x.w, d));
            join(sum, m, l, other);
        }
        if (joiner < 4) {
            *(float4*)(sums + (t * 4 + joiner) * 64 + quad * 4) = sum.x;
            if (quad == 0) sums_ml[t * 4 + joiner] = make_float2(sum.m, sum.l);
        }
    }
}

// out[t, h] = kv_b[v rows of h] . (the splits of t, h joined); zeros for a row with row_pos < 0.
//   out [tokens, heads * V] f32
//   grid (8, heads, div_up(tokens, 8)) in clusters of (8, 1, 1), 256 threads, PROJECT_SHARED bytes
extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(256, 2)
mla_project(const float* __restrict__ part, const float2* __restrict__ part_ml, const u16* __restrict__ kv_b, const int* __restrict__ row_pos,
            float* __restrict__ out, int tokens, int heads, int splits, int least_tiles) {
    unsigned char* shared = (unsigned char*)shared_bytes;
    float* sums = (float*)(shared + PROJECT_SUMS);
    float2* sums_ml = (float2*)(shared + PROJECT_ML);
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, i = lane % 4;
    const int rank = blockIdx.x, h = blockIdx.y, first = blockIdx.z * PROJECT_ROWS, count = min(PROJECT_ROWS, tokens - first);
    const u32 base = shared_address(shared), barrier = base + PROJECT_BARRIER;

    successor_start();
    if (tid == 0) barrier_init(barrier);
    cluster_arrive();
    {
        const u16* rows = kv_b + ((size_t)h * (NOPE + V) + NOPE) * R;
        constexpr int PIECES = R / 8;
#pragma unroll 4
        for (int piece = tid; piece < V_SLICE * PIECES; piece += 256) {
            int n = piece / PIECES, row = rank * V_SLICE + n;
            copy16(base + piece * 16 + n * (R_PITCH - R * 2), row < V ? rows + (size_t)rank * V_SLICE * R + piece * 8 : rows, row < V);
        }
        copy_commit();
    }

    // 16 quads of columns, 16 joiners of splits.
    const int quad = warp % 2 * 8 + lane % 8, joiner = lane / 8 * 4 + warp / 2;
    const bool real = quad * 4 < SLICE && rank * SLICE + quad * 4 < R;
    int used[PROJECT_ROWS];
#pragma unroll
    for (int t = 0; t < PROJECT_ROWS; ++t) {
        const int context = t < count ? row_pos[first + t] + 1 : 0;
        used[t] = context > 0 ? div_up(div_up(context, TILE), tiles_per_split(context, splits, least_tiles)) : 0;
    }
    const size_t row = ((size_t)first * heads + h) * splits, row_stride = (size_t)heads * splits;
    const float* source = part + row * R + rank * SLICE + quad * 4;
    cluster_wait(); // every peer runs and its barrier is set up
#pragma unroll 1
    for (int show = tokens <= ATT_REHEARSE; show >= 0; --show) {
        if (show == 0) predecessor_wait();
        // For show with what an earlier step left: uses nothing of it.
        if (count > 4) join_splits<8>(source, part_ml + row, row_stride, used, real, joiner, quad, sums, sums_ml);
        else if (count > 2) join_splits<4>(source, part_ml + row, row_stride, used, real, joiner, quad, sums, sums_ml);
        else if (count > 1) join_splits<2>(source, part_ml + row, row_stride, used, real, joiner, quad, sums, sums_ml);
        else join_splits<1>(source, part_ml + row, row_stride, used, real, joiner, quad, sums, sums_ml);
        copy_wait<0>();
        __syncthreads();
        if (tid == 0 && show == 0) barrier_expect(barrier, count * R * 4);
        for (int k = tid; k < count * 128; k += 256) {
            const int c = k % 16 * 4, peer = k / 16 % 8, r = k / 128;
            if (c >= SLICE || rank * SLICE + c >= R) continue;
            Joined sum = {minus_infinity(), 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float2 ml = sums_ml[r * 4 + j];
                join(sum, ml.x, ml.y, *(const float4*)(sums + (r * 4 + j) * 64 + c));
            }
            const float inverse = sum.l == 0.0f ? 0.0f : 1.0f / sum.l; // no split: zeros
            const uint2 a = bf16_split(sum.x.x * inverse, sum.x.y * inverse), b = bf16_split(sum.x.z * inverse, sum.x.w * inverse);
            const u32 remote = peer_address(base + PROJECT_O + r * R_PITCH + (rank * SLICE + c) * 2, peer), remote_barrier = peer_address(barrier, peer);
            if (show) continue;
            store_in_peer(remote, remote_barrier, a.x, b.x);
            store_in_peer(remote + 8 * R_PITCH, remote_barrier, a.y, b.y);
        }
        if (show == 0) barrier_wait(barrier);

        const int v_tile = warp % V_TILES, k_warp = warp / V_TILES;
        float c[4][4] = {};
        if (k_warp < K_WARPS) {
            const u32 a_lane = base + PROJECT_O + (lane / 8 % 2 * 8 + lane % 8) * R_PITCH + lane / 16 * 16;
            const u32 b_lane = base + (v_tile * 8 + lane % 8) * R_PITCH + lane / 8 % 2 * 16;
            constexpr int BATCH = 8; // steps whose operands are in flight together
#pragma unroll
            for (int s0 = 0; s0 < K_STEPS; s0 += BATCH) {
                uint2 w[BATCH];
                uint4 x[BATCH];
#pragma unroll
                for (int k = 0; k < BATCH; ++k) {
                    const int step = k_warp * K_STEPS + s0 + k;
                    if (s0 + k >= K_STEPS || (R_STEPS % K_WARPS != 0 && step >= R_STEPS)) break;
                    w[k] = ldmatrix2(b_lane + step * 32);
                    x[k] = ldmatrix4(a_lane + step * 32);
                }
#pragma unroll
                for (int k = 0; k < BATCH; ++k) {
                    const int step = k_warp * K_STEPS + s0 + k;
                    if (s0 + k >= K_STEPS || (R_STEPS % K_WARPS != 0 && step >= R_STEPS)) break;
                    mma(c[k % 4], x[k], w[k].x, w[k].y);
                }
            }
        }
        // Rows of A past the last token hold anything: no other row's sum sees them.
        float2 y = make_float2(c[0][0] + c[1][0] + c[2][0] + c[3][0] + c[0][2] + c[1][2] + c[2][2] + c[3][2],
                               c[0][1] + c[1][1] + c[2][1] + c[3][1] + c[0][3] + c[1][3] + c[2][3] + c[3][3]);
        if (K_WARPS > 1) {
            __syncthreads(); // the sums have been read
            float2* shares = (float2*)sums;
            if (k_warp > 0 && k_warp < K_WARPS) shares[(k_warp * V_TILES + v_tile) * 32 + lane] = y;
            __syncthreads();
            if (k_warp == 0) {
#pragma unroll
                for (int k = 1; k < K_WARPS; ++k) {
                    float2 x = shares[(k * V_TILES + v_tile) * 32 + lane];
                    y.x += x.x, y.y += x.y;
                }
            }
        }
        const int column = rank * V_SLICE + v_tile * 8 + i * 2;
        if (show == 0 && k_warp == 0 && column < V && g < count) *(float2*)(out + ((size_t)(first + g) * heads + h) * V + column) = y;
        __syncthreads();
    }
}
