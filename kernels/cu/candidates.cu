// What a row of logits comes to before a token is drawn: candidates.rs says what is asked for and has the twin of this kernel.
#include "prelude.cuh"

// As in candidates.rs.
#define MOST_CANDIDATES 256
#define CLASSES 2048
#define CLASSES_PER_UNIT 32.0f
#define NEGLIGIBLE -27.725887f
// As in candidates.rs of the backend.
#define THREADS 1024
#define NONE 0xffffffffu
#define WANTS_LIST 1u
#define WANTS_RAW 2u

struct Asked {
    u32 row, first_edit, edits, first_word, words, wants;
    float divisor;
    u32 unused;
};

struct Edit {
    u32 id;
    float bias, repetition, minus;
};

struct Found {
    u32 fault, best, listed;
    float faulty, largest, floor, raw_largest, unused;
    double rest, raw_sum;
    u32 ids[MOST_CANDIDATES];
    float logits[MOST_CANDIDATES];
};

// Bits of floats that compare as the floats do; zeros of both signs are equal.
__device__ __forceinline__ u32 ordered(float f) {
    u32 bits = __float_as_uint(f + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered(u32 bits) {
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

__device__ __forceinline__ float changed(const Edit &edit, float logit) {
    logit += edit.bias;
    if (edit.repetition != 1.0f) logit = logit > 0.0f ? logit / edit.repetition : logit * edit.repetition;
    // Not one rounding for both, as the twin has two.
    return __fsub_rn(logit, edit.minus);
}

__device__ __forceinline__ u64 block_max(u64 v, u64 *scratch) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        u64 other = __shfl_xor_sync(FULL, v, offset);
        v = other > v ? other : v;
    }
    __syncthreads();
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    v = scratch[lane];
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        u64 other = __shfl_xor_sync(FULL, v, offset);
        v = other > v ? other : v;
    }
    return v;
}

__device__ __forceinline__ double block_total(double v, double *scratch) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(FULL, v, offset);
    __syncthreads();
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    v = scratch[lane];
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(FULL, v, offset);
    return v;
}

__device__ __forceinline__ int class_of(float largest, float logit) {
    float far = (largest - logit) * CLASSES_PER_UNIT;
    return far < CLASSES - 1 ? (int)far : CLASSES - 1;
}

__device__ __forceinline__ bool allows(const u32 *words, u32 count, u32 id) {
    return id / 32 < count && (words[id / 32] >> (id % 32) & 1u);
}

// A block for each row of `logits` `[rows, width]` that is asked for, whose first column is token `first`. Dynamic shared memory: a bit for
// each column.
KERNEL(THREADS)
candidates(const float *logits, const Asked *all_asked, const Edit *all_edits, const u32 *all_words, Found *all_found, int width, u32 first) {
    extern __shared__ u32 plain[];
    __shared__ u64 scratch[WARP];
    __shared__ u32 counts[CLASSES];
    __shared__ u32 sums[WARP];
    __shared__ u32 listed, classes;
    Asked asked = all_asked[blockIdx.x];
    const float *row = logits + (u64)asked.row * width;
    const Edit *edits = all_edits + asked.first_edit;
    const u32 *words = all_words + asked.first_word;
    Found &found = all_found[blockIdx.x];
    bool masked = asked.words != NONE;
    int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;

    // Bits of the tokens that may come as they are. Edited ones are taken from their own list.
    for (int at = tid; at < (width + 31) / 32; at += THREADS) {
        u32 id = first + at * 32, bits = FULL;
        if (masked) {
            u32 low = id / 32 < asked.words ? words[id / 32] : 0, high = id / 32 + 1 < asked.words ? words[id / 32 + 1] : 0;
            bits = __funnelshift_r(low, high, id % 32);
        }
        int left = width - at * 32;
        plain[at] = left < 32 ? bits & ((1u << left) - 1) : bits;
    }
    for (int at = tid; at < CLASSES; at += THREADS) counts[at] = 0;
    if (tid == 0) listed = 0;
    __syncthreads();
    for (u32 i = tid; i < asked.edits; i += THREADS) {
        u32 column = edits[i].id - first;
        if (column < (u32)width) atomicAnd(&plain[column / 32], ~(1u << column % 32));
    }
    __syncthreads();

    u64 best = 0;
    u32 fault = NONE;
    float raw = -INFINITY;
    for (int at = tid; at < width; at += THREADS) {
        float logit = row[at];
        if (!(logit < INFINITY)) fault = min(fault, (u32)at);
        raw = fmaxf(raw, logit);
        if (plain[at / 32] >> (at % 32) & 1u) {
            u64 key = (u64)ordered(logit) << 32 | (u32)~(first + at);
            best = key > best ? key : best;
        }
    }
    for (u32 i = tid; i < asked.edits; i += THREADS) {
        Edit edit = edits[i];
        u32 column = edit.id - first;
        if (column < (u32)width && (!masked || allows(words, asked.words, edit.id))) {
            u64 key = (u64)ordered(changed(edit, row[column])) << 32 | (u32)~edit.id;
            best = key > best ? key : best;
        }
    }
    best = block_max(best, scratch);
    fault = ~(u32)block_max(~fault, scratch);
    raw = from_ordered((u32)block_max(ordered(raw), scratch));
    float largest = best == 0 ? -INFINITY : from_ordered((u32)(best >> 32));

    double raw_sum = 0.0, rest = 0.0;
    if (asked.wants & WANTS_RAW) {
        float own = 0.0f;
        for (int at = tid; at < width; at += THREADS) own += expf(row[at] - raw);
        raw_sum = block_total(own, (double *)scratch);
    }
    float floor = -INFINITY;
    if ((asked.wants & WANTS_LIST) && largest > -INFINITY && largest < INFINITY) {
        for (int at = tid; at < width; at += THREADS)
            if (plain[at / 32] >> (at % 32) & 1u) {
                int c = class_of(largest, row[at]);
                // Most tokens are far away, and the last class is never taken.
                if (c < CLASSES - 1) atomicAdd(&counts[c], 1u);
            }
        for (u32 i = tid; i < asked.edits; i += THREADS) {
            Edit edit = edits[i];
            u32 column = edit.id - first;
            if (column < (u32)width && (!masked || allows(words, asked.words, edit.id)))
                atomicAdd(&counts[class_of(largest, changed(edit, row[column]))], 1u);
        }
        __syncthreads();
        // How many classes fit: each thread has two, and knows how many tokens the ones before have.
        u32 pair = counts[2 * tid] + counts[2 * tid + 1], before = pair;
#pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2) {
            u32 other = __shfl_up_sync(FULL, before, offset);
            if (lane >= offset) before += other;
        }
        if (lane == WARP - 1) sums[warp] = before;
        __syncthreads();
        u32 warps = lane < warp ? sums[lane] : 0;
#pragma unroll
        for (int offset = WARP / 2; offset > 0; offset /= 2) warps += __shfl_xor_sync(FULL, warps, offset);
        before += warps - pair;
        u32 fits = (before + counts[2 * tid] <= MOST_CANDIDATES) + (before + pair <= MOST_CANDIDATES);
        // The last class has no end.
        if (tid == THREADS - 1) fits = min(fits, 1u);
        u32 own = fits;
#pragma unroll
        for (int offset = WARP / 2; offset > 0; offset /= 2) own += __shfl_xor_sync(FULL, own, offset);
        __syncthreads();
        if (lane == 0) sums[warp] = own;
        __syncthreads();
        if (warp == 0) {
            own = sums[lane];
#pragma unroll
            for (int offset = WARP / 2; offset > 0; offset /= 2) own += __shfl_xor_sync(FULL, own, offset);
            if (lane == 0) classes = own;
        }
        __syncthreads();
        float own_rest = 0.0f;
        auto take = [&](u32 id, float logit) {
            if (class_of(largest, logit) < (int)classes) {
                u32 at = atomicAdd(&listed, 1u);
                found.ids[at] = id;
                found.logits[at] = logit;
            } else {
                floor = fmaxf(floor, logit);
                float exponent = (logit - largest) / asked.divisor;
                if (exponent > NEGLIGIBLE) own_rest += expf(exponent);
            }
        };
        // One at a time: registers are few.
#pragma unroll 1
        for (int at = tid; at < width; at += THREADS)
            if (plain[at / 32] >> (at % 32) & 1u) take(first + at, row[at]);
        for (u32 i = tid; i < asked.edits; i += THREADS) {
            Edit edit = edits[i];
            u32 column = edit.id - first;
            if (column < (u32)width && (!masked || allows(words, asked.words, edit.id))) take(edit.id, changed(edit, row[column]));
        }
        floor = from_ordered((u32)block_max(ordered(floor), scratch));
        rest = block_total(own_rest, (double *)scratch);
    }
    __syncthreads();
    if (tid == 0) {
        found.fault = fault == NONE ? NONE : first + fault;
        found.faulty = fault == NONE ? 0.0f : row[fault];
        found.best = best == 0 ? NONE : ~(u32)best;
        found.largest = largest;
        found.floor = floor;
        found.listed = listed;
        found.raw_largest = raw;
        found.rest = rest;
        found.raw_sum = raw_sum;
    }
}
