// Layout `mma16.v1`: tiles of 16 rows and 256 columns, decoded eight columns of a row at a time. Included by blocks.cuh in place
// of rows of blocks; formats/src/layout/mma16.rs says what lies where.

// Eight consecutive columns of a row lie in two lanes of a step.
struct Places {
    int step, lane, high;
    __device__ __forceinline__ Places(int row, int column)
        : step(column / 16), lane(row % 8 * 4 + column % 16 / 4), high(row / 8) {}
    // The pair of columns j, j + 1, whose first is in the low half of a word.
    __device__ __forceinline__ int pair(int j) const { return j % 4 / 2 * 2 + high; }
    __device__ __forceinline__ u32 word(const u8 *plane, int at, int j) const {
        return *(const u32 *)(plane + at + (lane + j / 4) * 16);
    }
    __device__ __forceinline__ u32 nibble(const u8 *plane, int j) const {
        return word(plane, step / 4 * 512 + step % 4 * 4, j) >> (4 * pair(j) + 16 * (j % 2)) & 15;
    }
    __device__ __forceinline__ u32 two_bits(const u8 *plane, int j) const {
        int place = step % 2 * 8 + (pair(j) % 2 * 4 + pair(j) / 2 * 2);
        return word(plane, step / 8 * 512 + step % 8 / 2 * 4, j) >> (place + 16 * (j % 2)) & 3;
    }
    __device__ __forceinline__ u32 one_bit(const u8 *plane, int j) const {
        int place = step % 4 / 2 * 8 + step % 2 * 2 + (pair(j) % 2 * 4 + pair(j) / 2);
        return word(plane, step / 4 * 4, j) >> (place + 16 * (j % 2)) & 1;
    }
    __device__ __forceinline__ u32 byte(const u8 *plane, int j) const {
        return plane[step / 2 * 512 + (lane + j / 4) * 16 + step % 2 * 8 + high * 4 + j % 4];
    }
};

// The i-th of numbers of six bits.
__device__ __forceinline__ float six_bits(const u8 *p, int i) {
    int bit = i * 6;
    u32 low = load16(p + bit / 16 * 2) >> bit % 16;
    u32 high = bit % 16 > 10 ? load16(p + bit / 16 * 2 + 2) << (16 - bit % 16) : 0;
    return (float)((low | high) & 63);
}

// Columns first..first+8 of row `row` of a tile of W.
template <typename W> __device__ __forceinline__ void tile8(const u8 *tile, int row, int first, float *out);

template <> __device__ __forceinline__ void tile8<Q4_K>(const u8 *tile, int row, int first, float *out) {
    Places at(row, first);
    const u8 *side = tile + 2048 + row * 16;
    float dl = scale16(side) * six_bits(side + 4, first / 32), ml = scale16(side + 2) * six_bits(side + 10, first / 32);
    EACH8 out[j] = dl * (float)at.nibble(tile, j) - ml;
}

template <> __device__ __forceinline__ void tile8<Q5_K>(const u8 *tile, int row, int first, float *out) {
    Places at(row, first);
    const u8 *side = tile + 2560 + row * 16;
    float dl = scale16(side) * six_bits(side + 4, first / 32), ml = scale16(side + 2) * six_bits(side + 10, first / 32);
    EACH8 out[j] = dl * (float)(at.nibble(tile, j) | at.one_bit(tile + 2048, j) << 4) - ml;
}

template <> __device__ __forceinline__ void tile8<Q6_K>(const u8 *tile, int row, int first, float *out) {
    Places at(row, first);
    float dl = scale16(tile + 3328 + row * 2) * (float)(i8)tile[3072 + row * 16 + first / 16];
    EACH8 out[j] = dl * (float)((int)(at.nibble(tile, j) | at.two_bits(tile + 2048, j) << 4) - 32);
}

template <> __device__ __forceinline__ void tile8<Q8_0>(const u8 *tile, int row, int first, float *out) {
    Places at(row, first);
    float d = scale16(tile + 4096 + row * 16 + first / 32 * 2);
    EACH8 out[j] = d * (float)((int)at.byte(tile, j) - 128);
}

template <> __device__ __forceinline__ void tile8<Q4_0>(const u8 *tile, int row, int first, float *out) {
    Places at(row, first);
    float d = scale16(tile + 2048 + row * 16 + first / 32 * 2);
    EACH8 out[j] = d * (float)((int)at.nibble(tile, j) - 8);
}

template <> __device__ __forceinline__ void tile8<IQ4_NL>(const u8 *tile, int row, int first, float *out) {
    Places at(row, first);
    float d = scale16(tile + 2048 + row * 16 + first / 32 * 2);
    EACH8 out[j] = d * nonlinear(at.nibble(tile, j));
}

template <> __device__ __forceinline__ void tile8<Q5_0>(const u8 *tile, int row, int first, float *out) {
    Places at(row, first);
    float d = scale16(tile + 2560 + row * 16 + first / 32 * 2);
    EACH8 out[j] = d * (float)((int)(at.nibble(tile, j) | at.one_bit(tile + 2048, j) << 4) - 16);
}

template <> __device__ __forceinline__ void tile8<IQ4_XS>(const u8 *tile, int row, int first, float *out) {
    Places at(row, first);
    const u8 *side = tile + 2048 + row * 8;
    int group = first / 32;
    u32 low = side[4 + group / 2] >> (group % 2 * 4) & 15, top = load16(side + 2) >> (group * 2) & 3;
    float dl = scale16(side) * (float)((int)(low | top << 4) - 32);
    EACH8 out[j] = dl * nonlinear(at.nibble(tile, j));
}

template <> __device__ __forceinline__ void tile8<MXFP4>(const u8 *tile, int row, int first, float *out) {
    Places at(row, first);
    float d = half_e8m0(tile[2048 + row * 8 + first / 32]);
    EACH8 out[j] = d * e2m1_doubled(at.nibble(tile, j));
}

template <> __device__ __forceinline__ void tile8<Q2_K>(const u8 *tile, int row, int first, float *out) {
    Places at(row, first);
    u32 scale = tile[1024 + row * 16 + first / 16];
    const u8 *side = tile + 1280 + row * 4;
    float dl = scale16(side) * (float)(scale & 15), ml = scale16(side + 2) * (float)(scale >> 4);
    EACH8 out[j] = dl * (float)at.two_bits(tile, j) - ml;
}

template <> __device__ __forceinline__ void tile8<Q3_K>(const u8 *tile, int row, int first, float *out) {
    Places at(row, first);
    const u8 *side = tile + 1536 + row * 12;
    int group = first / 16;
    u32 low = side[group % 8] >> (group / 8 * 4) & 15, top = side[8 + group % 4] >> (group / 4 * 2) & 3;
    float dl = scale16(tile + 1728 + row * 2) * (float)((int)(low | top << 4) - 32);
    EACH8 out[j] = dl * (float)((int)at.two_bits(tile, j) - (at.one_bit(tile + 1024, j) ? 0 : 4));
}

template <typename W>
__device__ __forceinline__ void decode8(const u8 *matrix, int row, int column, int columns, float *out) {
    u64 tile = (u64)(row / 16) * (columns / 256) + column / 256;
    tile8<W>(matrix + tile * (16 * 256 / W::LEN * W::BYTES), row % 16, column % 256, out);
}

// ---- what a lane has of 16 rows and 64 columns: rows g and g + 8, columns 16 q + 4 t + j of the four steps q ----
//
// load(tile, i, lane) of the i-th 64 columns; then, of step q and row g or g + 8 ("high"): n(q, high, j) is the quant of the j-th of four columns, and its weight is
// x n - y, where float2 scale(q, high, i) is x, y. Types without one are decoded eight columns of a row at a time.
template <typename W> struct Lane {
    static const bool KNOWN = false;
    __device__ __forceinline__ void load(const u8 *, int, int) {}
    __device__ __forceinline__ u32 n(int, int, int) const { return 0; }
    __device__ __forceinline__ float2 scale(int, int, int) const { return make_float2(0.0f, 0.0f); }
};

__device__ __forceinline__ u32 lane_word(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ uint4 lane_load(const u8 *p) { return *(const uint4 *)p; }

struct NibbleLane {
    static const bool KNOWN = true;
    uint4 low;
    __device__ __forceinline__ void load_low(const u8 *tile, int i, int lane) { low = lane_load(tile + i * 512 + lane * 16); }
    __device__ __forceinline__ u32 four(int q, int high, int j) const { return lane_word(low, q) >> (4 * (j / 2 * 2 + high) + 16 * (j % 2)) & 15; }
};
struct FiveLane : NibbleLane {
    u32 top;
    __device__ __forceinline__ void load_bits(const u8 *tile, int i, int lane) { load_low(tile, i, lane), top = *(const u32 *)(tile + 2048 + lane * 16 + i * 4); }
    __device__ __forceinline__ u32 five(int q, int high, int j) const {
        int at = q / 2 * 8 + q % 2 * 2 + high * 4 + j / 2 + 16 * (j % 2);
        return four(q, high, j) | (top >> at & 1) << 4;
    }
};
// d, dmin, eight scales and eight minima of six bits of two rows.
struct KSides {
    uint4 side[2];
    __device__ __forceinline__ void load_sides(const u8 *sides, int lane) { side[0] = lane_load(sides + lane / 4 * 16), side[1] = lane_load(sides + lane / 4 * 16 + 128); }
    __device__ __forceinline__ float2 scale_of(int q, int high, int i) const {
        const uint4 &s = side[high];
        int bit = (2 * i + q / 2) * 6;
        u64 scales = (u64)s.z << 32 | s.y, mins = (u64)s.w << 32 | s.z;
        return make_float2(half_to_float((u16)s.x) * (float)((u32)(scales >> bit) & 63), half_to_float((u16)(s.x >> 16)) * (float)((u32)(mins >> (bit + 16)) & 63));
    }
};
// A scale for every 32 columns.
struct BlockSides {
    u32 side[2];
    __device__ __forceinline__ void load_sides(const u8 *sides, int i, int lane) { side[0] = *(const u32 *)(sides + lane / 4 * 16 + i * 4), side[1] = *(const u32 *)(sides + lane / 4 * 16 + 128 + i * 4); }
    __device__ __forceinline__ float2 scale_of(int q, int high, float offset) const {
        float d = half_to_float((u16)(side[high] >> (q / 2 * 16)));
        return make_float2(d, d * offset);
    }
};

template <> struct Lane<Q4_K> : NibbleLane, KSides {
    __device__ __forceinline__ void load(const u8 *tile, int i, int lane) { load_low(tile, i, lane), load_sides(tile + 2048, lane); }
    __device__ __forceinline__ u32 n(int q, int high, int j) const { return four(q, high, j); }
    __device__ __forceinline__ float2 scale(int q, int high, int i) const { return scale_of(q, high, i); }
};
template <> struct Lane<Q5_K> : FiveLane, KSides {
    __device__ __forceinline__ void load(const u8 *tile, int i, int lane) { load_bits(tile, i, lane), load_sides(tile + 2560, lane); }
    __device__ __forceinline__ u32 n(int q, int high, int j) const { return five(q, high, j); }
    __device__ __forceinline__ float2 scale(int q, int high, int i) const { return scale_of(q, high, i); }
};
template <> struct Lane<Q4_0> : NibbleLane, BlockSides {
    __device__ __forceinline__ void load(const u8 *tile, int i, int lane) { load_low(tile, i, lane), load_sides(tile + 2048, i, lane); }
    __device__ __forceinline__ u32 n(int q, int high, int j) const { return four(q, high, j); }
    __device__ __forceinline__ float2 scale(int q, int high, int) const { return scale_of(q, high, 8.0f); }
};
template <> struct Lane<Q5_0> : FiveLane, BlockSides {
    __device__ __forceinline__ void load(const u8 *tile, int i, int lane) { load_bits(tile, i, lane), load_sides(tile + 2560, i, lane); }
    __device__ __forceinline__ u32 n(int q, int high, int j) const { return five(q, high, j); }
    __device__ __forceinline__ float2 scale(int q, int high, int) const { return scale_of(q, high, 16.0f); }
};
template <> struct Lane<Q8_0> : BlockSides {
    static const bool KNOWN = true;
    uint4 bytes[2];
    __device__ __forceinline__ void load(const u8 *tile, int i, int lane) {
        bytes[0] = lane_load(tile + i * 1024 + lane * 16), bytes[1] = lane_load(tile + i * 1024 + 512 + lane * 16);
        load_sides(tile + 4096, i, lane);
    }
    __device__ __forceinline__ u32 n(int q, int high, int j) const { return lane_word(bytes[q / 2], q % 2 * 2 + high) >> (8 * j) & 255; }
    __device__ __forceinline__ float2 scale(int q, int high, int) const { return scale_of(q, high, 128.0f); }
};
template <> struct Lane<Q6_K> : NibbleLane {
    uint2 top;
    u32 scales[2];
    u16 d[2];
    __device__ __forceinline__ void load(const u8 *tile, int i, int lane) {
        load_low(tile, i, lane);
        top = *(const uint2 *)(tile + 2048 + i / 2 * 512 + lane * 16 + i % 2 * 8);
#pragma unroll
        for (int high = 0; high < 2; high++) {
            int row = lane / 4 + high * 8;
            scales[high] = *(const u32 *)(tile + 3072 + row * 16 + i * 4), d[high] = *(const u16 *)(tile + 3328 + row * 2);
        }
    }
    __device__ __forceinline__ u32 n(int q, int high, int j) const {
        int at = q % 2 * 8 + high * 4 + j / 2 * 2 + 16 * (j % 2);
        return four(q, high, j) | ((q / 2 ? top.y : top.x) >> at & 3) << 4;
    }
    __device__ __forceinline__ float2 scale(int q, int high, int) const {
        float x = half_to_float(d[high]) * (float)(i8)(scales[high] >> (8 * q));
        return make_float2(x, x * 32.0f);
    }
};
