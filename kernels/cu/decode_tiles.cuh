// Tiles of layout mma16.v1 as A fragments of mma.m16n8k16, one type after the other, and their products with prepared tokens.
#pragma once

#define DEV __device__ __forceinline__
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

enum { TYPE_Q4_0 = 2, TYPE_Q5_0 = 6, TYPE_Q8_0 = 8, TYPE_Q4_K = 12, TYPE_Q5_K = 13, TYPE_Q6_K = 14 };

DEV float half_to_float(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
DEV u16 float_to_half(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
// low half first
DEV u32 floats_to_halves(float low, float high) { u32 h; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(high), "f"(low)); return h; }
DEV float low_half(u32 h) { return half_to_float((u16)h); }
DEV float high_half(u32 h) { return half_to_float((u16)(h >> 16)); }
DEV u32 sub_halves(u32 a, u32 b) { u32 c; asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b)); return c; }

DEV void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEV void start_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEV u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
// Bulk copies from global to shared memory, counted by a barrier of one arrival.
DEV void init_barrier(u64 *barrier) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory"); }
DEV void fence_barriers() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEV void expect(u64 *barrier, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory"); }
DEV void copy_bulk(void *to, const void *from, u32 bytes, u64 *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
DEV void wait_barrier(u64 *barrier, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}
DEV u32 word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

DEV void mma(float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A warp's tables of one tile: scales by row and group, and the A fragments of the subtracted part.
struct __align__(16) Tables {
    float scale[16][20];  // rows of 80 bytes: 16 groups and what keeps rows in different banks
    u32 bias[16][4];      // per row and t: Q4_K, Q5_K: mins of groups 2t, 2t+1 as subnormal f16; others: f16 pairs
    u32 bias2[16][4];
    float bias_scale[16];
};

// ---- types: what a tile holds, how a step's fragment is unpacked ----
//
// `tile` is in shared memory. Pairs 1 and 3 of nibbles (row g+8) sit four bits higher than pairs 0 and 2, so their scales are a sixteenth.

DEV void unpack_nibbles(u32 w, u32 a[4]) {
    u32 v = w >> 8;
    a[0] = w & 0x000f000fu; a[1] = w & 0x00f000f0u; a[2] = v & 0x000f000fu; a[3] = v & 0x00f000f0u;
}
// Step e of a word has its bits at [0,2,8,10][e] + [0,4,1,5][pair]; bit 4 for even pairs, 8 for odd ones.
DEV void add_bit(u32 w, int e, u32 a[4]) {
    const int at = e == 0 ? 0 : e == 1 ? 2 : e == 2 ? 8 : 10;
    u32 v = at < 4 ? w << (4 - at) : w >> (at - 4), v2 = at < 3 ? w << (3 - at) : w >> (at - 3);
    a[0] |= v & 0x00100010u; a[1] |= v & 0x01000100u; a[2] |= v2 & 0x00100010u; a[3] |= v2 & 0x01000100u;
}
// Groups of 16 in a bias fragment: 4t..4t+4 are twice each of groups of 32 2t, 2t+1.
DEV void wide_bias_fragment(const Tables &T, int g, int t, u32 a[4]) {
    u32 m0 = T.bias[g][t], m1 = T.bias[g + 8][t];
    a[0] = __byte_perm(m0, 0, 0x1010); a[2] = __byte_perm(m0, 0, 0x3232);
    a[1] = __byte_perm(m1, 0, 0x1010); a[3] = __byte_perm(m1, 0, 0x3232);
}
// Lane 2r + h: groups 4h..4h+4 of row r.
DEV void k_tables(Tables &T, const u8 *rows, int lane) {
    const int r = lane / 2, h = lane % 2;
    const uint4 row = *(const uint4 *)(rows + r * 16);
    const float d = low_half(row.x) * (r < 8 ? 16777216.0f : 1048576.0f), dmin = high_half(row.x) * -16777216.0f;
    // 48 bits of scales, 48 of mins
    const u32 s4 = h ? row.y >> 24 | row.z << 8 : row.y, m4 = h ? row.w >> 8 : row.z >> 16 | row.w << 16;
    *(float4 *)&T.scale[r][4 * h] = make_float4(d * (float)(s4 & 63), d * (float)((s4 >> 6) & 63), d * (float)((s4 >> 12) & 63), d * (float)((s4 >> 18) & 63));
    T.bias[r][2 * h] = (m4 & 63) | ((m4 >> 6) & 63) << 16;
    T.bias[r][2 * h + 1] = ((m4 >> 12) & 63) | ((m4 >> 18) & 63) << 16;
    if (h == 0) T.bias_scale[r] = dmin;
}
// Types whose block is 32 weights with one f16: eight a row.
DEV void block_tables(Tables &T, const u8 *rows, float low_unit, float high_unit, float offset, int lane) {
    const int r = lane / 2, h = lane % 2;
    const uint2 d = *(const uint2 *)(rows + lane * 8);
    const float unit = r < 8 ? low_unit : high_unit;
    *(float4 *)&T.scale[r][4 * h] = make_float4(low_half(d.x) * unit, high_half(d.x) * unit, low_half(d.y) * unit, high_half(d.y) * unit);
    T.bias[r][2 * h] = d.x; T.bias[r][2 * h + 1] = d.y;
    if (h == 0) T.bias_scale[r] = -offset;
}

// Each type: BYTES of a tile, GROUP columns of a scale, QUAD: what a lane holds of four steps.
struct Q4K {
    static const int BYTES = 2304, GROUP = 32;
    uint4 q;
    DEV void load(const u8 *tile, int i, int lane) { q = *(const uint4 *)(tile + i * 512 + lane * 16); }
    DEV void unpack(int s, u32 a[4]) const { unpack_nibbles(word_of(q, s % 4), a); }
    static DEV void tables(Tables &T, const u8 *tile, int lane) { k_tables(T, tile + 2048, lane); }
    static DEV void bias_fragment(const Tables &T, int g, int t, u32 a[4]) { wide_bias_fragment(T, g, t, a); }
};
struct Q5K {
    static const int BYTES = 2816, GROUP = 32;
    uint4 q;
    u32 high;
    DEV void load(const u8 *tile, int i, int lane) { q = *(const uint4 *)(tile + i * 512 + lane * 16); high = *(const u32 *)(tile + 2048 + lane * 16 + i * 4); }
    DEV void unpack(int s, u32 a[4]) const { unpack_nibbles(word_of(q, s % 4), a); add_bit(high, s % 4, a); }
    static DEV void tables(Tables &T, const u8 *tile, int lane) { k_tables(T, tile + 2560, lane); }
    static DEV void bias_fragment(const Tables &T, int g, int t, u32 a[4]) { wide_bias_fragment(T, g, t, a); }
};
struct Q6K {
    static const int BYTES = 3360, GROUP = 16;
    uint4 q;
    uint2 high;
    DEV void load(const u8 *tile, int i, int lane) { q = *(const uint4 *)(tile + i * 512 + lane * 16); high = *(const uint2 *)(tile + 2048 + i / 2 * 512 + lane * 16 + i % 2 * 8); }
    DEV void unpack(int s, u32 a[4]) const {
        unpack_nibbles(word_of(q, s % 4), a);
        u32 w = s % 4 / 2 ? high.y : high.x;
        u32 v = s % 2 ? w >> 4 : w << 4, v2 = s % 2 ? w >> 6 : w << 2;
        a[0] |= v & 0x00300030u; a[1] |= v & 0x03000300u; a[2] |= v2 & 0x00300030u; a[3] |= v2 & 0x03000300u;
    }
    // Lane 2r + h: groups 8h..8h+8 of row r.
    static DEV void tables(Tables &T, const u8 *tile, int lane) {
        const int r = lane / 2, h = lane % 2;
        const uint2 sc = *(const uint2 *)(tile + 3072 + lane * 8);
        const float df = half_to_float(*(const u16 *)(tile + 3328 + r * 2)), unit = df * (r < 8 ? 16777216.0f : 1048576.0f);
        const u32 x = sc.x ^ 0x80808080u, y = sc.y ^ 0x80808080u;
        float f[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            // 2^23 + (scale + 128), as bits
            f[i] = (__uint_as_float(__byte_perm(i < 4 ? x : y, 0x4b000000u, 0x7440 + i % 4)) - 8388736.0f) * unit;
        *(float4 *)&T.scale[r][8 * h] = make_float4(f[0], f[1], f[2], f[3]);
        *(float4 *)&T.scale[r][8 * h + 4] = make_float4(f[4], f[5], f[6], f[7]);
        // Scales as f16: 1024 + 128 + scale, less 1152.
        T.bias[r][2 * h] = sub_halves(__byte_perm(x, 0x64646464u, 0x4140), 0x64806480u);
        T.bias2[r][2 * h] = sub_halves(__byte_perm(x, 0x64646464u, 0x4342), 0x64806480u);
        T.bias[r][2 * h + 1] = sub_halves(__byte_perm(y, 0x64646464u, 0x4140), 0x64806480u);
        T.bias2[r][2 * h + 1] = sub_halves(__byte_perm(y, 0x64646464u, 0x4342), 0x64806480u);
        if (h == 0) T.bias_scale[r] = -32.0f * df;
    }
    static DEV void bias_fragment(const Tables &T, int g, int t, u32 a[4]) {
        a[0] = T.bias[g][t]; a[2] = T.bias2[g][t]; a[1] = T.bias[g + 8][t]; a[3] = T.bias2[g + 8][t];
    }
};
struct Q8_0 {
    static const int BYTES = 4352, GROUP = 32;
    uint4 q[2];
    DEV void load(const u8 *tile, int i, int lane) { q[0] = *(const uint4 *)(tile + i * 1024 + lane * 16); q[1] = *(const uint4 *)(tile + i * 1024 + 512 + lane * 16); }
    DEV void unpack(int s, u32 a[4]) const {
        u32 x = word_of(q[s % 4 / 2], s % 2 * 2), y = word_of(q[s % 4 / 2], s % 2 * 2 + 1);
        a[0] = __byte_perm(x, 0, 0x4140); a[2] = __byte_perm(x, 0, 0x4342);
        a[1] = __byte_perm(y, 0, 0x4140); a[3] = __byte_perm(y, 0, 0x4342);
    }
    static DEV void tables(Tables &T, const u8 *tile, int lane) { block_tables(T, tile + 4096, 16777216.0f, 16777216.0f, 128.0f, lane); }
    static DEV void bias_fragment(const Tables &T, int g, int t, u32 a[4]) { wide_bias_fragment(T, g, t, a); }
};
struct Q4_0 {
    static const int BYTES = 2304, GROUP = 32;
    uint4 q;
    DEV void load(const u8 *tile, int i, int lane) { q = *(const uint4 *)(tile + i * 512 + lane * 16); }
    DEV void unpack(int s, u32 a[4]) const { unpack_nibbles(word_of(q, s % 4), a); }
    static DEV void tables(Tables &T, const u8 *tile, int lane) { block_tables(T, tile + 2048, 16777216.0f, 1048576.0f, 8.0f, lane); }
    static DEV void bias_fragment(const Tables &T, int g, int t, u32 a[4]) { wide_bias_fragment(T, g, t, a); }
};
struct Q5_0 {
    static const int BYTES = 2816, GROUP = 32;
    uint4 q;
    u32 high;
    DEV void load(const u8 *tile, int i, int lane) { q = *(const uint4 *)(tile + i * 512 + lane * 16); high = *(const u32 *)(tile + 2048 + lane * 16 + i * 4); }
    DEV void unpack(int s, u32 a[4]) const { unpack_nibbles(word_of(q, s % 4), a); add_bit(high, s % 4, a); }
    static DEV void tables(Tables &T, const u8 *tile, int lane) { block_tables(T, tile + 2560, 16777216.0f, 1048576.0f, 16.0f, lane); }
    static DEV void bias_fragment(const Tables &T, int g, int t, u32 a[4]) { wide_bias_fragment(T, g, t, a); }
};

DEV int tile_bytes(int type) {
    switch (type) {
    case TYPE_Q5_K: case TYPE_Q5_0: return 2816;
    case TYPE_Q6_K: return 3360;
    case TYPE_Q8_0: return 4352;
    default: return 2304;
    }
}

// ---- activations as B fragments ----
//
// Per token [K/32][t 4][8 f16]: a lane's 16 bytes are its columns of two steps. Then [K/256][t 4][4 high, 4 low]: sums of 16 columns as two f16s
// each. Tokens are scaled by a power of two, so that nothing overflows; `inverse` undoes it.
struct Tokens {
    const u16 *x;      // [M, x_stride]
    const u16 *sums;   // [M, sums_stride]
    int x_stride, sums_stride;
};


// Where a lane's columns of a tile are: `x` at step 0 of its t, `sums` likewise. Tokens that take no part point at zeros.
struct Columns {
    const u16 *x, *sums;
};
struct __align__(16) Zeros {
    u16 of[256];
};
DEV void clear(Zeros &zeros) {
    if (threadIdx.x < 128) ((u32 *)zeros.of)[threadIdx.x] = 0;
}
DEV Columns columns(const Tokens &B, int token, int x_tile, int t, bool has, const Zeros &zeros) {
    Columns c;
    c.x = has ? B.x + token * B.x_stride + x_tile * 256 + t * 8 : zeros.of;
    c.sums = has ? B.sums + token * B.sums_stride + x_tile * 32 + t * 8 : zeros.of;
    return c;
}
// The next tile's.
DEV void advance(Columns &c, bool has) {
    c.x += has ? 256 : 0; c.sums += has ? 32 : 0;
}
// A barrier of some of a block's warps; 0 is __syncthreads.
DEV void barrier_of(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Adds the product of one tile with the tokens. acc[n]: rows g, g+8 of tokens 8n + 2t, 8n + 2t + 1; with ONE, a single token, the second of each pair
// stays as it is.
template <class T, int NT, bool ONE>
DEV void tile_product(const u8 *tile, const Columns *B, Tables &S, float acc[NT][4], int lane) {
    const int g = lane / 4, t = lane % 4;
    T::tables(S, tile, lane);
    __syncwarp();
    u32 a[4];
    auto add = [&](const float c[NT][4], float low, float high) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            acc[n][0] += low * c[n][0]; acc[n][2] += high * c[n][2];
            if (!ONE) { acc[n][1] += low * c[n][1]; acc[n][3] += high * c[n][3]; }
        }
    };
    const float *low = S.scale[g], *high = S.scale[g + 8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        T quad;
        quad.load(tile, i, lane);
#pragma unroll
        for (int s = 0; s < 4; s += 2) {
            const int step = 4 * i + s;
            uint4 b[NT];
            float c[NT][4];
#pragma unroll
            for (int n = 0; n < NT; n++) { b[n] = *(const uint4 *)(B[n].x + step * 16); c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f; }
            quad.unpack(s, a);
#pragma unroll
            for (int n = 0; n < NT; n++) mma(c[n], a, b[n].x, b[n].y);
            if (T::GROUP == 16) {
                add(c, low[step], high[step]);
#pragma unroll
                for (int n = 0; n < NT; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
            }
            quad.unpack(s + 1, a);
#pragma unroll
            for (int n = 0; n < NT; n++) mma(c[n], a, b[n].z, b[n].w);
            const int group = T::GROUP == 16 ? step + 1 : step / 2;
            add(c, low[group], high[group]);
        }
    }
    T::bias_fragment(S, g, t, a);
    float c[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const uint4 b = *(const uint4 *)B[n].sums;
        c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
        mma(c[n], a, b.x, b.y);
        mma(c[n], a, b.z, b.w);
    }
    add(c, S.bias_scale[g], S.bias_scale[g + 8]);
    __syncwarp();
}
template <int NT, bool ONE>
DEV void tile_product_of(int type, const u8 *tile, const Columns *B, Tables &S, float acc[NT][4], int lane) {
    switch (type) {
    case TYPE_Q4_K: tile_product<Q4K, NT, ONE>(tile, B, S, acc, lane); break;
    case TYPE_Q6_K: tile_product<Q6K, NT, ONE>(tile, B, S, acc, lane); break;
    case TYPE_Q5_K: tile_product<Q5K, NT, ONE>(tile, B, S, acc, lane); break;
    case TYPE_Q8_0: tile_product<Q8_0, NT, ONE>(tile, B, S, acc, lane); break;
    case TYPE_Q4_0: tile_product<Q4_0, NT, ONE>(tile, B, S, acc, lane); break;
    case TYPE_Q5_0: tile_product<Q5_0, NT, ONE>(tile, B, S, acc, lane); break;
    }
}
