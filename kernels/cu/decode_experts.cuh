// A layer of experts for one to sixteen tokens: the router, what goes up, what comes down.
#pragma once
#include "decode_products.cuh"

// ---- mixture of experts ----

const int MAX_EXPERTS = 512, MAX_CHOSEN = 16, MAX_TOKENS = 16;

struct Router {
    float *logits;        // [M, E]
    const float *bias;    // [E] or null
    int experts, chosen, groups, topk_group;
    int sigmoid;          // else softmax over all
    int group_sum_two;    // a group's score: sum of its two best, else its best
    int renormalise;      // weights are divided by their sum plus `floor`
    float floor, scale;
};

// What the router decided for a batch.
struct __align__(16) Choice {
    int id[MAX_TOKENS][MAX_CHOSEN];         // MAX_EXPERTS where there is none
    float weight[MAX_TOKENS][MAX_CHOSEN];
    int count;                              // of the list
    short list[MAX_EXPERTS];                // local experts that anyone chose
};

// Leaves only the experts of the best groups; up to 32 groups.
template <int PER>
DEV void keep_best_groups(const Router &r, float pick[PER]) {
    const int lane = threadIdx.x % 32, len = r.experts / r.groups;
    float mine = -INFINITY;
#pragma unroll 1
    for (int group = 0; group < r.groups; group++) {
        float first = -INFINITY, second = -INFINITY;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            int e = i * 32 + lane;
            if (e >= group * len && e < (group + 1) * len) { second = fmaxf(second, fminf(first, pick[i])); first = fmaxf(first, pick[i]); }
        }
#pragma unroll
        for (int o = 16; o; o /= 2) {
            float a = __shfl_xor_sync(~0u, first, o), b = __shfl_xor_sync(~0u, second, o);
            second = fmaxf(fmaxf(second, b), fminf(first, a));
            first = fmaxf(first, a);
        }
        float score = r.group_sum_two && len > 1 ? first + second : first;
        if (lane == group) mine = score;
    }
    int before = 0;
#pragma unroll 1
    for (int group = 0; group < r.groups; group++) {
        float other = __shfl_sync(~0u, mine, group);
        before += other > mine || (other == mine && group < lane);
    }
    const u32 kept = __ballot_sync(~0u, lane < r.groups && before < r.topk_group);
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (i * 32 + lane < r.experts && !(kept >> (i * 32 + lane) / len & 1)) pick[i] = -INFINITY;
}

// One warp chooses for one token. Ties go to the smaller id.
template <int PER>
__device__ __noinline__ void route_one(const Router &r, int m, Choice &out) {
    const int lane = threadIdx.x % 32, E = r.experts;
    float score[PER], pick[PER];
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int e = i * 32 + lane;
        score[i] = e < E ? __ldcg(r.logits + (size_t)m * E + e) : -INFINITY;
        top = fmaxf(top, score[i]);
    }
    if (r.sigmoid) {
#pragma unroll
        for (int i = 0; i < PER; i++) score[i] = 1.0f / (1.0f + expf(-score[i]));
    } else {
        top = warp_max(top);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PER; i++) { score[i] = i * 32 + lane < E ? expf(score[i] - top) : 0.0f; sum += score[i]; }
        sum = 1.0f / warp_sum(sum);
#pragma unroll
        for (int i = 0; i < PER; i++) score[i] *= sum;
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int e = i * 32 + lane;
        // A NaN counts as the lowest score.
        pick[i] = e < E ? fmaxf(score[i] + (r.bias ? r.bias[e] : 0.0f), -INFINITY) : -INFINITY;
    }
    if (r.groups > 1) keep_best_groups<PER>(r, pick);
    float total = 0.0f;
#pragma unroll 1
    for (int k = 0; k < r.chosen; k++) {
        // Floats as integers of the same order.
        float best = -INFINITY;
#pragma unroll
        for (int i = 0; i < PER; i++) best = fmaxf(best, pick[i]);
        const int bits = __float_as_int(best);
        const int key = __reduce_max_sync(~0u, bits ^ (bits >> 31 & 0x7fffffff));
        const float top = __int_as_float(key ^ (key >> 31 & 0x7fffffff));
        int id = MAX_EXPERTS;
        float weight = 0.0f;
#pragma unroll
        for (int i = PER - 1; i >= 0; i--) if (pick[i] == top) { id = i * 32 + lane; weight = score[i]; }
        const int first = __reduce_min_sync(~0u, id);
        weight = __shfl_sync(~0u, weight, first % 32);
        id = first;
#pragma unroll
        for (int i = 0; i < PER; i++) if (i * 32 + lane == id) pick[i] = -INFINITY;
        total += weight;
        if (lane == 0) { out.id[m][k] = id; out.weight[m][k] = weight; }
    }
    if (lane >= r.chosen && lane < MAX_CHOSEN) { out.id[m][lane] = MAX_EXPERTS; out.weight[m][lane] = 0.0f; }
    __syncwarp();
    if (lane < r.chosen) {
        float w = out.weight[m][lane];
        if (r.renormalise) w /= total + r.floor;
        out.weight[m][lane] = w * r.scale;
    }
}

DEV void route(const Router &r, int m, Choice &out) {
    if (r.experts <= 256) route_one<8>(r, m, out); else route_one<MAX_EXPERTS / 32>(r, m, out);
}

// The whole block chooses for one token: an expert's rank is the number of those that come before it. Ends with a barrier.
template <int WARPS>
DEV void route_alone(const Router &r, Choice &out) {
    __shared__ __align__(16) float picks[WARPS * MAX_CHOSEN];
    __shared__ __align__(16) int ids[WARPS * MAX_CHOSEN];
    __shared__ float scores[WARPS * MAX_CHOSEN];
    __shared__ float of_warp[2][WARPS];
    const int e = threadIdx.x, warp = e / 32, lane = e % 32;
    const bool here = e < r.experts;
    const float logit = here ? __ldcg(r.logits + e) : -INFINITY, bias = here && r.bias ? r.bias[e] : 0.0f;
    float score;
    if (r.sigmoid) {
        score = 1.0f / (1.0f + expf(-logit));
    } else {
        float top = warp_max(logit);
        if (lane == 0) of_warp[0][warp] = top;
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < WARPS; i++) top = fmaxf(top, of_warp[0][i]);
        score = here ? expf(logit - top) : 0.0f;
        float sum = warp_sum(score);
        if (lane == 0) of_warp[1][warp] = sum;
        __syncthreads();
        sum = 0.0f;
#pragma unroll 1
        for (int i = 0; i < WARPS; i++) sum += of_warp[1][i];
        score /= sum;
    }
    // A NaN counts as the lowest score.
    const float pick = here ? fmaxf(score + bias, -INFINITY) : -INFINITY;
    // Within a warp first: only its best can be among the best of all.
    int before = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const float other = __shfl_sync(~0u, pick, i);
        before += other > pick || (other == pick && i < lane);
    }
    if (e < MAX_CHOSEN) { out.id[0][e] = MAX_EXPERTS; out.weight[0][e] = 0.0f; }
    const int each = (r.chosen + 3) / 4 * 4;
    if (before < each) { picks[warp * each + before] = pick; ids[warp * each + before] = e; scores[warp * each + before] = score; }
    __syncthreads();
    const int candidates = (r.experts + 31) / 32 * each;
    if (e < candidates) {
        const float mine = picks[e];
        const int id = ids[e];
        before = 0;
#pragma unroll 4
        for (int i = 0; i < candidates; i += 4) {
            const float4 p = *(const float4 *)(picks + i);
            const int4 j = *(const int4 *)(ids + i);
            before += (p.x > mine || (p.x == mine && j.x < id)) + (p.y > mine || (p.y == mine && j.y < id)) + (p.z > mine || (p.z == mine && j.z < id)) + (p.w > mine || (p.w == mine && j.w < id));
        }
        if (before < r.chosen) { out.id[0][before] = id; out.weight[0][before] = scores[e]; }
    }
    __syncthreads();
    if (warp == 0) {
        const float weight = lane < r.chosen ? out.weight[0][lane] : 0.0f, total = warp_sum(weight);
        if (lane < r.chosen) out.weight[0][lane] = (r.renormalise ? weight / (total + r.floor) : weight) * r.scale;
    }
    __syncthreads();
}

struct Experts {
    const u8 *gate, *up, *down;          // [local, strips, tiles]
    const u8 *shared_gate, *shared_up, *shared_down;
    int gate_type, up_type, down_type, shared_gate_type, shared_up_type, shared_down_type;
    int first, local;                    // experts of this rank
    int width, shared_width;             // of this rank
    int chosen;                          // experts of a token
};

const int ROUTER_WARPS = 8;

// Logits of f32 weights [E, K] and f32 x, a block a row; the block that is last chooses for all tokens. `ticket` is zero before and after.
extern "C" __global__ void __launch_bounds__(256) router(__grid_constant__ const Router r, const float *w, const float *x, int K, int M, int first, int local, u32 *ticket, Choice *out) {
    __shared__ float sums[ROUTER_WARPS][MAX_TOKENS];
    __shared__ Choice choice;
    __shared__ u32 active[MAX_EXPERTS / 32];
    __shared__ bool last;
    const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int HELD = 6;  // 6144 columns of a row
    w += (size_t)row * K;
    float4 held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int c = (i * 256 + threadIdx.x) * 4;
        held[i] = c < K ? *(const float4 *)(w + c) : make_float4(0, 0, 0, 0);
    }
    wait_for_previous();
    start_next();
#pragma unroll 1
    for (int m = 0; m < M; m++) {
        float a = 0.0f;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int c = (i * 256 + threadIdx.x) * 4;
            if (c < K) { const float4 v = *(const float4 *)(x + (size_t)m * K + c); a += (held[i].x * v.x + held[i].y * v.y) + (held[i].z * v.z + held[i].w * v.w); }
        }
#pragma unroll 1
        for (int c = (HELD * 256 + threadIdx.x) * 4; c < K; c += 1024) {
            const float4 p = *(const float4 *)(w + c), v = *(const float4 *)(x + (size_t)m * K + c);
            a += (p.x * v.x + p.y * v.y) + (p.z * v.z + p.w * v.w);
        }
        a = warp_sum(a);
        if (lane == 0) sums[warp][m] = a;
    }
    __syncthreads();
    if (threadIdx.x < M) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < ROUTER_WARPS; k++) sum += sums[k][threadIdx.x];
        r.logits[(size_t)threadIdx.x * gridDim.x + row] = sum;
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1) == gridDim.x - 1;
        if (last) *ticket = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (threadIdx.x < MAX_EXPERTS / 32) active[threadIdx.x] = 0;
    if (M == 1 && r.groups == 1 && r.experts <= ROUTER_WARPS * 32) {
        route_alone<ROUTER_WARPS>(r, choice);
    } else {
#pragma unroll 1
        for (int m = warp; m < M; m += ROUTER_WARPS) route(r, m, choice);
        __syncthreads();
    }
    for (int i = threadIdx.x; i < M * MAX_CHOSEN; i += 256) {
        const int id = choice.id[0][i] - first;
        out->id[0][i] = choice.id[0][i];
        out->weight[0][i] = choice.weight[0][i];
        if (id >= 0 && id < local) atomicOr(&active[id / 32], 1u << id % 32);
    }
    __syncthreads();
    if (warp == 0) {
        const u32 mine = lane < MAX_EXPERTS / 32 ? active[lane] : 0;
        int before = 0;
#pragma unroll
        for (int i = 0; i < MAX_EXPERTS / 32; i++) {
            const u32 bits = __shfl_sync(~0u, mine, i);
            if (bits >> lane & 1) out->list[before + __popc(bits & ((1u << lane) - 1))] = (short)(i * 32 + lane);
            before += __popc(bits);
        }
        if (lane == 0) out->count = before;
    }
}

// Brings a choice into shared memory; the caller synchronises.
DEV void copy_choice(const Choice *from, int M, int chosen, Choice &to) {
#pragma unroll 1
    for (int i = threadIdx.x; i < M * MAX_CHOSEN; i += blockDim.x) { to.id[0][i] = __ldcg(&from->id[0][i]); to.weight[0][i] = __ldcg(&from->weight[0][i]); }
#pragma unroll 1
    for (int i = threadIdx.x; i < M * chosen && i < MAX_EXPERTS; i += blockDim.x) to.list[i] = __ldcg(&from->list[i]);
    if (threadIdx.x == 0) to.count = __ldcg(&from->count);
}

DEV int slot_of(const Choice &choice, int m, int chosen, int id) {
    int slot = -1;
#pragma unroll
    for (int k = 0; k < MAX_CHOSEN; k += 4) {
        const int4 ids = *(const int4 *)&choice.id[m][k];
        slot = ids.x == id ? k : ids.y == id ? k + 1 : ids.z == id ? k + 2 : ids.w == id ? k + 3 : slot;
    }
    return slot < chosen ? slot : -1;
}

// activated[m][slot][width] = weight * silu(gate h) * up h for the chosen; shared experts in [m][chosen][shared_width] behind them.
// Units: strips of the shared experts, then those of each active one. The first half of the warps takes the gate's rows, the second those of up.
#ifndef UP_WARPS
#define UP_WARPS 16
#endif
template <int NT, bool ONE>
DEV void moe_up(const Choice *planned, const Experts &x, int K, int M, int slot_bytes, bool staged, const u16 *h, const u16 *h_sums, const float *inverse, float *activated) {
    __shared__ Tables tables[UP_WARPS];
    __shared__ u64 barriers[UP_WARPS][DEPTH], arrived;
    __shared__ Zeros zeros;
    __shared__ float sums[UP_WARPS * NT * 8 * 17];
    __shared__ Choice choice;
    const int HALF = UP_WARPS / 2;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, n_tiles = K / 256;
    const int shared_strips = x.shared_width / 16, strips = x.width / 16;
    const bool is_up = warp >= HALF;
    const int k0 = warp % HALF * n_tiles / HALF, k1 = (warp % HALF + 1) * n_tiles / HALF;
    const int type = is_up ? x.up_type : x.gate_type, shared_type = is_up ? x.shared_up_type : x.shared_gate_type;
    const u8 *w = is_up ? x.up : x.gate, *shared_w = is_up ? x.shared_up : x.shared_gate;
    Ring ring;
    ring.start(shared_bytes + warp * DEPTH * slot_bytes, slot_bytes, barriers[warp]);
    if (threadIdx.x == 0) { init_barrier(&arrived); fence_barriers(); }
    clear(zeros);
    __syncthreads();
    int next_unit = blockIdx.x, next_k = k1, total = shared_strips, bytes = 0, asked = 0;
    const u8 *next = 0;
    auto ask = [&] {
        if (next_k == k1) {
            next = 0;
            if (next_unit < total && k0 < k1) {
                const int n = next_unit - shared_strips;
                bytes = tile_bytes(n < 0 ? shared_type : type);
                const size_t strip = n < 0 ? next_unit : choice.list[n / strips] * strips + n % strips;
                next = (n < 0 ? shared_w : w) + (strip * n_tiles + k0) * bytes;
                next_unit += gridDim.x;
                next_k = k0;
            }
        }
        ring.ask(next, bytes);
        if (next) { next += bytes; next_k++; }
    };
    // What the shared experts need is known before the router has spoken.
#pragma unroll 1
    for (; asked < DEPTH && (next_k < k1 || next_unit < shared_strips) && k0 < k1; asked++) ask();
    wait_for_previous();
    start_next();
    Tokens B = {h, h_sums, K, K / 8};
    if (staged) B = copy_tokens((u16 *)(shared_bytes + UP_WARPS * DEPTH * slot_bytes), h, h_sums, M, K, &arrived);
    copy_choice(planned, M, x.chosen, choice);
    __syncthreads();
    total += choice.count * strips;
#pragma unroll 1
    for (; asked < DEPTH; asked++) ask();
    if (staged) wait_barrier(&arrived, 0);
    const size_t row_len = (size_t)x.chosen * x.width + x.shared_width;
    bool again = false;
#pragma unroll 1
    for (int unit = blockIdx.x; unit < total; unit += gridDim.x) {
        const bool shared = unit < shared_strips;
        const int of = unit - shared_strips, strip = shared ? unit : of % strips, id = shared ? 0 : choice.list[of / strips] + x.first;
        float acc[NT][4];
        bool has[NT];
        Columns c[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
            has[n] = g + 8 * n < M && (ONE || shared || slot_of(choice, g + 8 * n, x.chosen, id) >= 0);
            c[n] = columns(B, g + 8 * n, k0, t, has[n], zeros);
        }
        const int its_type = shared ? shared_type : type;
#pragma unroll 1
        for (int k = k0; k < k1; k++) {
            tile_product_of<NT, ONE>(its_type, ring.take(), c, tables[warp], acc, lane);
            ask();
#pragma unroll
            for (int n = 0; n < NT; n++) advance(c[n], has[n]);
        }
        // Those who add up the strip before have all read it.
        if (again) __syncthreads();
        again = true;
        leave<NT, UP_WARPS>(acc, sums);
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < 16 * M; i += UP_WARPS * 32) {
            const int row = i % 16, m = i / 16, slot = shared ? x.chosen : slot_of(choice, m, x.chosen, id);
            if (slot < 0) continue;
            const float gate = left<NT>(sums, 0, HALF, row, m) * inverse[m], up = left<NT>(sums, HALF, UP_WARPS, row, m) * inverse[m];
            const float weight = shared ? 1.0f : choice.weight[m][slot];
            activated[m * row_len + (size_t)slot * x.width + strip * 16 + row] = weight * up * gate / (1.0f + __expf(-gate));
        }
    }
}

// What moe_down multiplies: a token's local chosen experts and the shared ones, side by side; others are zero.
struct Activated {
    const float *x;
    const Choice *choice;
    int row_len, chosen;
    u32 per_width;  // 2^32 / width, rounded up: exact for columns below 2^16
    int first, local;
    DEV float4 raw(int m, int c) const {
        const int slot = (int)__umulhi((u32)c, per_width);
        if (slot < chosen) {
            int id = choice->id[m][slot] - first;
            if (id < 0 || id >= local) return make_float4(0, 0, 0, 0);
        }
        return *(const float4 *)(x + (size_t)m * row_len + c);
    }
    DEV float4 weight(int) const { return make_float4(1, 1, 1, 1); }
    DEV bool normed() const { return false; }
};

// Nine warps, one for each of GLM-5's eight chosen experts and the shared one, share a strip.
#ifndef DOWN_TEAMS
#define DOWN_TEAMS 2
#endif
const int DOWN_TEAM = 9, MAX_ITEMS = 256;

// A tile of every strip of `hidden`: of an expert, or of the shared ones.
struct Item {
    const u8 *tile;  // of strip 0
    int per_strip;   // bytes from strip to strip
    int type;
};

// out[m] = sum over slots of down activated. Team i of block b takes strips b + gridDim.x * (i + DOWN_TEAMS * n); a warp takes every ninth item.
template <int NT, bool ONE>
DEV void moe_down(const Choice *planned, const Experts &x, int M, int slot_bytes, const float *activated, float *out, int hidden) {
    __shared__ Tables tables[DOWN_TEAMS * DOWN_TEAM];
    __shared__ u64 barriers[DOWN_TEAMS * DOWN_TEAM][DEPTH];
    __shared__ Zeros zeros;
    __shared__ float sums[DOWN_TEAMS][DOWN_TEAM * NT * 8 * 17];
    __shared__ Choice choice;
    __shared__ Item items[MAX_ITEMS];
    __shared__ short x_tiles[ONE ? 1 : NT * 8][MAX_ITEMS];  // where a token's columns of an item begin; -1: it has none
    __shared__ float partial[2 * DOWN_TEAMS * DOWN_TEAM], inverse[NT * 8];
    const int WARPS = DOWN_TEAMS * DOWN_TEAM;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, team = warp / DOWN_TEAM, part = warp % DOWN_TEAM;
    const int strips = hidden / 16, per_expert = x.width / 256, per_shared = x.shared_width / 256;
    const int first = blockIdx.x + gridDim.x * team, step = gridDim.x * DOWN_TEAMS;
    Ring ring;
    ring.start(shared_bytes + warp * DEPTH * slot_bytes, slot_bytes, barriers[warp]);
    clear(zeros);
    // The kernel before the last wrote the choice, and the last had waited for it before it let this one start.
    copy_choice(planned, M, x.chosen, choice);
    __syncthreads();
    const int count = per_shared + choice.count * per_expert;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += WARPS * 32) {
        const int n = i - per_shared, expert = n < 0 ? 0 : choice.list[n / per_expert], k = n < 0 ? i : n % per_expert;
        const int type = n < 0 ? x.shared_down_type : x.down_type, tile = tile_bytes(type), per = n < 0 ? per_shared : per_expert;
        items[i] = {(n < 0 ? x.shared_down : x.down) + ((size_t)expert * strips * per + k) * tile, per * tile, type};
#pragma unroll 1
        for (int m = 0; m < M; m++) {
            const int slot = n < 0 ? x.chosen : slot_of(choice, m, x.chosen, expert + x.first);
            x_tiles[m][i] = slot < 0 ? -1 : (short)(slot * per_expert + k);
        }
    }
    __syncthreads();
    int next_strip = first, next_item = part;
    auto ask = [&] {
        const u8 *from = 0;
        int bytes = 0;
        if (next_strip < strips && part < count) {
            const Item item = items[next_item];
            bytes = tile_bytes(item.type);
            from = item.tile + (size_t)next_strip * item.per_strip;
            next_item += DOWN_TEAM;
            if (next_item >= count) { next_item = part; next_strip += step; }
        }
        ring.ask(from, bytes);
    };
#pragma unroll 1
    for (int i = 0; i < DEPTH; i++) ask();
    u16 *tokens = (u16 *)(shared_bytes + WARPS * DEPTH * slot_bytes);
    const int K = x.chosen * x.width + x.shared_width, x_stride = K + PAD, sums_stride = K / 8 + PAD;
    u16 *token_sums = tokens + M * x_stride;
    wait_for_previous();
    start_next();
    const Activated source = {activated, &choice, K, x.chosen, 0xffffffffu / (u32)x.width + 1, x.first, x.local};
    stage<WARPS, ONE>(source, M, K, tokens, x_stride, token_sums, sums_stride, inverse, partial, 0.0f);
    const Tokens B = {tokens, token_sums, x_stride, sums_stride};
    bool again = false;
#pragma unroll 1
    for (int strip = first; strip < strips; strip += step) {
        float acc[NT][4];
#pragma unroll
        for (int n = 0; n < NT; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
#pragma unroll 1
        for (int item = part; item < count; item += DOWN_TEAM) {
            Columns c[NT];
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const int token = g + 8 * n, at = token < M ? x_tiles[token][item] : -1;
                c[n] = columns(B, token, at, t, at >= 0, zeros);
            }
            tile_product_of<NT, ONE>(items[item].type, ring.take(), c, tables[warp], acc, lane);
            ask();
        }
        // Those who add up the strip before have all read it.
        if (again) barrier_of(1 + team, DOWN_TEAM * 32);
        again = true;
        leave<NT, DOWN_TEAM>(acc, sums[team]);
        barrier_of(1 + team, DOWN_TEAM * 32);
#pragma unroll 1
        for (int i = threadIdx.x % (DOWN_TEAM * 32); i < 16 * M; i += DOWN_TEAM * 32)
            out[(size_t)(i / 16) * hidden + strip * 16 + i % 16] = left<NT>(sums[team], 0, DOWN_TEAM, i % 16, i / 16) * inverse[i / 16];
    }
}

#define MOE(NAME, NT, ONE) \
    extern "C" __global__ void __launch_bounds__(UP_WARPS * 32, 1) moe_up_##NAME(const Choice *choice, __grid_constant__ const Experts x, int K, int M, int slot_bytes, int staged, const u16 *h, const u16 *h_sums, const float *inverse, float *activated) { \
        moe_up<NT, ONE>(choice, x, K, M, slot_bytes, staged, h, h_sums, inverse, activated); \
    } \
    extern "C" __global__ void __launch_bounds__(DOWN_TEAMS * DOWN_TEAM * 32, 1) moe_down_##NAME(const Choice *choice, __grid_constant__ const Experts x, int M, int slot_bytes, const float *activated, float *out, int hidden) { \
        moe_down<NT, ONE>(choice, x, M, slot_bytes, activated, out, hidden); \
    }
MOE(1, 1, true)
MOE(8, 1, false)
MOE(16, 2, false)
