// Products of many tokens with one type of weights, in layout `ggml` or, with MMA16, `mma16.v1`, on tensor cores; TYPE names the
// type.
//
// A block makes TM tokens x TN rows of the result. Weights are decoded to f16 once for all of its tokens, 64 columns at a time,
// while the columns before are multiplied. Activations are f16 with a power of two for each row (to_half in rows.cu); sums are
// f32. Both tiles lie in shared memory as rows of 128 bytes whose 16-byte pieces are exchanged by row, so that ldmatrix meets
// every bank once.
#include "blocks.cuh"

typedef TYPE W;

#define TM 128
#define TN 128
#define TK 64
#define THREADS 256
#define TILE_BYTES (TM * TK * 2)
#define STAGES 2
// Blocks of a multiprocessor: one decodes while the other multiplies, where shared memory has room for two.
#if __CUDA_ARCH__ >= 1200
#define RESIDENT 1
#else
#define RESIDENT 2
#endif
#define KERNEL_2(threads) extern "C" __global__ void __launch_bounds__(threads, RESIDENT)

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Piece `piece` of row `row` of a tile.
__device__ __forceinline__ u32 piece_at(int row, int piece) { return row * (TK * 2) + ((piece ^ (row & 7)) << 4); }

__device__ __forceinline__ u32 two_halves(float low, float high) {
    u32 h;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(high), "f"(low));
    return h;
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where a block's tokens come from and go to: the i-th is row in[i] of x and row out[i] of the result.
struct Tokens {
    const int *visits;  // null: the tokens first, first + 1, ...
    int first, count, divisor;
    __device__ __forceinline__ int out_row(int i) const { return visits ? visits[first + i] : first + i; }
    __device__ __forceinline__ int in_row(int i) const { return out_row(i) / divisor; }
};

// The tiles `begin` to `end` of the columns.
__device__ __forceinline__ void product(const u8 *w, const u16 *x, const float *scales, float *out, int rows, int columns,
                                        int stride, Tokens tokens, int begin, int end) {
    extern __shared__ __align__(128) u8 shared[];
    int first_row = blockIdx.x * TN, thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    int warp_row = warp % 4 * 32;
    // A warp's m-th 16 tokens. Both halves of the warps have as many of a tile that is not full, and leave out what it has not.
    auto sixteen = [&](int m) { return m * 32 + warp / 4 * 16; };

    // A thread copies the same piece of four tokens, and decodes the same eight columns of four rows, of every tile. Where a token's columns begin
    // is kept in shared memory, as offsets of 32 bits: the activations of a step are shorter than that, and registers are few.
    __shared__ u32 x_from[TM];
    int piece = thread % 8;
    if (thread < TM) x_from[thread] = (u32)tokens.in_row(min(thread, tokens.count - 1)) * stride;
    __syncthreads();

#ifdef MMA16
    // A warp has 16 rows. What its lanes decode next is asked for before the columns before are multiplied.
    Lane<W> weights;
    const u8 *strip = w + (u64)min(first_row / 16 + warp, rows / 16 - 1) * (columns / 256) * (16 * 256 / W::LEN * W::BYTES);
    auto ask = [&](int tile) {
        if constexpr (Lane<W>::KNOWN)
            if (tile < end) weights.load(strip + (u64)(tile / 4) * (16 * 256 / W::LEN * W::BYTES), tile % 4, lane);
    };
    ask(begin);
#endif
    auto fetch = [&](int tile, int stage) {
        u32 x_tile = shared_address(shared) + stage * 2 * TILE_BYTES;
        u8 *w_tile = shared + stage * 2 * TILE_BYTES + TILE_BYTES;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i * 32 >= tokens.count) break;
            u32 to = x_tile + piece_at(i * 32 + thread / 8, piece);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(x + (x_from[i * 32 + thread / 8] + piece * 8 + tile * TK)));
        }
        asm volatile("cp.async.commit_group;");
#ifdef MMA16
        if constexpr (Lane<W>::KNOWN) {
            int g = lane / 4, t = lane % 4;
#pragma unroll
            for (int high = 0; high < 2; high++) {
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    float2 s = weights.scale(q, high, tile % 4);
                    float v[4];
#pragma unroll
                    for (int j = 0; j < 4; j++) v[j] = fmaf(s.x, __uint_as_float(0x4b000000u | weights.n(q, high, j)) - 8388608.0f, -s.y);
                    *(uint2 *)(w_tile + piece_at(warp * 16 + high * 8 + g, q * 2 + t / 2) + t % 2 * 8) = make_uint2(two_halves(v[0], v[1]), two_halves(v[2], v[3]));
                }
            }
            return ask(tile + 1);
        }
#endif
        int column = tile * TK + piece * 8;
        // Not all four at once: registers are few.
#pragma unroll 2
        for (int i = 0; i < 4; i++) {
            float v[8];
            if (column < columns) {
                decode8<W>(w, min(first_row + i * 32 + thread / 8, rows - 1), column, columns, v);
            } else {
                EACH8 v[j] = 0.0f;
            }
            uint4 halves = make_uint4(two_halves(v[0], v[1]), two_halves(v[2], v[3]), two_halves(v[4], v[5]),
                                      two_halves(v[6], v[7]));
            *(uint4 *)(w_tile + piece_at(i * 32 + thread / 8, piece)) = halves;
        }
    };

    float sums[4][4][4] = {};
    if (begin < end) fetch(begin, begin % STAGES);
    for (int tile = begin; tile < end; tile++) {
        asm volatile("cp.async.wait_group 0;");
        __syncthreads();
        if (tile + 1 < end) fetch(tile + 1, (tile + 1) % STAGES);
        u32 x_tile = shared_address(shared) + tile % STAGES * 2 * TILE_BYTES, w_tile = x_tile + TILE_BYTES;
#pragma unroll
        for (int k = 0; k < TK / 16; k++) {
            u32 b[2][4];
#pragma unroll
            for (int n = 0; n < 2; n++)
                load_matrices(b[n], w_tile + piece_at(warp_row + n * 16 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < 4; m++) {
                if (sixteen(m) >= tokens.count) break;
                u32 a[4];
                load_matrices(a, x_tile + piece_at(sixteen(m) + lane % 16, k * 2 + lane / 16));
#pragma unroll
                for (int n = 0; n < 4; n++) mma(sums[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
            }
        }
    }

    // What the kernel before writes may be read up to here by others.
    wait_for_previous();
#pragma unroll
    for (int m = 0; m < 4; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int t = sixteen(m) + half * 8 + lane / 4;
            if (t >= tokens.count) continue;
            float scale = scales[tokens.in_row(t)];
            float *to = out + (u64)tokens.out_row(t) * rows;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                int row = first_row + warp_row + n * 8 + lane % 4 * 2;
                if (row < rows) to[row] = sums[m][n][half * 2] * scale;
                if (row + 1 < rows) to[row + 1] = sums[m][n][half * 2 + 1] * scale;
            }
        }
    }
}

// out [parts, tokens, rows] = w [rows, columns] x [tokens, stride], in parts of `part` tiles of columns that are to be added up; grid (rows / TN,
// tokens / TM, parts). Launched early, it runs beside the product before it, whose input is its own.
KERNEL_2(THREADS)
gemm(const u8 *w, const u16 *x, const float *scales, float *out, int rows, int columns, int stride, int tokens, int part) {
    start_next();
    int first = blockIdx.y * TM, begin = blockIdx.z * part;
    product(w, x, scales, out + (u64)blockIdx.z * tokens * rows, rows, columns, stride, Tokens{nullptr, first, min(TM, tokens - first), 1},
            begin, min((columns + TK - 1) / TK, begin + part));
}

// out [visits, rows]: every visit's product with its expert. `tiles` [count]: expert, first visit in `order`, visits of a block
// (group_visits in rows.cu); a visit's input is row visit / divisor of x; grid (rows / TN, most tiles)
KERNEL_2(THREADS)
gemm_experts(const u8 *w, const u16 *x, const float *scales, float *out, int rows, int columns, int stride,
             const int *order, const int *tiles, const int *tile_count, int divisor) {
    start_next();
    if (blockIdx.y >= *tile_count) return wait_for_previous();
    const int *tile = tiles + blockIdx.y * 3;
    product(w + (u64)tile[0] * rows * row_bytes<W>(columns), x, scales, out, rows, columns, stride,
            Tokens{order, tile[1], tile[2], divisor}, 0, (columns + TK - 1) / TK);
}
