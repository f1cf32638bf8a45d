// Operations without a weight matrix: norms, sums, rotary embedding and cache, attention over latents, choice of experts.
#include "prelude.cuh"

#define THREADS 256

// out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight; grid (rows)
__device__ __forceinline__ void norm(const float *x, const float *weight, float *out, int width, float eps) {
    __shared__ float scratch[32];
    float squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) squares = fmaf(x[i], x[i], squares);
    float scale = 1.0f / sqrtf(block_sum(squares, scratch) / (float)width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[i] = x[i] * scale * weight[i];
}

KERNEL(1024) rms_norm(const float *x, const float *weight, float *out, int width, float eps) {
    u64 at = (u64)blockIdx.x * width;
    norm(x + at, weight, out + at, width, eps);
}

// x += y, then its norm; grid (rows)
KERNEL(1024) add_rms_norm(float *x, const float *y, const float *weight, float *out, int width, float eps) {
    u64 at = (u64)blockIdx.x * width;
    // Every thread meets its own sums again below.
    for (int i = threadIdx.x; i < width; i += blockDim.x) x[at + i] += y[at + i];
    norm(x + at, weight, out + at, width, eps);
}

KERNEL(THREADS) add(float *x, const float *y, u64 len) {
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < len; i += (u64)gridDim.x * THREADS) x[i] += y[i];
}

// gate = silu(gate) * up
KERNEL(THREADS) swiglu(float *gate, const float *up, u64 len) {
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < len; i += (u64)gridDim.x * THREADS) {
        float x = gate[i];
        gate[i] = x / (1.0f + expf(-x)) * up[i];
    }
}

// out[i] = x[rows[i]]; grid (width / THREADS, rows)
KERNEL(THREADS) gather(const float *x, const int *rows, float *out, int width) {
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < width) out[(u64)blockIdx.y * width + i] = x[(u64)rows[blockIdx.y] * width + i];
}

// out = the sum of `parts` runs of `len`, `stride` apart, in order
KERNEL(THREADS) sum_parts(const float *values, float *out, int parts, u64 stride, u64 len) {
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < len; i += (u64)gridDim.x * THREADS) {
        float sum = values[i];
        for (int part = 1; part < parts; part++) sum += values[part * stride + i];
        out[i] = sum;
    }
}

// Rotates the rope part of every head of q [T, heads, nope + rope] and stores [norm(latent) | rotated key] of
// kv [T, latent + rope] in the cache [slots, latent + rope]; grid (T), shared: rope floats
KERNEL(THREADS)
mla_store(const float *kv, const float *kv_norm, const float *inv_freq, float *q, u16 *cache, const int *positions,
          const int *slots, int heads, int nope, int rope, int latent, float eps, float scaling, int interleaved) {
    extern __shared__ float angles[];
    __shared__ float scratch[32];
    wait_for_previous();
    start_next();
    int t = blockIdx.x, pairs = rope / 2, width = latent + rope;
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
        // The angle is an f32 product, as in HF transformers.
        float sine, cosine;
        sincosf((float)positions[t] * inv_freq[i], &sine, &cosine);
        angles[i] = cosine * scaling;
        angles[pairs + i] = sine * scaling;
    }
    const float *x = kv + (u64)t * width;
    u16 *slot = cache + (u64)slots[t] * width;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < latent; i += THREADS) squares = fmaf(x[i], x[i], squares);
    // Its barriers are also those between the angles' threads and their readers.
    float scale = 1.0f / sqrtf(block_sum(squares, scratch) / (float)latent + eps);
    for (int i = threadIdx.x; i < latent; i += THREADS) slot[i] = float_to_cached(x[i] * scale * kv_norm[i]);

    // Head `heads` is the key.
    for (int i = threadIdx.x; i < (heads + 1) * pairs; i += THREADS) {
        int head = i / pairs, pair = i % pairs;
        int first = interleaved ? 2 * pair : pair, second = interleaved ? 2 * pair + 1 : pairs + pair;
        float cosine = angles[pair], sine = angles[pairs + pair];
        if (head < heads) {
            float *values = q + ((u64)t * heads + head) * (nope + rope) + nope;
            float a = values[first], b = values[second];
            values[first] = a * cosine - b * sine;
            values[second] = a * sine + b * cosine;
        } else {
            float a = x[latent + first], b = x[latent + second];
            slot[latent + first] = float_to_cached(a * cosine - b * sine);
            slot[latent + second] = float_to_cached(a * sine + b * cosine);
        }
    }
}

// Attention of one head of one token over the cached latents. q [T, heads, latent + rope], out [T, heads, latent];
// grid (heads, T), shared: latent + rope + latent floats
KERNEL(THREADS)
attend(const float *q, const u16 *cache, float *out, const int *positions, const int *tables, const u32 *blocks,
       int heads, int latent, int rope, float softmax_scale) {
    extern __shared__ float shared[];
    __shared__ float weights[BLOCK_TOKENS];
    int head = blockIdx.x, t = blockIdx.y, width = latent + rope;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float *query = shared, *sums = shared + width;
    for (int i = threadIdx.x; i < width; i += THREADS) query[i] = q[((u64)t * heads + head) * width + i];
    for (int i = threadIdx.x; i < latent; i += THREADS) sums[i] = 0.0f;
    float most = -INFINITY, total = 0.0f;
    int seen = positions[t] + 1;
    const u32 *table = blocks + tables[t];
    __syncthreads();
    for (int first = 0; first < seen; first += BLOCK_TOKENS) {
        int count = min(BLOCK_TOKENS, seen - first);
        const u16 *keys = cache + (u64)table[first / BLOCK_TOKENS] * BLOCK_TOKENS * width;
        for (int s = warp; s < count; s += THREADS / WARP) {
            float score = 0.0f;
            for (int i = lane; i < width; i += WARP) score = fmaf(query[i], half_to_float(keys[(u64)s * width + i]), score);
            score = warp_sum(score);
            if (lane == 0) weights[s] = score * softmax_scale;
        }
        __syncthreads();
        // Every warp by itself, so that all threads have the same numbers.
        float a = lane < count ? weights[lane] : -INFINITY, b = lane + WARP < count ? weights[lane + WARP] : -INFINITY;
        float now = fmaxf(most, warp_max(fmaxf(a, b)));
        a = lane < count ? expf(a - now) : 0.0f;
        b = lane + WARP < count ? expf(b - now) : 0.0f;
        float correction = expf(most - now);
        total = total * correction + warp_sum(a + b);
        most = now;
        __syncthreads();
        if (warp == 0) {
            weights[lane] = a;
            weights[lane + WARP] = b;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < latent; i += THREADS) {
            float sum = sums[i] * correction;
            for (int s = 0; s < count; s++) sum = fmaf(weights[s], half_to_float(keys[(u64)s * width + i]), sum);
            sums[i] = sum;
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < latent; i += THREADS) out[((u64)t * heads + head) * latent + i] = sums[i] / total;
}

__device__ __forceinline__ float lowest_if_nan(float v) { return v != v ? -INFINITY : v; }

// The largest of a warp's candidates, of equal ones the smallest index; an index of INT_MAX is none.
__device__ __forceinline__ void warp_best(float &value, int &index) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        float other = __shfl_xor_sync(FULL, value, offset);
        int other_index = __shfl_xor_sync(FULL, index, offset);
        if (other > value || (other == value && other_index < index)) value = other, index = other_index;
    }
}

__device__ __forceinline__ void better(float value, int index, float &best, int &best_index) {
    if (value > best || (value == best && index < best_index)) best = value, best_index = index;
}

#define NONE 0x7fffffff

// Chooses experts: logits [T, experts] to choice [T, ids | weights]. `floor` < 0: weights are not divided by their sum.
// One warp for each token; grid (T), shared: 2 * experts + groups floats
KERNEL(WARP)
route(const float *logits, const float *bias, float *choice, int experts, int per_token, int groups, int kept_groups,
      int softmax, int top_two, float floor, float scaling) {
    extern __shared__ float shared[];
    int t = blockIdx.x, lane = threadIdx.x;
    float *scores = shared, *selection = shared + experts, *group_scores = shared + 2 * experts;
    const float *in = logits + (u64)t * experts;

    float most = -INFINITY, sum = 0.0f;
    if (softmax) {
        for (int i = lane; i < experts; i += WARP) most = fmaxf(most, in[i]);
        most = warp_max(most);
        for (int i = lane; i < experts; i += WARP) sum += expf(in[i] - most);
        sum = warp_sum(sum);
    }
    for (int i = lane; i < experts; i += WARP) {
        float score = softmax ? expf(in[i] - most) / sum : 1.0f / (1.0f + expf(-in[i]));
        scores[i] = score;
        selection[i] = lowest_if_nan(bias ? score + bias[i] : score);
    }
    __syncwarp();

    int size = experts / groups;
    for (int group = lane; group < groups; group += WARP) {
        float best = -INFINITY, second = -INFINITY;
        for (int i = group * size; i < (group + 1) * size; i++) {
            float v = selection[i];
            if (v > best) second = best, best = v;
            else if (v > second) second = v;
        }
        group_scores[group] = lowest_if_nan(top_two && size > 1 ? best + second : best);
    }
    __syncwarp();
    // Of the groups that are left over, the experts cannot be chosen: their scores for the choice become NaN.
    for (int round = 0; round < kept_groups; round++) {
        float best = -INFINITY;
        int at = NONE;
        for (int group = lane; group < groups; group += WARP) {
            float score = group_scores[group];
            if (score == score) better(score, group, best, at);
        }
        warp_best(best, at);
        __syncwarp();
        if (lane == 0 && at != NONE) group_scores[at] = NAN;
        __syncwarp();
    }
    for (int i = lane; i < experts; i += WARP) {
        float left_over = group_scores[i / size];
        if (left_over == left_over) selection[i] = NAN;
    }
    __syncwarp();

    float *ids = choice + (u64)t * 2 * per_token, *weights = ids + per_token, total = 0.0f;
    for (int k = 0; k < per_token; k++) {
        float best = -INFINITY;
        int at = NONE;
        for (int i = lane; i < experts; i += WARP) {
            float score = selection[i];
            if (score == score) better(score, i, best, at);
        }
        warp_best(best, at);
        // A valid configuration leaves enough experts; memory must not depend on it.
        if (at == NONE) at = 0;
        __syncwarp();
        if (lane == 0) {
            selection[at] = NAN;
            ids[k] = (float)at;
            weights[k] = scores[at];
        }
        total += scores[at];
        __syncwarp();
    }
    float divisor = floor < 0.0f ? 1.0f : total + floor;
    for (int k = lane; k < per_token; k += WARP) weights[k] = weights[k] / divisor * scaling;
}
