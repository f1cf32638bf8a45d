#pragma once
// Latent attention (MLA) over a paged cache, for sm_90, sm_100 and sm_120: decode in the absorbed form, prefill in the materialised form.
//
// Compiled by NVRTC without any header. Dimensions are compile-time constants:
//   ATT_NOPE  query values per head that meet the latent through kv_b, a multiple of 8
//   ATT_ROPE  query values per head that meet the rotated key, a multiple of 8
//   ATT_V     output values per head, a multiple of 8, at most 512 (448 where ATT_R is 512: shared memory)
//   ATT_R     latent values per position, a multiple of 16, at most 512
// The cache and what is attended with are f16: bf16 was measured to move a router's choice, f16 a tenth as often. kv_b is bf16, as it lies in the file.
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

// Two floats as f16, `first` in the low half. What lies beyond its range becomes its largest; what is no number stays none.
__device__ __forceinline__ float within_half(float f) {
    asm("max.NaN.f32 %0, %0, 0fC77FE000;\n\tmin.NaN.f32 %0, %0, 0f477FE000;" : "+f"(f));
    return f;
}
__device__ __forceinline__ u32 half_pair(float first, float second) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(within_half(second)), "f"(within_half(first)));
    return pair;
}
// hi + lo carries 22 bits of mantissa: products with it are as good as with f32 against f16 data.
__device__ __forceinline__ uint2 half_split(float first, float second) {
    u32 hi = half_pair(first, second);
    float low, high;
    asm("{\n\t.reg .f16 a, b;\n\tmov.b32 {a, b}, %2;\n\tcvt.f32.f16 %0, a;\n\tcvt.f32.f16 %1, b;\n\t}" : "=f"(low), "=f"(high) : "r"(hi));
    return make_uint2(hi, half_pair(first - low, second - high));
}
// A pair of bf16 as f16: exact where f16 has room for it.
__device__ __forceinline__ u32 halves_of_bf16(u32 pair) { return half_pair(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)); }

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

// The same of f16.
__device__ __forceinline__ void mma_half(float (&c)[4], uint4 a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
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
