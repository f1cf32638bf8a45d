// Sums over GPUs that write into each other's memory, in one step.
//
// Every rank has a mailbox that all can write: flags [ranks, BLOCKS], then parts [2, ranks, capacity]. A block of a rank writes
// its values into all mailboxes, then the number of this sum into its flags there, waits for everybody's flags in its own
// mailbox, and adds the parts up in the order of ranks, so that all have the same bits.
//
// The number of a sum is counted on the device, for each block alone, so that recorded work may be repeated. Block b always has
// the same places of the buffer, whatever its length. Parts alternate: a rank writes those of sum e + 2 only after it has seen
// everybody's flag of sum e + 1, which they set after they read those of sum e.
#include "prelude.cuh"

#define THREADS 512
#define BLOCKS 32
#define CHUNK 1024
// A rank that has not come by then will not: nanoseconds.
#define PATIENCE 10000000000ull

__device__ __forceinline__ u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

__device__ __forceinline__ void set_flag(u32 *flag, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ u32 read_flag(const u32 *flag) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

// `mailboxes` [ranks]: addresses; `counts` [BLOCKS]: sums so far; grid (at most BLOCKS, as many as len has chunks)
KERNEL(THREADS)
peer_sum(float *buffer, const u64 *mailboxes, u32 *counts, int rank, int ranks, int len, int capacity, u64 flag_bytes) {
    __shared__ u32 number;
    int block = blockIdx.x, thread = threadIdx.x;
    if (thread == 0) number = counts[block] + 1;
    __syncthreads();
    u32 epoch = number;
    u64 set = (u64)(epoch & 1) * ranks * capacity;
    for (int first = block * CHUNK; first < len; first += BLOCKS * CHUNK) {
        for (int i = first + thread; i < min(first + CHUNK, len); i += THREADS) {
            float value = buffer[i];
            for (int to = 0; to < ranks; to++) {
                float *parts = (float *)(mailboxes[to] + flag_bytes);
                __stcg(parts + set + (u64)rank * capacity + i, value);
            }
        }
    }
    __threadfence_system();
    __syncthreads();
    if (thread < ranks) {
        set_flag((u32 *)mailboxes[thread] + rank * BLOCKS + block, epoch);
        const u32 *flag = (const u32 *)mailboxes[rank] + thread * BLOCKS + block;
        u64 started = now();
        // A flag may be one sum ahead already.
        while ((int)(read_flag(flag) - epoch) < 0) {
            if (now() - started > PATIENCE) asm volatile("trap;");
        }
    }
    __syncthreads();
    const float *parts = (const float *)(mailboxes[rank] + flag_bytes) + set;
    for (int first = block * CHUNK; first < len; first += BLOCKS * CHUNK) {
        for (int i = first + thread; i < min(first + CHUNK, len); i += THREADS) {
            float sum = __ldcg(parts + i);
            for (int from = 1; from < ranks; from++) sum += __ldcg(parts + (u64)from * capacity + i);
            buffer[i] = sum;
        }
    }
    if (thread == 0) counts[block] = epoch;
}
