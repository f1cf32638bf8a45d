// Blocks of ggml types as the checkpoint stores them, decoded eight elements at a time. Every product is exact in f32, so
// that fused multiply-adds change no bit: values equal those of the processor's decoders.
//
// decode8(block, first, out): elements first..first+8 of a block, first a multiple of 8. Blocks start at even addresses,
// except MXFP4's, which are read byte by byte; nothing wider is assumed.
#pragma once
#include "prelude.cuh"

__device__ __forceinline__ u32 load16(const u8 *p) { return *(const u16 *)p; }
__device__ __forceinline__ u32 load32(const u8 *p) { return load16(p) | load16(p + 2) << 16; }
__device__ __forceinline__ float scale16(const u8 *p) { return half_to_float(*(const u16 *)p); }

// Eight bytes, and byte j of them.
struct Eight {
    u32 word[2];
    __device__ __forceinline__ explicit Eight(const u8 *p) {
        word[0] = load32(p);
        word[1] = load32(p + 4);
    }
    __device__ __forceinline__ u32 operator[](int j) const { return word[j / 4] >> (j % 4 * 8) & 0xff; }
};

// Values of IQ4_NL and IQ4_XS (ggml's kvalues_iq4nl), a byte each.
__device__ __forceinline__ float nonlinear(u32 q) {
    const u64 low = 0xf6eaddcfbfad9881ull, high = 0x7159453526190d01ull;
    return (float)(i8)((q < 8 ? low : high) >> (q % 8 * 8));
}

// Twice the values of E2M1 (OCP Microscaling Formats 1.0, section 5.3.3).
__device__ __forceinline__ float e2m1_doubled(u32 q) {
    int magnitude = (u8)(0x0c08060403020100ull >> (q % 8 * 8));
    // As an integer, so that minus zero is zero, as in ggml.
    return (float)(q < 8 ? magnitude : -magnitude);
}

// 2^(e - 128), of which the two smallest are subnormal.
__device__ __forceinline__ float half_e8m0(u32 e) {
    return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

// Scale and minimum of a group of 32 in Q4_K and Q5_K: 12 bytes of 6-bit numbers.
__device__ __forceinline__ void scale_and_min(const u8 *p, int group, float &scale, float &min) {
    int i = group % 4;
    u32 s = p[i], m = p[4 + i];
    if (group < 4) {
        scale = (float)(s & 63);
        min = (float)(m & 63);
    } else {
        u32 n = p[8 + i];
        scale = (float)((n & 15) | s >> 6 << 4);
        min = (float)(n >> 4 | m >> 6 << 4);
    }
}

// `8 *` the byte's place: plain types have one element in a block.
template <typename T> struct Plain {
    static const bool PLAIN = true;
    static const int LEN = 1, BYTES = sizeof(T);
    static __device__ __forceinline__ void decode8(const u8 *, int, float *) {}
};
struct F32 : Plain<float> {
    static __device__ __forceinline__ float value(const u8 *p) { return *(const float *)p; }
};
struct F16 : Plain<u16> {
    static __device__ __forceinline__ float value(const u8 *p) { return scale16(p); }
};
struct BF16 : Plain<u16> {
    static __device__ __forceinline__ float value(const u8 *p) { return bf16_to_float(*(const u16 *)p); }
};

template <int L, int B> struct Quantised {
    static const bool PLAIN = false;
    static const int LEN = L, BYTES = B;
    static __device__ __forceinline__ float value(const u8 *) { return 0.0f; }
};

#define EACH8 _Pragma("unroll") for (int j = 0; j < 8; j++)

struct Q4_0 : Quantised<32, 18> {
    static __device__ __forceinline__ void decode8(const u8 *b, int first, float *out) {
        float d = scale16(b);
        Eight qs(b + 2 + first % 16);
        int shift = first / 16 * 4;
        EACH8 out[j] = d * (float)((int)(qs[j] >> shift & 15) - 8);
    }
};

struct IQ4_NL : Quantised<32, 18> {
    static __device__ __forceinline__ void decode8(const u8 *b, int first, float *out) {
        float d = scale16(b);
        Eight qs(b + 2 + first % 16);
        int shift = first / 16 * 4;
        EACH8 out[j] = d * nonlinear(qs[j] >> shift & 15);
    }
};

struct MXFP4 : Quantised<32, 17> {
    static __device__ __forceinline__ void decode8(const u8 *b, int first, float *out) {
        float d = half_e8m0(b[0]);
        int shift = first / 16 * 4;
        EACH8 out[j] = d * e2m1_doubled(b[1 + first % 16 + j] >> shift & 15);
    }
};

struct Q5_0 : Quantised<32, 22> {
    static __device__ __forceinline__ void decode8(const u8 *b, int first, float *out) {
        float d = scale16(b);
        u32 high = load32(b + 2) >> first;
        Eight qs(b + 6 + first % 16);
        int shift = first / 16 * 4;
        EACH8 out[j] = d * (float)((int)((qs[j] >> shift & 15) | (high >> j & 1) << 4) - 16);
    }
};

struct Q8_0 : Quantised<32, 34> {
    static __device__ __forceinline__ void decode8(const u8 *b, int first, float *out) {
        float d = scale16(b);
        Eight qs(b + 2 + first);
        EACH8 out[j] = d * (float)(i8)qs[j];
    }
};

struct Q2_K : Quantised<256, 84> {
    static __device__ __forceinline__ void decode8(const u8 *b, int first, float *out) {
        u32 scale = b[first / 16];
        float dl = scale16(b + 80) * (float)(scale & 15), ml = scale16(b + 82) * (float)(scale >> 4);
        Eight qs(b + 16 + first / 128 * 32 + first % 32);
        int shift = first % 128 / 32 * 2;
        EACH8 out[j] = dl * (float)(qs[j] >> shift & 3) - ml;
    }
};

struct Q3_K : Quantised<256, 110> {
    static __device__ __forceinline__ void decode8(const u8 *b, int first, float *out) {
        int group = first / 16;
        u32 low = b[96 + group % 8] >> (group / 8 * 4) & 15, top = b[104 + group % 4] >> (group / 4 * 2) & 3;
        float dl = scale16(b + 108) * (float)((int)(low | top << 4) - 32);
        Eight qs(b + 32 + first / 128 * 32 + first % 32), mask(b + first % 32);
        int shift = first % 128 / 32 * 2, bit = first / 32;
        EACH8 out[j] = dl * (float)((int)(qs[j] >> shift & 3) - (mask[j] >> bit & 1 ? 0 : 4));
    }
};

struct Q4_K : Quantised<256, 144> {
    static __device__ __forceinline__ void decode8(const u8 *b, int first, float *out) {
        float scale, min;
        int group = first / 32;
        scale_and_min(b + 4, group, scale, min);
        float dl = scale16(b) * scale, ml = scale16(b + 2) * min;
        Eight qs(b + 16 + group / 2 * 32 + first % 32);
        int shift = group % 2 * 4;
        EACH8 out[j] = dl * (float)(qs[j] >> shift & 15) - ml;
    }
};

struct Q5_K : Quantised<256, 176> {
    static __device__ __forceinline__ void decode8(const u8 *b, int first, float *out) {
        float scale, min;
        int group = first / 32;
        scale_and_min(b + 4, group, scale, min);
        float dl = scale16(b) * scale, ml = scale16(b + 2) * min;
        Eight qs(b + 48 + group / 2 * 32 + first % 32), high(b + 16 + first % 32);
        int shift = group % 2 * 4;
        EACH8 out[j] = dl * (float)((qs[j] >> shift & 15) | (high[j] >> group & 1) << 4) - ml;
    }
};

struct Q6_K : Quantised<256, 210> {
    static __device__ __forceinline__ void decode8(const u8 *b, int first, float *out) {
        float dl = scale16(b + 208) * (float)(i8)b[192 + first / 16];
        int half = first / 128, row = first % 128 / 32;
        Eight low(b + (half * 2 + row % 2) * 32 + first % 32), high(b + 128 + half * 32 + first % 32);
        EACH8 out[j] = dl * (float)((int)((low[j] >> (row / 2 * 4) & 15) | (high[j] >> (row * 2) & 3) << 4) - 32);
    }
};

struct IQ4_XS : Quantised<256, 136> {
    static __device__ __forceinline__ void decode8(const u8 *b, int first, float *out) {
        int group = first / 32;
        u32 low = b[4 + group / 2] >> (group % 2 * 4) & 15, top = load16(b + 2) >> (group * 2) & 3;
        float dl = scale16(b) * (float)((int)(low | top << 4) - 32);
        Eight qs(b + 8 + group * 16 + first % 16);
        int shift = first % 32 / 16 * 4;
        EACH8 out[j] = dl * nonlinear(qs[j] >> shift & 15);
    }
};

template <typename W> __device__ __forceinline__ u64 row_bytes(int columns) {
    return (u64)(columns / W::LEN) * W::BYTES;
}

#ifdef MMA16
#include "mma16.cuh"
#else
// Elements column..column+8 of row `row` of a matrix; zeros after its end, which only rows of plain types have inside eight.
template <typename W>
__device__ __forceinline__ void decode8(const u8 *matrix, int row, int column, int columns, float *out) {
    const u8 *blocks = matrix + row * row_bytes<W>(columns);
    if constexpr (W::PLAIN) {
        EACH8 out[j] = column + j < columns ? W::value(blocks + (u64)(column + j) * W::BYTES) : 0.0f;
    } else {
        W::decode8(blocks + (u64)(column / W::LEN) * W::BYTES, column % W::LEN, out);
    }
}
#endif
