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
