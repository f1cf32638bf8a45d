// Latent attention (MLA) over a paged cache, for sm_90, sm_100 and sm_120: decode in the absorbed form, prefill in the materialised form.
//
// Compiled by NVRTC without any header. Dimensions are compile-time constants:
//   ATT_NOPE  query values per head that meet the latent through kv_b, a multiple of 8
//   ATT_ROPE  query values per head that meet the rotated key, a multiple of 8
//   ATT_V     output values per head, a multiple of 8, at most 512 (448 where ATT_R is 512: shared memory)
//   ATT_R     latent values per position, a multiple of 16, at most 512
// The number of heads is an argument. Position p of a row lies in cache slot blocks[row_table[t] + p / 64] * 64 + p % 64.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int NOPE = ATT_NOPE;
constexpr int ROPE = ATT_ROPE;
constexpr int V = ATT_V;
constexpr int R = ATT_R;
static_assert(NOPE > 0 && NOPE % 8 == 0 && ROPE > 0 && ROPE % 8 == 0 && V > 0 && V % 8 == 0 && V <= 512, "head dimensions are multiples of 8");
static_assert(R > 0 && R % 16 == 0 && R <= 512, "the latent is a multiple of 16 wide, at most 512");

constexpr int BLOCK = 64;                  // positions of a cache block
constexpr int D = R + ROPE;                // values of a cache row: latent | rotated key
constexpr int D_STEPS = (D + 15) / 16;     // steps of 16 in the score product
constexpr int GROUP = 8;                   // heads that one block of the decode kernel serves
constexpr float LOG2E = 1.4426950408889634f;

constexpr int div_up(int a, int b) { return (a + b - 1) / b; }
constexpr int at_least(int a, int b) { return a > b ? a : b; }

// ---- prelude: what the headers would have brought ----

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two floats as bf16, `first` in the low half: the lower address, the smaller k.
__device__ __forceinline__ u32 bf16_pair(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// hi + lo carries 16 bits of mantissa: products with it are as good as with f32 against bf16 data.
__device__ __forceinline__ uint2 bf16_split(float first, float second) {
    u32 hi = bf16_pair(first, second);
    u32 lo = bf16_pair(first - __uint_as_float(hi << 16), second - __uint_as_float(hi & 0xffff0000u));
    return make_uint2(hi, lo);
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes to shared memory; zeros, without touching `src`, where not `wanted`.
__device__ __forceinline__ void copy16(u32 dst, const void* src, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(wanted ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

__device__ __forceinline__ uint4 ldmatrix4(u32 address) {
    uint4 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(address) : "memory");
    return r;
}
__device__ __forceinline__ uint4 ldmatrix4_transposed(u32 address) {
    uint4 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(address) : "memory");
    return r;
}
__device__ __forceinline__ uint2 ldmatrix2(u32 address) {
    uint2 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(address) : "memory");
    return r;
}
__device__ __forceinline__ uint2 ldmatrix2_transposed(u32 address) {
    uint2 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(address) : "memory");
    return r;
}

// c += a . b for 16 rows, 8 columns, 16 terms. A thread (g = lane / 4, i = lane % 4) holds rows g and g + 8 of a and c, columns 2i and 2i + 1 of c.
__device__ __forceinline__ void mma(float (&c)[4], uint4 a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// With programmatic launches a kernel may start as soon as every block of its predecessor has started, and so may that one: until its wait it
// may read only what was there before the whole chain: weights, the step's metadata, cache rows of earlier steps. Every kernel waits (at least one
// block of it), so that its end implies the end of all before it.
__device__ __forceinline__ void predecessor_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void successor_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Code that runs once is slow for want of instructions: each line of it comes from the L2. The decode kernels therefore run their bodies once
// for show, without results, while they wait for their predecessor, where the tokens are few enough for that to matter.
#ifndef ATT_REHEARSE
#define ATT_REHEARSE 4
#endif

__device__ __forceinline__ void barrier_init(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Until the bytes expected in the barrier's first phase are there.
__device__ __forceinline__ void barrier_wait(u32 barrier) {
    u32 done;
    do {
        asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(done) : "r"(barrier) : "memory");
    } while (!done);
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ u32 peer_address(u32 address, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}
// 8 bytes into a peer's shared memory, counted at its barrier.
__device__ __forceinline__ void store_in_peer(u32 remote, u32 remote_barrier, u32 a, u32 b) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];" ::"r"(remote), "r"(a), "r"(b), "r"(remote_barrier) : "memory");
}

// Loads of what an earlier kernel wrote. The compiler may take a plain load through a const __restrict__ pointer for one of constant
// data and move it over the wait for that kernel; these stay in their place, and several in a row are in flight together. They go to the L2:
// no line that came before the wait can answer them.
__device__ __forceinline__ float2 load_fresh(const float2* p) {
    float2 x;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ float4 load_fresh(const float4* p) {
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ uint4 load_fresh(const uint4* p) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p) : "memory");
    return x;
}

extern __shared__ uint4 shared_bytes[];

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

// absorbed[t, h] = scale * log2(e) * [q_nope . kv_b[nope rows of h] | q_rope].
//   q [tokens, heads * (NOPE + ROPE)] f32; kv_b [heads * (NOPE + V), R] bf16
//   grid (ABSORB_CHUNKS + 1, heads, div_up(tokens, 16)), 128 threads
extern "C" __global__ void __launch_bounds__(128, 1)
mla_absorb(const float* __restrict__ q, const u16* __restrict__ kv_b, uint2* __restrict__ absorbed, int tokens, int heads, float scale) {
    __shared__ __align__(16) unsigned char tile[NOPE_STEPS * 16 * ABSORB_PITCH], q_hi[16 * NOPE_PITCH], q_lo[16 * NOPE_PITCH];
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, i = lane % 4;
    const int h = blockIdx.y, column = blockIdx.x * ABSORB_COLUMNS;
    const int first = blockIdx.z * 16, last = min(first + 16, tokens);
    const bool rotated = blockIdx.x == ABSORB_CHUNKS;
    const float factor = scale * LOG2E;

    successor_start();
    if (!rotated) {
        const u16* rows = kv_b + (size_t)h * (NOPE + V) * R;
        for (int piece = tid; piece < NOPE_STEPS * 16 * 4; piece += 128) {
            int n = piece / 4, c = column + piece % 4 * 8;
            bool wanted = n < NOPE && c < R;
            copy16(shared_address(tile + n * ABSORB_PITCH + piece % 4 * 16), wanted ? rows + (size_t)n * R + c : rows, wanted);
        }
        copy_commit();
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
            if (t < last) absorbed[absorbed_index(t, heads, h, R + d)] = bf16_split(x[round].x * factor, x[round].y * factor);
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
            absorbed[absorbed_index(t, heads, h, k_out)] = bf16_split(a * factor, b * factor);
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
                mma(s[half * 2], q[step], k_part[step][half].x, k_part[step][half].y);
                mma(s[half * 2 + 1], q[step], k_part[step][half].z, k_part[step][half].w);
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
        if (lane % 2 == 0) ((uint2*)p_fragments)[(lane / 16 * 32 + warp * 4 + lane % 8 / 2) * 2 + lane / 8 % 2] = bf16_split(p, next);
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
            mma(o[pair][0], p0, b.x, b.y);
            mma(o[pair][1], p0, b.z, b.w);
            b = ldmatrix4_transposed(stage + v_lane + 16 * D_PITCH + column * 2);
            mma(o[pair][0], p1, b.x, b.y);
            mma(o[pair][1], p1, b.z, b.w);
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
//   keys [heads, capacity, NOPE] bf16; values [heads, capacity, V] bf16; table: offset of the sequence's table in `blocks`
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
            for (int nt = 0; nt < 2; ++nt) b[nt] = ldmatrix4(b_lane + nt * 16 * EXPAND_PITCH + half * 32);
#pragma unroll
            for (int mt = 0; mt < 4; ++mt) {
#pragma unroll
                for (int nt = 0; nt < 2; ++nt) {
                    mma(c[mt][nt * 2], a[mt], b[nt].x, b[nt].y);
                    mma(c[mt][nt * 2 + 1], a[mt], b[nt].z, b[nt].w);
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
            *(u32*)at = bf16_pair(c[mt][nt][0], c[mt][nt][1]);
            *(u32*)(at + 8 * EXPAND_OUT_PITCH) = bf16_pair(c[mt][nt][2], c[mt][nt][3]);
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
            *(uint2*)(shared + n * QK_PITCH + c * 2) = make_uint2(bf16_pair(x.x * factor, x.y * factor), bf16_pair(x.z * factor, x.w * factor));
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
                mma(s[nt * 2], a, b.x, b.y);
                mma(s[nt * 2 + 1], a, b.z, b.w);
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
            p[k] = make_uint4(bf16_pair(s[k * 2][0], s[k * 2][1]), bf16_pair(s[k * 2][2], s[k * 2][3]),
                              bf16_pair(s[k * 2 + 1][0], s[k * 2 + 1][1]), bf16_pair(s[k * 2 + 1][2], s[k * 2 + 1][3]));
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
                mma(o[pair][0], p[k], b.x, b.y);
                mma(o[pair][1], p[k], b.z, b.w);
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

// For the host: dynamic shared memory of mla_attend, mla_project, mla_expand and mla_prefill in bytes; the rows and the threads of a block of mla_prefill.
extern "C" __device__ const int mla_launch[6] = {ATTEND_SHARED, PROJECT_SHARED, EXPAND_SHARED, PREFILL_SHARED, P_ROWS, P_THREADS};
