// The same for a single token, where nothing but bytes should count. A block asks for all of its tiles at once, before it waits for the kernel before;
// every kernel leaves room on the multiprocessor for the next one to do so. A warp takes what it needs of the token straight from global memory, norms
// and all, and meets the others of its block once, to add up.
#pragma once
#include "decode_experts.cuh"

// What comes from a kernel that may still run must not be read before the wait, nor from a line that was.
DEV float4 fresh(const float *p) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
}
DEV uint4 fresh(const u16 *p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

// ---- 256 columns of a token in a warp ----
//
// Lane 4 g + t has columns 32 g + 4 t .. and 32 g + 16 + 4 t .. : of a group of 32, what its t takes of two steps. Group g becomes column g of B, and
// zeros elsewhere: one accumulator then keeps the sums of eight groups apart.
struct Share {
    uint4 x;        // eight f16
    float sums[4];  // of columns 64 t + 16 i ..
    float inverse;  // undoes the scale
};

DEV void share_sums(Share &s, int t) {
    float a = (low_half(s.x.x) + high_half(s.x.x)) + (low_half(s.x.y) + high_half(s.x.y));
    float b = (low_half(s.x.z) + high_half(s.x.z)) + (low_half(s.x.w) + high_half(s.x.w));
    a += __shfl_xor_sync(~0u, a, 1); b += __shfl_xor_sync(~0u, b, 1);
    a += __shfl_xor_sync(~0u, a, 2); b += __shfl_xor_sync(~0u, b, 2);
    s.sums[0] = __shfl_sync(~0u, a, 8 * t); s.sums[1] = __shfl_sync(~0u, b, 8 * t);
    s.sums[2] = __shfl_sync(~0u, a, 8 * t + 4); s.sums[3] = __shfl_sync(~0u, b, 8 * t + 4);
}
DEV Share share_of(const float v[8], int t) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(v[i]));
    const float scale = token_scale(__uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest))));
    Share s;
    s.x.x = floats_to_halves(v[0] * scale, v[1] * scale); s.x.y = floats_to_halves(v[2] * scale, v[3] * scale);
    s.x.z = floats_to_halves(v[4] * scale, v[5] * scale); s.x.w = floats_to_halves(v[6] * scale, v[7] * scale);
    s.inverse = __uint_as_float(0x7f000000u - __float_as_uint(scale));  // of a power of two
    share_sums(s, t);
    return s;
}
DEV int share_column(int lane) { return lane / 4 * 32 + lane % 4 * 4; }

// ---- a tile's product with it ----

// 0 <= n < 2^23 as a float.
DEV float small_float(u32 n) { return __uint_as_float(0x4b000000u | n) - 8388608.0f; }

// A row's part of groups 2t and 2t + 1, whose sums of quants are c0 and c1 in units of 1 / unit.
DEV float k_row(const u8 *row, float unit, float c0, float c1, const float s[4], int t) {
    const uint4 side = *(const uint4 *)row;
    const u32 scales = (u32)(((u64)side.z << 32 | side.y) >> 12 * t), mins = (u32)(((u64)side.w << 32 | side.z) >> (16 + 12 * t));
    const float d = low_half(side.x) * unit, dmin = high_half(side.x);
    return d * (small_float(scales & 63) * c0 + small_float(scales >> 6 & 63) * c1) - dmin * (small_float(mins & 63) * (s[0] + s[1]) + small_float(mins >> 6 & 63) * (s[2] + s[3]));
}
DEV float block_row(const u8 *row, float unit, float offset, float c0, float c1, const float s[4], int t) {
    const u32 d = *(const u32 *)(row + 4 * t);
    return low_half(d) * (unit * c0 - offset * (s[0] + s[1])) + high_half(d) * (unit * c1 - offset * (s[2] + s[3]));
}
DEV float six_row(const u8 *tile, int r, float unit, float even0, float odd0, float even1, float odd1, const float s[4], int t) {
    const u32 scales = *(const u32 *)(tile + 3072 + r * 16 + 4 * t) ^ 0x80808080u;
    const float d = half_to_float(*(const u16 *)(tile + 3328 + r * 2));
    auto scale = [&](int i) { return __uint_as_float(__byte_perm(scales, 0x4b000000u, 0x7440 + i)) - 8388736.0f; };
    return d * ((scale(0) * (unit * even0 - 32.0f * s[0]) + scale(1) * (unit * odd0 - 32.0f * s[1])) + (scale(2) * (unit * even1 - 32.0f * s[2]) + scale(3) * (unit * odd1 - 32.0f * s[3])));
}
constexpr float LOW_UNIT = 16777216.0f, HIGH_UNIT = 1048576.0f;  // of nibbles: rows g, rows g + 8

// What blocks of 32 subtract from a quant, and the unit of their rows g + 8.
template <class T> struct Offset { static constexpr float OF = 128.0f, HIGH = LOW_UNIT; };
template <> struct Offset<Q4_0> { static constexpr float OF = 8.0f, HIGH = HIGH_UNIT; };
template <> struct Offset<Q5_0> { static constexpr float OF = 16.0f, HIGH = HIGH_UNIT; };
template <class T, class U> constexpr bool SAME = false;
template <class T> constexpr bool SAME<T, T> = true;

// A lane's part of rows g and g + 8, of the sums of even and of odd steps.
template <class T>
DEV void finish(const u8 *tile, const float e[4], const float o[4], const float s[4], int g, int t, float &low, float &high) {
    const u8 *row = tile + T::BYTES - 256 + g * 16;
    if constexpr (SAME<T, Q6K>) {
        low = six_row(tile, g, LOW_UNIT, e[0], o[0], e[1], o[1], s, t); high = six_row(tile, g + 8, HIGH_UNIT, e[2], o[2], e[3], o[3], s, t);
    } else if constexpr (SAME<T, Q4K> || SAME<T, Q5K>) {
        low = k_row(row, LOW_UNIT, e[0] + o[0], e[1] + o[1], s, t); high = k_row(row + 128, HIGH_UNIT, e[2] + o[2], e[3] + o[3], s, t);
    } else {
        low = block_row(row, LOW_UNIT, Offset<T>::OF, e[0] + o[0], e[1] + o[1], s, t); high = block_row(row + 128, Offset<T>::HIGH, Offset<T>::OF, e[2] + o[2], e[3] + o[3], s, t);
    }
}

// Lanes of group j keep f16 pairs, others get zeros: on the pipe that has less to do than the one of integers.
DEV u32 masked(u32 halves, u32 mask) { u32 h; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(h) : "r"(halves), "r"(mask)); return h; }

// Rows g and g + 8 of a tile in shared memory times a share, of the lane's columns. Kept out of line: each type has registers of its own.
template <class T>
__device__ __noinline__ float2 one_tile(u32 address, uint4 x, float s0, float s1, float s2, float s3) {
    const u8 *tile = (const u8 *)__cvta_shared_to_generic(address);
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float even[4] = {}, odd[4] = {};
    u32 a[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        T quad;
        quad.load(tile, i, lane);
#pragma unroll
        for (int s = 0; s < 4; s += 2) {
            const u32 mask = g == 2 * i + s / 2 ? 0x3c003c00u : 0;
            quad.unpack(s, a);
            mma(even, a, masked(x.x, mask), masked(x.y, mask));
            quad.unpack(s + 1, a);
            mma(odd, a, masked(x.z, mask), masked(x.w, mask));
        }
    }
    const float sums[4] = {s0, s1, s2, s3};
    float low, high;
    finish<T>(tile, even, odd, sums, g, t, low, high);
    return make_float2(low, high);
}
// Sixteen rows of a tile times the warp's share.
DEV void one_tile_of(int type, u32 tile, const Share &share, float *to) {
    float2 r = make_float2(0.0f, 0.0f);
    switch (type) {
    case TYPE_Q4_K: r = one_tile<Q4K>(tile, share.x, share.sums[0], share.sums[1], share.sums[2], share.sums[3]); break;
    case TYPE_Q6_K: r = one_tile<Q6K>(tile, share.x, share.sums[0], share.sums[1], share.sums[2], share.sums[3]); break;
    case TYPE_Q5_K: r = one_tile<Q5K>(tile, share.x, share.sums[0], share.sums[1], share.sums[2], share.sums[3]); break;
    case TYPE_Q8_0: r = one_tile<Q8_0>(tile, share.x, share.sums[0], share.sums[1], share.sums[2], share.sums[3]); break;
    case TYPE_Q4_0: r = one_tile<Q4_0>(tile, share.x, share.sums[0], share.sums[1], share.sums[2], share.sums[3]); break;
    case TYPE_Q5_0: r = one_tile<Q5_0>(tile, share.x, share.sums[0], share.sums[1], share.sums[2], share.sums[3]); break;
    }
    r.x += __shfl_xor_sync(~0u, r.x, 1); r.y += __shfl_xor_sync(~0u, r.y, 1);
    r.x += __shfl_xor_sync(~0u, r.x, 2); r.y += __shfl_xor_sync(~0u, r.y, 2);
    const int lane = threadIdx.x % 32;
    if (lane % 4 == 0) { to[lane / 4] = r.x * share.inverse; to[lane / 4 + 8] = r.y * share.inverse; }
}
// ---- a block's tiles ----
//
// Runs of tiles that lie one behind the other come in pieces of four tiles, each with its barrier and asked for by a warp of its own.
const int PIECE = 4;
struct __align__(16) Strip {
    const u8 *w;    // tile 0
    float *out;     // of row 0
    u32 tiles;      // in shared memory: of tile 0, also where the block has only later ones
    int type, bytes;  // of a tile
    int from, to;   // tiles that this block has
    int chosen;     // whose expert it is; -1: w is complete
    int rows;       // strips of an expert
};
// Shared memory: a barrier for each piece, a Strip and n_tiles * 16 sums for each strip, then the tiles.
struct Block {
    u64 *full;
    Strip *strips;
    float *sums;
    u8 *tiles;
    int pieces;  // of a strip
    DEV Block(int count, int n_tiles) {
        pieces = (n_tiles + PIECE - 1) / PIECE;
        full = (u64 *)shared_bytes;
        strips = (Strip *)(shared_bytes + (count * pieces * 8 + 15) / 16 * 16);
        sums = (float *)(strips + count);
        tiles = (u8 *)(sums + count * n_tiles * 16);
    }
    // After the strips have been written, for all to see. The whole warp calls this; `of` brings the address of a strip's tile 0.
    template <class Address>
    DEV void ask(int count, const Address &of) const {
        const int warps = blockDim.x / 32;
#pragma unroll 1
        for (int n = threadIdx.x / 32; n < count * pieces; n += warps) {
            const int i = n / pieces, p = n - i * pieces;
            const Strip &s = strips[i];
            const u8 *w = of(s);
            const int from = s.from > p * PIECE ? s.from : p * PIECE, to = s.to < (p + 1) * PIECE ? s.to : (p + 1) * PIECE, bytes = (to - from) * s.bytes;
            if (bytes <= 0 || threadIdx.x % 32) continue;
            expect(full + n, bytes);
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(s.tiles + from * s.bytes), "l"(w + (size_t)from * s.bytes), "r"(bytes), "r"(shared_address(full + n)) : "memory");
        }
    }
    // Strip i begins with tile `start`, the block has tiles t0 .. t1. Tiles lie side by side: the first strip's may begin before the block's.
    DEV void set(int i, const u8 *w, float *out, int split, int type, int start, int t0, int t1, int n_tiles, int slot_bytes) const {
        const int bytes = tile_bytes(type), from = t0 > start ? t0 - start : 0, to = t1 < start + n_tiles ? t1 - start : n_tiles;
        strips[i] = {w, out + (from ? split : 0), shared_address(tiles) + (start - t0) * slot_bytes + from * (slot_bytes - bytes), type, bytes, from, to, -1, 0};
    }
    // The product of tile k of strip i.
    DEV void multiply(int i, int k, int n_tiles, const Share &share) const {
        const Strip &s = strips[i];
        if (k < s.from || k >= s.to) return;
        wait_barrier(full + i * pieces + k / PIECE, 0);
        one_tile_of(s.type, s.tiles + k * s.bytes, share, sums + (i * n_tiles + k) * 16);
    }
    // A row's sum, and a zero for what no other block adds to it.
    DEV void leave(int i, int row, int split, int n_tiles, float factor) const {
        const Strip &s = strips[i];
        const float *of = sums + i * n_tiles * 16 + row;
        float sum = 0.0f;
#pragma unroll 8
        for (int k = s.from; k < s.to; k++) sum += of[k * 16];
        s.out[row] = sum * factor;
        if (split && s.from == 0 && s.to == n_tiles) s.out[split + row] = 0.0f;
    }
};

// So many that a block of the next kernel fits on the multiprocessor beside this one's, in each of its four parts.
#define ONE_REGISTERS 56
#define ONE_KERNEL extern "C" __global__ void

// Tells all of the GPU that this block's stores are done; by one thread, after the block has met.
DEV void arrive(u32 *count) { asm volatile("fence.acq_rel.gpu;\n\tred.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory"); }
// Until so many blocks have.
DEV void wait_for(const u32 *count, u32 blocks) {
    u32 now;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(count) : "memory"); while (now < blocks);
}

// ---- products ----

// What is multiplied: x, plus y where there is one, times the norm's weight where there is one; the results are then divided by the root of the mean
// square. The sum is left in `sum`.
struct Input {
    const float *x, *y, *norm;
    float *sum;
    float eps;
};

// Segment i has the blocks first[i] .. first[i + 1].
struct Spread {
    int first[4];
};

const int SHARED_TILES = 8;  // the most tiles of a strip that several teams of a block have; one.rs has the same number

// out = w input for every segment. A team has a warp for each tile of a strip; a block takes a run of strips, its teams every other one of these.
ONE_KERNEL __maxnreg__(ONE_REGISTERS) product_one(__grid_constant__ const Segments segments, __grid_constant__ const Spread spread, int K, int most, __grid_constant__ const Input in) {
    __shared__ float squares[32], inverses[SHARED_TILES];
    __shared__ uint4 halves[SHARED_TILES][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_tiles = K / 256;
    const int teams = blockDim.x / 32 / n_tiles, team = warp / n_tiles, k = warp - team * n_tiles, column = k * 256 + share_column(lane);
    int of = 0;
    while (of + 1 < segments.count && blockIdx.x >= spread.first[of + 1]) of++;
    const Segment &segment = segments.of[of];
    const u32 at = blockIdx.x - spread.first[of], blocks = spread.first[of + 1] - spread.first[of];
    const int first = (int)(at * segment.strips / blocks), count = (int)((at + 1) * segment.strips / blocks) - first, bytes = tile_bytes(segment.type);
    const Block block(most, n_tiles);
    start_next();
    if (warp == 0) {
#pragma unroll 1
        for (int i = lane; i < count * block.pieces; i += 32) init_barrier(block.full + i);
        fence_barriers();
        if (lane < count) block.set(lane, segment.w + (size_t)(first + lane) * n_tiles * bytes, segment.out + (first + lane) * 16, 0, segment.type, lane * n_tiles, 0, count * n_tiles, n_tiles, bytes);
    }
    __syncthreads();
    block.ask(count, [](const Strip &s) { return s.w; });
    float4 p = make_float4(1, 1, 1, 1), q = p;
    if (in.norm) { p = *(const float4 *)(in.norm + column); q = *(const float4 *)(in.norm + column + 16); }
    wait_for_previous();
    Share share;
    if (team == 0) {
        float4 a = fresh(in.x + column), b = fresh(in.x + column + 16);
        if (in.y) {
            const float4 c = fresh(in.y + column), d = fresh(in.y + column + 16);
            a.x += c.x; a.y += c.y; a.z += c.z; a.w += c.w;
            b.x += d.x; b.y += d.y; b.z += d.z; b.w += d.w;
        }
        if (in.sum && blockIdx.x == 0) { *(float4 *)(in.sum + column) = a; *(float4 *)(in.sum + column + 16) = b; }
        if (in.norm) {
            const float square = warp_sum((a.x * a.x + a.y * a.y) + (a.z * a.z + a.w * a.w) + ((b.x * b.x + b.y * b.y) + (b.z * b.z + b.w * b.w)));
            if (lane == 0) squares[k] = square;
        }
        const float all[8] = {a.x * p.x, a.y * p.y, a.z * p.z, a.w * p.w, b.x * q.x, b.y * q.y, b.z * q.z, b.w * q.w};
        share = share_of(all, lane % 4);
        if (teams > 1) { halves[k][lane] = share.x; inverses[k] = share.inverse; }
    }
    // One team asks the L2 for all: there, every block wants the same lines at the same time.
    if (teams > 1) {
        __syncthreads();
        if (team) { share.x = halves[k][lane]; share.inverse = inverses[k]; share_sums(share, lane % 4); }
    }
#pragma unroll 1
    for (int i = team; i < count; i += teams) block.multiply(i, k, n_tiles, share);
    __syncthreads();
#pragma unroll 1
    for (int r = threadIdx.x; r < count * 16; r += blockDim.x) {
        float factor = 1.0f;
        if (in.norm) {
            float square = 0.0f;
#pragma unroll 8
            for (int k = 0; k < n_tiles; k++) square += squares[k];
            factor = rsqrtf(square / K + in.eps);
        }
        block.leave(r / 16, r % 16, 0, n_tiles, factor);
    }
}

// ---- experts ----

const int ROUTER_ROWS = 2, ROUTER_HELD = 4, ROUTER_STEP = 4 * 384;

// Adds y to x where there is a y, leaves the sum in `sum` and its norm, times `scale`, as f16 in `tokens`; logits = w norm(x + y), two rows a block
// of 384 threads.
ONE_KERNEL __maxnreg__(ONE_REGISTERS) router_one(const float *w, __grid_constant__ const Input in, float scale, int experts, int K, float *logits, u16 *tokens, u64 *choice, u32 *finished) {
    __shared__ float partial[3][12];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x * ROUTER_ROWS;
    float4 weight[ROUTER_ROWS][ROUTER_HELD];
    const bool two = row + 1 < experts;
    start_next();
    auto normed = [&](int r, int c) {
        float4 a = *(const float4 *)(w + (size_t)(row + (two ? r : 0)) * K + c);
        const float4 n = *(const float4 *)(in.norm + c);
        a.x *= n.x; a.y *= n.y; a.z *= n.z; a.w *= n.w;
        return a;
    };
#pragma unroll
    for (int i = 0; i < ROUTER_HELD; i++) {
        const int c = i * ROUTER_STEP + threadIdx.x * 4;
#pragma unroll
        for (int r = 0; r < ROUTER_ROWS; r++) weight[r][i] = c < K ? normed(r, c) : make_float4(0, 0, 0, 0);
    }
    wait_for_previous();
    if (blockIdx.x == 0 && threadIdx.x < MAX_CHOSEN) choice[threadIdx.x] = 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) *finished = 0;
    auto input = [&](int c) {
        float4 a = fresh(in.x + c);
        if (in.y) { const float4 b = fresh(in.y + c); a.x += b.x; a.y += b.y; a.z += b.z; a.w += b.w; }
        return a;
    };
    float4 v[ROUTER_HELD];
#pragma unroll
    for (int i = 0; i < ROUTER_HELD; i++) {
        const int c = i * ROUTER_STEP + threadIdx.x * 4;
        v[i] = c < K ? input(c) : make_float4(0, 0, 0, 0);
    }
    float square = 0.0f, first = 0.0f, second = 0.0f;
    auto add = [&](float4 a, float4 p, float4 q) {
        square += (a.x * a.x + a.y * a.y) + (a.z * a.z + a.w * a.w);
        first += (a.x * p.x + a.y * p.y) + (a.z * p.z + a.w * p.w);
        second += (a.x * q.x + a.y * q.y) + (a.z * q.z + a.w * q.w);
    };
#pragma unroll
    for (int i = 0; i < ROUTER_HELD; i++) add(v[i], weight[0][i], weight[1][i]);
#pragma unroll 1
    for (int c = ROUTER_HELD * ROUTER_STEP + threadIdx.x * 4; c < K; c += ROUTER_STEP) add(input(c), normed(0, c), normed(1, c));
    square = warp_sum(square); first = warp_sum(first); second = warp_sum(second);
    if (lane == 0) { partial[0][warp] = square; partial[1][warp] = first; partial[2][warp] = second; }
    __syncthreads();
    square = warp_sum(lane < 12 ? partial[0][lane] : 0.0f);
    const float norm = rsqrtf(square / K + in.eps);
    if (warp < ROUTER_ROWS && (warp == 0 || two)) {
        const float sum = warp_sum(lane < 12 ? partial[1 + warp][lane] : 0.0f);
        if (lane == 0) logits[row + warp] = sum * norm;
    }
    auto leave_token = [&](int c, float4 a) {
        const float4 n = *(const float4 *)(in.norm + c);
        const float f = norm * scale;
        if (in.sum) *(float4 *)(in.sum + c) = a;
        *(uint2 *)(tokens + c / 32 * 32 + c % 16 * 2 + c % 32 / 16 * 4) = make_uint2(floats_to_halves(a.x * n.x * f, a.y * n.y * f), floats_to_halves(a.z * n.z * f, a.w * n.w * f));
    };
#pragma unroll
    for (int i = 0; i < ROUTER_HELD; i++) {
        const int c = i * ROUTER_STEP + threadIdx.x * 4;
        if (blockIdx.x == i && c < K) leave_token(c, v[i]);
    }
    if (blockIdx.x == ROUTER_HELD % gridDim.x)
#pragma unroll 1
        for (int c = ROUTER_HELD * ROUTER_STEP + threadIdx.x * 4; c < K; c += ROUTER_STEP) leave_token(c, input(c));
}

// One of the chosen experts of a token.
struct Chosen {
    int id;        // MAX_EXPERTS where there is none
    float weight;
};
const int PER_WARP = (MAX_EXPERTS / 32) * MAX_CHOSEN;
struct Choosing {
    __align__(16) float own[32][32];  // a warp's
    __align__(16) float picks[PER_WARP + 4];
    float scores[PER_WARP];
    int ids[PER_WARP];
};
static_assert(sizeof(Strip) == 48 && sizeof(Choosing) == 7184, "one.rs has the same numbers");
// One warp leaves only the experts of the best groups; picks of 32 experts each.
__device__ __noinline__ void drop_groups(const Router &r, float (*picks)[32]) {
    const int lane = threadIdx.x % 32;
    float pick[MAX_EXPERTS / 32];
#pragma unroll
    for (int i = 0; i < MAX_EXPERTS / 32; i++) pick[i] = i * 32 + lane < r.experts ? picks[i][lane] : -INFINITY;
    keep_best_groups<MAX_EXPERTS / 32>(r, pick);
#pragma unroll
    for (int i = 0; i < MAX_EXPERTS / 32; i++) if (i * 32 + lane < r.experts) picks[i][lane] = pick[i];
}
// How many of 4 picks come before `mine`, the i-th; the first of them is the o-th.
DEV int those_before(float4 p, float mine, int o, int i) {
    return (p.x > mine || (p.x == mine && o < i)) + (p.y > mine || (p.y == mine && o + 1 < i)) + (p.z > mine || (p.z == mine && o + 2 < i)) + (p.w > mine || (p.w == mine && o + 3 < i));
}
// Within two roundings; a division would be a call.
DEV float sigmoid(float x) {
    float e = expf(-x), r;
    e = e > 1e38f ? 1e38f : e;  // a NaN stays one
    const float d = 1.0f + e;
    asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(d));
    return r + r * (1.0f - d * r);
}
// The bias of the first experts that a warp looks at: constant, so it may be asked for early.
DEV float early_bias(const Router &r) { return r.bias && threadIdx.x < r.experts ? r.bias[threadIdx.x] : 0.0f; }
// The whole block chooses: 32 experts a warp first, then among the best of these. A lane of every warp gets each of the chosen, by way of `best`: when
// this returns, others may still read that, but nothing else.
DEV Chosen choose(const Router &r, float bias, Choosing &c, Chosen *best) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, E = r.experts, parts = (E + 31) / 32;
    float top = -INFINITY, sum = 0.0f;
    if (!r.sigmoid) {
#pragma unroll 4
        for (int e = lane; e < E; e += 32) top = fmaxf(top, __ldcg(r.logits + e));
        top = warp_max(top);
#pragma unroll 4
        for (int e = lane; e < E; e += 32) sum += expf(__ldcg(r.logits + e) - top);
        sum = warp_sum(sum);
    }
    auto score_of = [&](int e) {
        if (e >= E) return 0.0f;
        const float logit = __ldcg(r.logits + e);
        return r.sigmoid ? sigmoid(logit) : expf(logit - top) / sum;
    };
    // A NaN counts as the lowest score.
    auto pick_of = [&](int e, float score) { return e < E ? fmaxf(score + (e == threadIdx.x ? bias : r.bias ? r.bias[e] : 0.0f), -INFINITY) : -INFINITY; };
    if (r.groups > 1) {
#pragma unroll 1
        for (int part = warp; part < parts; part += warps) c.own[part][lane] = pick_of(part * 32 + lane, score_of(part * 32 + lane));
        __syncthreads();
        if (warp == 0) drop_groups(r, c.own);
        __syncthreads();
    }
#pragma unroll 1
    for (int part = warp; part < parts; part += warps) {
        const int e = part * 32 + lane;
        const float score = score_of(e), mine = r.groups > 1 ? c.own[part][lane] : pick_of(e, score);
        c.own[part][lane] = mine;
        __syncwarp();
        int before = 0;
#pragma unroll
        for (int o = 0; o < 32; o += 4) before += those_before(*(const float4 *)&c.own[part][o], mine, o, lane);
        if (before < r.chosen) { const int at = part * r.chosen + before; c.picks[at] = mine; c.scores[at] = score; c.ids[at] = e; }
    }
    const int candidates = parts * r.chosen;
    if (threadIdx.x < 4) c.picks[candidates + threadIdx.x] = -INFINITY;
    __syncthreads();
    // Four lanes for each. Of equals the one with the smaller id comes first, as they lie here.
#pragma unroll 1
    for (int i = threadIdx.x / 4; i < (candidates + 7) / 8 * 8; i += blockDim.x / 4) {
        const float mine = c.picks[i < candidates ? i : 0];
        int before = 0;
#pragma unroll 4
        for (int o = lane % 4 * 4; o < candidates; o += 16) before += those_before(*(const float4 *)(c.picks + o), mine, o, i);
        before += __shfl_xor_sync(~0u, before, 1);
        before += __shfl_xor_sync(~0u, before, 2);
        if (i < candidates && before < r.chosen && lane % 4 == 0) best[before] = {c.ids[i], c.scores[i]};
    }
    __syncthreads();
    Chosen mine = {MAX_EXPERTS, 0.0f};
    if (lane < r.chosen) mine = best[lane];
    const float total = warp_sum(mine.weight);
    mine.weight = (r.renormalise ? mine.weight / (total + r.floor) : mine.weight) * r.scale;
    return mine;
}

// The rows of gate and up, each strip's sums in up to two parts: [part][gate, up][row_len]. Strips in the order shared gate, shared up, then gate and up
// of each chosen expert; blocks take equal runs of their tiles. There is a warp for each tile of a strip.
ONE_KERNEL __maxnreg__(ONE_REGISTERS) up_one(__grid_constant__ const Router router, __grid_constant__ const Experts x, int K, int most, int slot_bytes, const u16 *tokens, float inverse, float *parts, u64 *choice, u32 *finished) {
    __shared__ int used;
    __shared__ Chosen best[MAX_CHOSEN];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_tiles = K / 256, k = warp;
    const Block block(most, n_tiles);
    const int row_len = x.chosen * x.width + x.shared_width;
    // The strips of warp 0's block, of `here` of the chosen. All that does not need to know which they are.
    auto plan = [&](u32 here) {
        const int shared_strips = x.shared_width / 16, strips = x.width / 16;
        const int total = 2 * (shared_strips + __popc(here) * strips) * n_tiles;
        int each = (total + gridDim.x - 1) / gridDim.x;
        each = each < n_tiles ? n_tiles : each;
        const int t0 = blockIdx.x * each, t1 = t0 + each < total ? t0 + each : total;
        const int u0 = t0 / n_tiles, count = t0 < t1 ? (t1 + n_tiles - 1) / n_tiles - u0 : 0, u = u0 + lane;
        if (lane == 0) used = count;
        if (lane >= count) return;
        const bool shared = u < 2 * shared_strips;
        const int v = shared ? u : u - 2 * shared_strips, of = shared ? shared_strips : strips, pair = v / of, strip = v - pair * of;
        const bool up = pair & 1;
        // The (pair / 2)-th of those that are here.
        u32 rest = here;
        if (!shared) for (int i = 0; i < pair / 2; i++) rest &= rest - 1;
        const int slot = shared ? x.chosen : __ffs(rest) - 1;
        const int type = shared ? (up ? x.shared_up_type : x.shared_gate_type) : (up ? x.up_type : x.gate_type);
        const u8 *w = (shared ? (up ? x.shared_up : x.shared_gate) : (up ? x.up : x.gate)) + (size_t)strip * n_tiles * tile_bytes(type);
        block.set(lane, w, parts + (up ? row_len : 0) + slot * x.width + strip * 16, 2 * row_len, type, u * n_tiles, t0, t1, n_tiles, slot_bytes);
        if (!shared) { block.strips[lane].chosen = slot; block.strips[lane].rows = strips; }
    };
    const bool all = x.local == router.experts;
    if (warp == 0) {
#pragma unroll 1
        for (int i = lane; i < most * block.pieces; i += 32) init_barrier(block.full + i);
        fence_barriers();
        if (all) plan((1u << x.chosen) - 1);
    }
    const float bias = early_bias(router);
    wait_for_previous();
    Share share;
    share.x = fresh(tokens + k * 256 + lane * 8);
    share.inverse = inverse;
    const Chosen mine = choose(router, bias, *(Choosing *)block.tiles, best);
    if (!all) {
        if (warp == 0) plan(__ballot_sync(~0u, (u32)(mine.id - x.first) < (u32)x.local));
        __syncthreads();
    }
    const int count = used;
    // Every block says the same: the first that knows is not kept waiting for.
    if (threadIdx.x < x.chosen) asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(choice + lane), "l"((u64)(mine.id + 1) << 32 | __float_as_uint(mine.weight)) : "memory");
    start_next();
    // The tiles land where the choosing was.
    fence_barriers();
    block.ask(count, [&](const Strip &s) {
        const int id = __shfl_sync(~0u, mine.id, s.chosen < 0 ? 0 : s.chosen) - x.first;
        return s.chosen < 0 ? s.w : s.w + (size_t)id * s.rows * n_tiles * s.bytes;
    });
    share_sums(share, lane % 4);
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        block.multiply(i, k, n_tiles, share);
    }
    __syncthreads();
#pragma unroll 1
    for (int r = threadIdx.x; r < count * 16; r += blockDim.x) block.leave(r / 16, r % 16, 2 * row_len, n_tiles, 1.0f);
    __syncthreads();
    if (threadIdx.x == 0) arrive(finished);
}

// out = down (weight silu(gate) up), summed over the chosen and the shared experts. A warp has one tile's columns: of the shared experts first, then of
// each chosen one; blocks take runs of strips, teams of a block every other one of these.
ONE_KERNEL __maxnreg__(56) down_one(const u64 *choice, const u32 *finished, int up_blocks, __grid_constant__ const Experts x, int items, int slot_bytes, const float *parts, float *out, int hidden) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, teams = blockDim.x / 32 / items, team = warp / items, item = warp - team * items;
    const int per_expert = x.width / 256, per_shared = x.shared_width / 256, strips = hidden / 16, row_len = x.chosen * x.width + x.shared_width;
    const int most = (strips + gridDim.x - 1) / gridDim.x;
    const int first = blockIdx.x * strips / gridDim.x, count = (blockIdx.x + 1) * strips / gridDim.x - first;
    u64 *full = (u64 *)shared_bytes;
    float *sums = (float *)(shared_bytes + (items * teams * 8 + 15) / 16 * 16);
    u8 *tiles = (u8 *)(sums + most * items * 16);
    start_next();
    if (lane == 0) { init_barrier(full + warp); fence_barriers(); }
    // The kernel before tells what was chosen as soon as it knows, before it lets this one start; the router made room for it.
    u64 told = 0;
    if (lane < x.chosen) do asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(told) : "l"(choice + lane) : "memory"); while (told == 0);
    const Chosen chosen = {(int)(told >> 32) - 1, __uint_as_float((u32)told)};
    __syncwarp();
    const bool shared = item < per_shared;
    const int at = item - per_shared, slot = shared ? x.chosen : at / per_expert, k = shared ? item : at - slot * per_expert;
    const int id = shared ? 0 : __shfl_sync(~0u, chosen.id, slot) - x.first;
    const float weight = shared ? 1.0f : __shfl_sync(~0u, chosen.weight, slot);
    const bool mine = shared || (u32)id < (u32)x.local;
    const int type = shared ? x.shared_down_type : x.down_type, bytes = tile_bytes(type), stride = shared ? per_shared : per_expert;
    if (mine && lane == 0) {
        const u8 *w = (shared ? x.shared_down : x.down) + (((size_t)id * strips + first) * stride + k) * bytes;
        if (stride == 1 && teams == 1) {
            expect(full + warp, count * bytes);
            copy_bulk(tiles + item * most * slot_bytes, w, count * bytes, full + warp);
        } else if (team < count) {
            expect(full + warp, (count - team + teams - 1) / teams * bytes);
#pragma unroll 1
            for (int i = team; i < count; i += teams) copy_bulk(tiles + item * most * slot_bytes + i * bytes, w + (size_t)i * stride * bytes, bytes, full + warp);
        }
    }
    // Not for the end of the kernel before: that comes late where memory is busy with this one's tiles.
    if (threadIdx.x == 0) wait_for(finished, up_blocks);
    __syncthreads();
    if (mine) {
        const float *from = parts + slot * x.width + k * 256 + share_column(lane);
        float4 gate[2], up[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 a = fresh(from + i * 16), b = fresh(from + row_len + i * 16), c = fresh(from + 2 * row_len + i * 16), d = fresh(from + 3 * row_len + i * 16);
            gate[i] = make_float4(a.x + c.x, a.y + c.y, a.z + c.z, a.w + c.w);
            up[i] = make_float4(b.x + d.x, b.y + d.y, b.z + d.z, b.w + d.w);
        }
        auto activated = [&](float g, float u) { return __fdividef(weight * u * g, 1.0f + __expf(-g)); };
        const float v[8] = {activated(gate[0].x, up[0].x), activated(gate[0].y, up[0].y), activated(gate[0].z, up[0].z), activated(gate[0].w, up[0].w),
                            activated(gate[1].x, up[1].x), activated(gate[1].y, up[1].y), activated(gate[1].z, up[1].z), activated(gate[1].w, up[1].w)};
        const Share share = share_of(v, lane % 4);
        if (team < count) wait_barrier(full + warp, 0);
#pragma unroll 1
        for (int i = team; i < count; i += teams) one_tile_of(type, shared_address(tiles) + item * most * slot_bytes + i * bytes, share, sums + (i * items + item) * 16);
    } else {
        for (int i = team; i < count; i += teams) if (lane < 16) sums[(i * items + item) * 16 + lane] = 0.0f;
    }
    __syncthreads();
#pragma unroll 1
    for (int r = threadIdx.x; r < count * 16; r += blockDim.x) {
        const float *of = sums + r / 16 * items * 16 + r % 16;
        float sum = 0.0f;
#pragma unroll 9
        for (int i = 0; i < items; i++) sum += of[i * 16];
        out[first * 16 + r] = sum;
    }
    // Who waits for this kernel waits for all before it.
    wait_for_previous();
}
